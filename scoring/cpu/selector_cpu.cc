#include "include/types/log_sum_exp.h"
#include "scoring/cpu/priority_cpu.h"
#include "scoring/cpu/recall_cpu.h"
#include "scoring/cpu/selector_call_cpu.h"
#include "scoring/cpu/top_k_cpu.h"
#include "scoring/score_math.h"
#include "scoring/two_phase.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace kvtier::scoring::cpu {

namespace {

// Writes the tokens of [begin, end) with a mask; `bias_of(head, token)`.
template <typename BiasOf>
void write_masked(const Call& call, int query_index, int kv_head, std::int64_t begin,
                  std::int64_t end, const BiasOf& bias_of) {
  const std::uint16_t* mask = call.token_mask(query_index, kv_head);
  SelectionWriter writer(call.selection(), std::int64_t{query_index} * call.kv_heads() + kv_head);
  for (std::int64_t token = begin; token < end; ++token) {
    if (mask[token] == 0) continue;
    writer.add(token, mask[token],
               [&](int h) { return ((mask[token] >> h) & 1) != 0 ? bias_of(h, token) : 0.0F; });
  }
  writer.finish();
}

// Of ln p where the scores of (query, KV head, h) are what the set is ordered by.
float log_least(const Call& call, int query_index, int kv_head, int h) {
  const ScoreParams& params = call.request().params;
  if (params.threshold <= 0.0F) return -std::numeric_limits<float>::infinity();
  if (!call.per_query_head()) return std::log(params.threshold);
  const std::int64_t first_tile = call.spans(query_index).sink_end / kTileTokens;
  return std::log(params.threshold) +
         call.partials(query_index, kv_head)[h * call.partial_stride() + first_tile].sum;
}

void choose_shared(const Call& call, int query_index, int kv_head, std::int64_t k) {
  const AttendedSpans& spans = call.spans(query_index);
  SelectionWriter writer(call.selection(), std::int64_t{query_index} * call.kv_heads() + kv_head);
  const std::uint16_t mask = all_heads(call.group());
  if (call.prioritised()) {
    if (spans.num_eligible() > 0) {
      const PrioritySet set(priority_key(call.request().params, kv_head), spans.sink_end,
                            call.combined(query_index, kv_head) + spans.sink_end,
                            spans.num_eligible(), k, log_least(call, query_index, kv_head, 0));
      set.visit([&](std::int64_t i) {
        writer.add(spans.sink_end + i, mask, [&](int) { return set.bias(i); });
      });
    }
    return writer.finish();
  }
  visit_top_k(
      call.order(query_index, kv_head) + spans.sink_end, spans.num_eligible(), k,
      [&](std::int64_t i) { writer.add(spans.sink_end + i, mask, [](int) { return 0.0F; }); });
  writer.finish();
}

// Tokens of each query head of a group.
using HeadCounts = std::array<std::int64_t, kMaxGroup>;

void choose_per_query_head(const Call& call, int query_index, int kv_head,
                           const HeadCounts& counts) {
  const AttendedSpans& spans = call.spans(query_index);
  std::uint16_t* mask = call.token_mask(query_index, kv_head) + spans.sink_end;
  std::fill_n(mask, spans.num_eligible(), std::uint16_t{0});
  std::vector<PrioritySet> sets;
  for (int h = 0; h < call.group() && spans.num_eligible() > 0; ++h) {
    float* scores = call.scores(query_index, kv_head) + h * call.max_tokens() + spans.sink_end;
    const auto take = [mask, bit = static_cast<std::uint16_t>(1U << h)](std::int64_t i) {
      mask[i] = static_cast<std::uint16_t>(mask[i] | bit);
    };
    const std::int64_t k = counts[static_cast<std::size_t>(h)];
    if (call.prioritised()) {
      sets.emplace_back(priority_key(call.request().params, kv_head * call.group() + h),
                        spans.sink_end, scores, spans.num_eligible(), k,
                        log_least(call, query_index, kv_head, h));
      sets.back().visit(take);
    } else {
      visit_top_k(scores, spans.num_eligible(), k, take);
    }
  }
  write_masked(call, query_index, kv_head, spans.sink_end, spans.eligible_end,
               [&](int h, std::int64_t token) {
                 return sets[static_cast<std::size_t>(h)].bias(token - spans.sink_end);
               });
}

void choose(const Call& call, int query_index, int kv_head, std::int64_t k) {
  if (!call.per_query_head()) return choose_shared(call, query_index, kv_head, k);
  HeadCounts counts;
  counts.fill(k);
  choose_per_query_head(call, query_index, kv_head, counts);
}

// At most `most` tokens of each set.
void choose_within(const Call& call, const RecallParams& recall_params, int query_index,
                   int kv_head, std::int64_t most) {
  const AttendedSpans& spans = call.spans(query_index);
  const int group = call.group();
  const EstimatedMass mass({.request = call.request(),
                            .recall_params = recall_params,
                            .scalars = call.group_query(query_index, kv_head).scalars,
                            .query_index = query_index,
                            .kv_head = kv_head,
                            .spans = spans,
                            .scores = call.scores(query_index, kv_head) + spans.sink_end,
                            .head_stride = call.max_tokens()});
  const auto scores = [&](int h) {
    return call.scores(query_index, kv_head) + h * call.max_tokens() + spans.sink_end;
  };
  if (call.per_query_head()) {
    HeadCounts counts{};
    for (int h = 0; h < group; ++h) {
      counts[static_cast<std::size_t>(h)] = mass.num_to_keep(scores(h), h, 1, most);
    }
    choose_per_query_head(call, query_index, kv_head, counts);
  } else {
    const float* order = call.order(query_index, kv_head) + spans.sink_end;
    choose_shared(call, query_index, kv_head, mass.num_to_keep(order, 0, group, most));
  }
  const transfer::SelectionView& view = call.selection();
  const std::int64_t slot = std::int64_t{query_index} * call.kv_heads() + kv_head;
  for (int h = 0; h < group; ++h) {
    call.rest_logs(query_index, kv_head)[h] =
        mass.log_of_rest(h, view.ids + slot * view.capacity, view.head_mask + slot * view.capacity,
                         view.counts[slot]);
  }
}

// Query heads of the group of `kv_head` that head `head` of an id tensor speaks for: of all groups
// alike where it has one head, and then group 0 is named.
struct HeadOfTensor {
  int kv_head;
  std::uint16_t mask;
};
HeadOfTensor head_of_tensor(const Call& call, const IdTensor& ids, int head) {
  if (ids.heads == 1 || ids.heads == call.kv_heads()) return {head, all_heads(call.group())};
  assert(ids.heads == call.query_heads());
  return {head / call.group(), static_cast<std::uint16_t>(1U << (head % call.group()))};
}

// The score of a token, of which a selection by priority has kept the priority.
float score_of(const Call& call, float kept, int set, std::int64_t token) {
  const ScoreParams& params = call.request().params;
  if (!call.prioritised()) return kept;
  const ScoreParams last = params.coarse_bits > 0 ? fine_phase(params) : params;
  return score_of_priority(priority_key(last, set), token, kept);
}

float best_score(const Call& call, int query_index, const HeadOfTensor& head, std::int64_t token) {
  if (!call.per_query_head()) {
    return score_of(call, call.combined(query_index, head.kv_head)[token], head.kv_head, token);
  }
  float best = -std::numeric_limits<float>::infinity();
  for (int h = 0; h < call.group(); ++h) {
    if (((head.mask >> h) & 1) == 0) continue;
    const float kept = call.scores(query_index, head.kv_head)[h * call.max_tokens() + token];
    best = std::max(best, score_of(call, kept, head.kv_head * call.group() + h, token));
  }
  return best;
}

// Copies the sketches of the tokens of a tile from their slots, in a thread's own block of one KV
// head, so that a tile is a run as ever.
SketchTile tile_of_slots(const SelectRequest& request, int sequence, int kv_head,
                         std::int64_t first, int count) {
  const hashing::SketchGeometry& from = request.sketch;
  const hashing::SketchGeometry to{.kv_heads = 1, .num_planes = from.num_planes};
  thread_local std::vector<std::byte> memory;
  memory.resize(std::max(memory.size(), static_cast<std::size_t>(to.block_bytes())));
  const std::int32_t* table = request.slots.of(sequence);
  const int block_tokens = request.slots.block_tokens;
  for (int i = 0; i < count;) {
    const std::int64_t token = first + i;
    const std::int64_t run = std::min<std::int64_t>(count - i, block_tokens - token % block_tokens);
    const std::int64_t slot = transfer::slot_of(table, block_tokens, token);
    const std::byte* block = request.sketches[sequence][slot / hashing::kBlockTokens];
    const auto at = static_cast<int>(slot % hashing::kBlockTokens);
    const auto copy = [&](std::int64_t to_offset, std::int64_t from_offset, std::int64_t bytes) {
      std::memcpy(memory.data() + to_offset, block + from_offset, static_cast<std::size_t>(bytes));
    };
    const int together = from.token_stride() / hashing::kChunkBytes;
    for (int chunk = 0; chunk < from.chunks(); chunk += together) {
      copy(to.chunk_offset(0, chunk, i), from.chunk_offset(kv_head, chunk, at),
           run * from.token_stride());
    }
    copy(to.norms_offset(0, i), from.norms_offset(kv_head, at), run * hashing::kNormBytes);
    i += static_cast<int>(run);
  }
  return {.block = memory.data(), .kv_head = 0, .first = 0, .count = count};
}

}  // namespace

void score(const Call& call) {
  const SelectRequest& request = call.request();
  call.for_each_group([&](int query_index, int kv_head) {
    if (call.spans(query_index).num_eligible() > 0) {
      prepare_group(request.params, call.group_query(query_index, kv_head));
    }
  });
  call.for_each_tile([&](int query_index, int kv_head, std::int64_t first, int count) {
    const int sequence = request.query_batch[query_index].sequence;
    hashing::SketchGeometry sketch = request.sketch;
    SketchTile tile;
    if (request.slots.blocks != nullptr) {
      tile = tile_of_slots(request, sequence, kv_head, first, count);
      sketch.kv_heads = 1;
    } else {
      tile = {.block = request.sketches[sequence][first / hashing::kBlockTokens],
              .kv_head = kv_head,
              .first = static_cast<int>(first % hashing::kBlockTokens),
              .count = count};
    }
    score_tile(request.params, sketch, call.group_query(query_index, kv_head), tile,
               call.scores(query_index, kv_head) + first, call.max_tokens(),
               call.partials(query_index, kv_head) + first / kTileTokens, call.partial_stride());
  });
}

// Normalises the heads, and combines those that share a set.
void combine(const Call& call) {
  const ScoreParams& params = call.request().params;
  std::vector<float> totals(static_cast<std::size_t>(call.num_queries() * call.query_heads()));
  call.for_each_group([&](int query_index, int kv_head) {
    const AttendedSpans& spans = call.spans(query_index);
    if (spans.num_eligible() == 0) return;
    const std::int64_t first = spans.sink_end / kTileTokens;
    TilePartial* partials = call.partials(query_index, kv_head);
    for (int h = 0; h < call.group(); ++h) {
      TilePartial* head = partials + h * call.partial_stride();
      float& total = head[first].sum;
      total = merge_partials(params, head + first, tiles_of(spans.eligible_end) - first);
      if (params.threshold > 0.0F) {
        const double static_log =
            log_of_static(call.request(), {query_index, kv_head, h}, spans, params.weighting);
        total = static_cast<float>(log_add(static_cast<double>(total), static_log));
      }
      const int query_head = query_index * call.query_heads() + kv_head * call.group() + h;
      totals[static_cast<std::size_t>(query_head)] = total;
    }
  });
  if (call.per_query_head()) return;
  const int heads = call.per_sequence() ? call.query_heads() : call.group();
  call.for_each_tile([&](int query_index, int kv_head, std::int64_t first, int count) {
    if (call.per_sequence() && kv_head > 0) return;
    float* const combined = call.combined(query_index, kv_head) + first;
    combine_tile(params, call.scores(query_index, kv_head) + first, call.max_tokens(),
                 totals.data() + query_index * call.query_heads() + kv_head * call.group(), heads,
                 count, combined);
    for (int other = 1; call.per_sequence() && other < call.kv_heads(); ++other) {
      std::copy_n(combined, count, combined + other * call.max_tokens());
    }
  });
}

std::size_t scratch_bytes(const SelectorLimits& limits) {
  const auto groups =
      static_cast<std::size_t>(limits.num_queries) * static_cast<std::size_t>(limits.kv_heads);
  const auto heads =
      static_cast<std::size_t>(limits.num_queries) * static_cast<std::size_t>(limits.query_heads);
  const int group = limits.query_heads / limits.kv_heads;
  return groups * aligned(prepared_bytes(group)) +
         aligned(heads * static_cast<std::size_t>(tiles_of(limits.max_tokens)) *
                 sizeof(TilePartial));
}

void select(const SelectRequest& request, const SelectorWorkspace& workspace,
            const RecallParams& recall_params) {
  if (request.params.coarse_bits > 0) return select_in_two_phases(request, workspace);
  const Call call(request, workspace);
  score(call);
  if (!call.per_query_head() || request.params.threshold > 0.0F) combine(call);
  call.for_each_group([&](int query_index, int kv_head) {
    const std::int64_t k = transfer::num_to_select(request.params.top_k, request.params.sparsity,
                                                   call.spans(query_index));
    recall_params.active ? choose_within(call, recall_params, query_index, kv_head, k)
                         : choose(call, query_index, kv_head, k);
  });
  std::int64_t scored = 0;
  for (int query_index = 0; query_index < call.num_queries(); ++query_index) {
    scored += call.spans(query_index).num_eligible() * call.kv_heads();
  }
  transfer::cpu::count(request.flags, &transfer::StepFlags::tokens_scored, scored);
}

void adopt(const SelectRequest& request, const SelectorWorkspace& workspace, const IdTensor& ids,
           const IdFloats& bias) {
  const Call call(request, workspace);
  call.for_each_group([&](int query_index, int kv_head) {
    const AttendedSpans& spans = call.spans(query_index);
    std::uint16_t* mask = call.token_mask(query_index, kv_head);
    std::fill(mask + spans.sink_end, mask + spans.tail_begin, std::uint16_t{0});
    // Biases wait where the scores of a selection would be.
    float* biases = call.scores(query_index, kv_head);
    for (int head = 0; head < ids.heads; ++head) {
      const HeadOfTensor target = head_of_tensor(call, ids, head);
      if (ids.heads > 1 && target.kv_head != kv_head) continue;
      const std::int32_t* from = ids.data + query_index * ids.query_stride + head * ids.head_stride;
      const int own = ids.heads > call.kv_heads() ? head % call.group() : 0;
      for (std::int64_t i = 0; i < ids.n; ++i) {
        const std::int64_t token = from[i];
        if (token < spans.sink_end || token >= spans.tail_begin) continue;
        if (bias.data != nullptr) {
          const float given =
              bias.data[query_index * bias.query_stride + head * bias.head_stride + i];
          float& kept = biases[own * call.max_tokens() + token];
          const bool again = (mask[token] & target.mask) != 0;
          kept = again ? std::max(kept, given) : given;
        }
        mask[token] = static_cast<std::uint16_t>(mask[token] | target.mask);
      }
    }
    write_masked(call, query_index, kv_head, spans.sink_end, spans.tail_begin,
                 [&](int h, std::int64_t token) { return biases[h * call.max_tokens() + token]; });
  });
}

void export_ids(const SelectRequest& request, const SelectorWorkspace& workspace,
                const IdTensor& out, const IdFloats& bias) {
  const Call call(request, workspace);
  const transfer::SelectionView& view = workspace.selection;
  for (int query_index = 0; query_index < call.num_queries(); ++query_index) {
    for (int head = 0; head < out.heads; ++head) {
      const HeadOfTensor source = head_of_tensor(call, out, head);
      const std::int64_t slot = std::int64_t{query_index} * call.kv_heads() + source.kv_head;
      const int own = view.bias_heads == 1 ? 0 : head % call.group();
      std::int32_t* to = out.data + query_index * out.query_stride + head * out.head_stride;
      float* bias_to = bias.data != nullptr
                           ? bias.data + query_index * bias.query_stride + head * bias.head_stride
                           : nullptr;
      std::int64_t used = 0;
      for (std::int64_t i = 0; i < view.counts[slot] && used < out.n; ++i) {
        const std::int64_t entry = slot * view.capacity + i;
        if ((view.head_mask[entry] & source.mask) == 0) continue;
        if (bias_to != nullptr) bias_to[used] = view.bias[entry * view.bias_heads + own];
        to[used++] = view.ids[entry];
      }
      std::fill(to + used, to + out.n, -1);
      if (bias_to != nullptr) std::fill(bias_to + used, bias_to + out.n, 0.0F);
    }
  }
}

void export_scores(const SelectRequest& request, const SelectorWorkspace& workspace,
                   const IdTensor& ids, const IdFloats& out) {
  const Call call(request, workspace);
  for (int query_index = 0; query_index < call.num_queries(); ++query_index) {
    const AttendedSpans& spans = call.spans(query_index);
    for (int head = 0; head < ids.heads; ++head) {
      const HeadOfTensor source = head_of_tensor(call, ids, head);
      const std::int32_t* from = ids.data + query_index * ids.query_stride + head * ids.head_stride;
      float* to = out.data + query_index * out.query_stride + head * out.head_stride;
      for (std::int64_t i = 0; i < ids.n; ++i) {
        const bool scored = from[i] >= spans.sink_end && from[i] < spans.eligible_end;
        to[i] = scored ? best_score(call, query_index, source, from[i])
                       : -std::numeric_limits<float>::infinity();
      }
    }
  }
}

}  // namespace kvtier::scoring::cpu
