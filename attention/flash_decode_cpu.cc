#include "attention/flash_decode_kernels.h"
#include "attention/flash_decode_simd.h"
#include "include/types/float16.h"
#include "transfer/device/parallel.h"
#include "transfer/kv/page_rows.h"
#include "transfer/kv/row_convert.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace kvtier::attention::cpu {
namespace {

using transfer::AttendedSpans;
using transfer::KvGeometry;
using transfer::SequenceView;

// Rows converted to fp32 together: 32 KiB of K and V at head_dim 128, so that they stay in the
// second-level cache while every query and head of the group passes over them.
constexpr int kTileRows = 32;
constexpr int kMaxHeadDim = 256;
// Tokens of one split. Splits depend on the call's limits alone, never on the number of threads, so
// the result does not either.
constexpr std::int64_t kSplitTokens = 512;
constexpr int kMaxSplits = 32;

/// Partial results of one part (spans, selected rows). Unnormalised accumulators.
struct PartialView {
  float* out = nullptr;           ///< `[queries][query_heads][kMaxSplits][head_dim]`
  SoftmaxState* state = nullptr;  ///< `[queries][query_heads][kMaxSplits]`
  int splits = 0;                 ///< Those in use.
};
using PartialParts = std::array<PartialView, 2>;

std::size_t num_partials(const FlashDecodeLimits& limits) {
  return static_cast<std::size_t>(limits.num_queries) *
         static_cast<std::size_t>(limits.query_heads) * kMaxSplits;
}

/// K and V of up to kTileRows tokens in fp32, a row as it is stored: K then V.
struct Tile {
  alignas(64) std::array<float, std::size_t{kTileRows} * 2 * kMaxHeadDim> values;
};

struct RowCounts {
  std::int64_t host = 0, resident = 0;
};

void count_rows(const AttendRequest& request, const RowCounts& counts) {
  transfer::cpu::count(request.flags, &transfer::StepFlags::rows_fetched_host, counts.host);
  transfer::cpu::count(request.flags, &transfer::StepFlags::rows_resident, counts.resident);
}

/// Returns whether a token's row is in its page only, in memory across the host link.
bool in_host_page(const AttendRequest& request, std::int64_t resident_begin, std::int64_t token) {
  if (request.pages_on_device || token < request.kv.sink_capacity) return false;
  return request.kv.recent_capacity == 0 || token < resident_begin;
}

/// The running softmax of one (query, query head) over the tokens of one split.
struct Accumulator {
  const float* query = nullptr;  ///< `[head_dim]`, times the softmax scale.
  float* out = nullptr;          ///< `[head_dim]`
  SoftmaxState* state = nullptr;
};

/// What is added to the logits of a tile's rows: row i at `values[i * stride]`; null: nothing.
struct TileBias {
  const float* values = nullptr;
  int stride = 1;
};

void attend_tile(const AttendRequest& request, const Tile& tile, const std::int32_t* index,
                 int count, const TileBias& bias, const Accumulator& acc) {
  if (count == 0) return;
  const int d = request.kv.head_dim;
  const std::int64_t stride = 2 * std::int64_t{d};
  std::array<float, kTileRows> logits;
  dot_rows(acc.query, tile.values.data(), stride, index, count, d, logits.data());
  if (request.logit_softcap > 0.0F) {
    for (int i = 0; i < count; ++i) {
      float& logit = logits[static_cast<std::size_t>(i)];
      logit = soft_cap(logit, request.logit_softcap);
    }
  }
  if (bias.values != nullptr) {
    for (int i = 0; i < count; ++i) {
      logits[static_cast<std::size_t>(i)] += bias.values[std::int64_t{index[i]} * bias.stride];
    }
  }
  SoftmaxState tile_state;
  tile_state.max = max_of(logits.data(), count);
  const float max = std::max(acc.state->max, tile_state.max);
  tile_state.max = max;
  tile_state.sum = exp_and_sum(logits.data(), count, max);
  const MergeWeights weights = merge(*acc.state, tile_state);
  *acc.state = weights.state;
  accumulate_rows(acc.out, weights.a, logits.data(), tile.values.data() + d, stride, index, count,
                  d);
}

/// Clears the partial results of (query, KV head, split) and pairs them with the scaled queries.
void open_accumulators(const AttendRequest& request, const PartialView& partial, int query_index,
                       int kv_head, int split, float* queries, Accumulator* accumulators) {
  const KvGeometry& kv = request.kv;
  const int group = kv.group;
  for (int h = 0; h < group; ++h) {
    const std::int64_t head = std::int64_t{query_index} * kv.query_heads() + kv_head * group + h;
    const std::int64_t slot = head * kMaxSplits + split;
    float* query = queries + std::int64_t{h} * kv.head_dim;
    const float* source = request.queries + head * kv.head_dim;
    for (int x = 0; x < kv.head_dim; ++x) query[x] = source[x] * request.softmax_scale;
    accumulators[h] = {query, partial.out + slot * kv.head_dim, partial.state + slot};
    std::fill_n(accumulators[h].out, kv.head_dim, 0.0F);
    *accumulators[h].state = {};
  }
}

/// What a split has of `count` tokens.
struct Part {
  Part(std::int64_t count, int split, int splits) {
    const std::int64_t each = (count + splits - 1) / splits;
    begin = std::min(count, split * each);
    end = std::min(count, begin + each);
  }
  std::int64_t begin = 0, end = 0;
};

/// Queries of one sequence that stand next to each other in the batch; they share conversions.
struct QueryRun {
  int begin = 0;
  int end = 0;
};

std::vector<QueryRun> query_runs(const transfer::QueryBatch& query_batch) {
  std::vector<QueryRun> runs;
  for (int r = 0; r < query_batch.count; ++r) {
    if (runs.empty() || query_batch[r].sequence != query_batch[runs.back().begin].sequence) {
      runs.push_back({r, r});
    }
    runs.back().end = r + 1;
  }
  return runs;
}

/// The union of the always-attended tokens of a run: [0, head_end) and [tail_begin, tail_end).
struct SpanUnion {
  std::int64_t head_end = 0;
  std::int64_t tail_begin = 0;
  std::int64_t tail_end = 0;

  [[nodiscard]] std::int64_t size() const { return head_end + tail_end - tail_begin; }
  [[nodiscard]] std::int64_t token(std::int64_t i) const {
    return i < head_end ? i : i - head_end + tail_begin;
  }
};

std::vector<AttendedSpans> spans_of(const AttendRequest& request, const QueryRun& run) {
  std::vector<AttendedSpans> spans;
  for (int r = run.begin; r < run.end; ++r) {
    const transfer::QueryToken& query = request.query_batch[r];
    const std::int64_t length = request.sequences[query.sequence].counters->length;
    spans.push_back(transfer::attended_spans(request.rule, length, query));
  }
  return spans;
}

SpanUnion unite(const std::vector<AttendedSpans>& spans) {
  SpanUnion all{0, std::numeric_limits<std::int64_t>::max(), 0};
  for (const AttendedSpans& s : spans) {
    all.head_end = std::max(all.head_end, s.sink_end);
    all.tail_begin = std::min(all.tail_begin, s.tail_begin);
    all.tail_end = std::max(all.tail_end, s.visible);
  }
  all.tail_begin = std::min(all.tail_begin, all.tail_end);
  all.head_end = std::min(all.head_end, all.tail_begin);
  return all;
}

/// Converts the rows of tokens to fp32, as many at a time as can be had.
void fill_tile(const AttendRequest& request, int sequence_index, std::int64_t resident_begin,
               int kv_head, std::span<const std::int64_t> tokens, float* to, RowSource* source) {
  const KvGeometry& kv = request.kv;
  const SequenceView& sequence = request.sequences[sequence_index];
  const bool together = source == nullptr || source->hold(sequence_index, tokens);
  for (const std::int64_t& token : tokens) {
    if (!together) (void)source->hold(sequence_index, {&token, 1});
    transfer::cpu::read_row(kv, sequence, resident_begin, kv_head, token, to);
    to += std::int64_t{2} * kv.head_dim;
  }
}

void attend_spans(const AttendRequest& request, const PartialView& partial, const QueryRun& run,
                  int kv_head, int split, RowSource* source) {
  const KvGeometry& kv = request.kv;
  const auto group = static_cast<std::size_t>(kv.group);
  const auto num_queries = static_cast<std::size_t>(run.end - run.begin);
  const SequenceView& sequence = request.sequences[request.query_batch[run.begin].sequence];
  const std::int64_t resident_begin = sequence.counters->resident_begin;

  std::vector<float> queries(num_queries * group * static_cast<std::size_t>(kv.head_dim));
  std::vector<Accumulator> accumulators(num_queries * group);
  for (std::size_t r = 0; r < num_queries; ++r) {
    open_accumulators(request, partial, run.begin + static_cast<int>(r), kv_head, split,
                      queries.data() + r * group * static_cast<std::size_t>(kv.head_dim),
                      accumulators.data() + r * group);
  }

  const std::vector<AttendedSpans> spans = spans_of(request, run);
  const SpanUnion all = unite(spans);
  const Part part(all.size(), split, partial.splits);
  RowCounts counts;
  Tile tile;
  std::array<std::int64_t, kTileRows> tokens;
  std::array<std::int32_t, kTileRows> index;
  for (std::int64_t begin = part.begin; begin < part.end; begin += kTileRows) {
    const auto filled =
        static_cast<std::size_t>(std::min<std::int64_t>(kTileRows, part.end - begin));
    for (std::size_t i = 0; i < filled; ++i) {
      tokens[i] = all.token(begin + static_cast<std::int64_t>(i));
    }
    fill_tile(request, request.query_batch[run.begin].sequence, resident_begin, kv_head,
              {tokens.data(), filled}, tile.values.data(), source);
    for (std::size_t r = 0; r < num_queries; ++r) {
      int seen = 0;
      for (std::size_t i = 0; i < filled; ++i) {
        const bool attended = tokens[i] < spans[r].sink_end ||
                              (tokens[i] >= spans[r].tail_begin && tokens[i] < spans[r].visible);
        if (!attended) continue;
        index[static_cast<std::size_t>(seen++)] = static_cast<std::int32_t>(i);
        in_host_page(request, resident_begin, tokens[i]) ? ++counts.host : ++counts.resident;
      }
      for (std::size_t h = 0; h < group; ++h) {
        attend_tile(request, tile, index.data(), seen, {}, accumulators[r * group + h]);
      }
    }
  }
  count_rows(request, counts);
}

void attend_selected(const AttendRequest& request, const transfer::SelectionView& selection,
                     const PartialView& partial, int query_index, int kv_head, int split,
                     RowSource* source) {
  const KvGeometry& kv = request.kv;
  const auto group = static_cast<std::size_t>(kv.group);
  const SequenceView& sequence = request.sequences[request.query_batch[query_index].sequence];
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  std::vector<float> queries(group * static_cast<std::size_t>(kv.head_dim));
  std::vector<Accumulator> accumulators(group);
  open_accumulators(request, partial, query_index, kv_head, split, queries.data(),
                    accumulators.data());

  const std::int64_t list = std::int64_t{query_index} * kv.kv_heads + kv_head;
  const std::int32_t* ids = selection.ids + list * selection.capacity;
  const std::uint16_t* masks = selection.head_mask + list * selection.capacity;
  const std::int64_t count = selection.counts[list];
  const std::int64_t num_staged = std::min(count, selection.staged_capacity);
  const Part part(count, split, partial.splits);
  RowCounts counts;
  Tile tile;
  std::array<std::int64_t, kTileRows> tokens;
  std::array<std::int32_t, kTileRows> index;
  for (std::int64_t begin = part.begin; begin < part.end; begin += kTileRows) {
    const std::int64_t filled = std::min<std::int64_t>(kTileRows, part.end - begin);
    const std::int64_t staged = std::clamp<std::int64_t>(num_staged - begin, 0, filled);
    for (std::int64_t i = 0; i < staged; ++i) {
      const std::byte* row_bytes =
          selection.staged + (list * selection.staged_capacity + begin + i) * kv.row_bytes();
      transfer::cpu::to_float(row_bytes, kv.dtype, tile.values.data() + i * 2 * kv.head_dim,
                              std::int64_t{2} * kv.head_dim);
    }
    for (std::int64_t i = staged; i < filled; ++i) {
      const std::int32_t id = ids[begin + i];
      assert(id >= 0);
      tokens[static_cast<std::size_t>(i)] = id;
      in_host_page(request, resident_begin, id) ? ++counts.host : ++counts.resident;
    }
    fill_tile(request, request.query_batch[query_index].sequence, resident_begin, kv_head,
              {tokens.data() + staged, tokens.data() + filled},
              tile.values.data() + staged * 2 * kv.head_dim, source);
    for (std::size_t h = 0; h < group; ++h) {
      int seen = 0;
      for (std::int64_t i = 0; i < filled; ++i) {
        if (((masks[begin + i] >> h) & 1U) == 0) continue;
        index[static_cast<std::size_t>(seen++)] = static_cast<std::int32_t>(i);
      }
      TileBias bias{.stride = selection.bias_heads};
      if (selection.bias != nullptr) {
        bias.values = selection.bias + (list * selection.capacity + begin) * selection.bias_heads +
                      (selection.bias_heads == 1 ? 0 : static_cast<std::int64_t>(h));
      }
      attend_tile(request, tile, index.data(), seen, bias, accumulators[h]);
    }
  }
  count_rows(request, counts);
}

/// Writes sums of values, over the sum of `total`.
void store_normalised(DType dtype, const float* sums, const SoftmaxState& total, int count,
                      void* out, std::int64_t offset) {
  with_float_type(dtype, [&](auto type) {
    using Stored = decltype(type);
    std::byte* to =
        static_cast<std::byte*>(out) + offset * static_cast<std::int64_t>(sizeof(Stored));
    for (int x = 0; x < count; ++x) {
      const Stored stored = Stored::from_float(sums[x] * total.inverse_sum());
      std::memcpy(to + static_cast<std::size_t>(x) * sizeof(Stored), &stored, sizeof(Stored));
    }
  });
}

int num_splits(std::int64_t tokens) {
  return static_cast<int>(
      std::clamp<std::int64_t>((tokens + kSplitTokens - 1) / kSplitTokens, 1, kMaxSplits));
}

/// Attends each of `units`, runs of queries or queries, in all splits and KV heads: all at a time,
/// or with a `source` one split after the other. `tokens_of(unit, split, tokens)` adds the tokens
/// that the KV heads read, and returns their sequence.
template <typename TokensOf, typename Attend>
void attend_splits(std::int64_t units, int kv_heads, int splits, RowSource* source,
                   const TokensOf& tokens_of, const Attend& attend) {
  if (source == nullptr) {
    return transfer::parallel_for_each(units * kv_heads * splits, 1, [&](std::int64_t i) {
      attend(i / splits / kv_heads, static_cast<int>(i / splits % kv_heads),
             static_cast<int>(i % splits), nullptr);
    });
  }
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < units * splits; ++i) {
    const auto split = static_cast<int>(i % splits);
    tokens.clear();
    const int sequence = tokens_of(i / splits, split, tokens);
    // Together where the rows of all KV heads can be had together, else a tile or a row at a time.
    if (source->hold(sequence, tokens)) {
      transfer::parallel_for_each(kv_heads, 1, [&](std::int64_t head) {
        attend(i / splits, static_cast<int>(head), split, nullptr);
      });
      continue;
    }
    for (int head = 0; head < kv_heads; ++head) attend(i / splits, head, split, source);
  }
}

void attend_spans(const AttendRequest& request, const PartialView& partial, RowSource* source) {
  const std::vector<QueryRun> runs = query_runs(request.query_batch);
  attend_splits(
      std::ssize(runs), request.kv.kv_heads, partial.splits, source,
      [&](std::int64_t unit, int split, std::vector<std::int64_t>& tokens) {
        const QueryRun& run = runs[static_cast<std::size_t>(unit)];
        const SpanUnion all = unite(spans_of(request, run));
        const Part part(all.size(), split, partial.splits);
        for (std::int64_t i = part.begin; i < part.end; ++i) tokens.push_back(all.token(i));
        return request.query_batch[run.begin].sequence;
      },
      [&](std::int64_t unit, int head, int split, RowSource* from) {
        attend_spans(request, partial, runs[static_cast<std::size_t>(unit)], head, split, from);
      });
}

void attend_selected(const AttendRequest& request, const transfer::SelectionView& selection,
                     const PartialView& partial, RowSource* source) {
  const int heads = request.kv.kv_heads;
  attend_splits(
      request.query_batch.count, heads, partial.splits, source,
      [&](std::int64_t query_index, int split, std::vector<std::int64_t>& tokens) {
        for (std::int64_t list = query_index * heads; list < (query_index + 1) * heads; ++list) {
          const Part part(selection.counts[list], split, partial.splits);
          const std::int32_t* ids = selection.ids + list * selection.capacity;
          tokens.insert(tokens.end(), ids + part.begin, ids + part.end);
        }
        return request.query_batch[static_cast<int>(query_index)].sequence;
      },
      [&](std::int64_t query_index, int head, int split, RowSource* from) {
        attend_selected(request, selection, partial, static_cast<int>(query_index), head, split,
                        from);
      });
}

void count_selected(const AttendRequest& request, const transfer::SelectionView& selection) {
  if (selection.staged_capacity > 0) return;
  const int lists = request.query_batch.count * request.kv.kv_heads;
  transfer::cpu::count(
      request.flags, &transfer::StepFlags::rows_selected,
      std::accumulate(selection.counts, selection.counts + lists, std::int64_t{0}));
}

void merge(const AttendRequest& request, const PartialParts& parts, const OutputBatch& outputs) {
  const int d = request.kv.head_dim;
  const std::int64_t heads = request.kv.query_heads();
  transfer::parallel_for_each(request.query_batch.count * heads, 8, [&](std::int64_t i) {
    std::array<float, kMaxHeadDim> sum{};
    SoftmaxState total;
    const auto visit = [&](const auto& take) {
      for (const PartialView& part : parts) {
        for (std::int64_t slot = i * kMaxSplits; slot < i * kMaxSplits + part.splits; ++slot) {
          if (part.state[slot].sum != 0.0F) take(part.state[slot], part.out + slot * d);
        }
      }
    };
    visit([&](const SoftmaxState& state, const float*) {
      total.max = std::max(total.max, state.max);
    });
    visit([&](const SoftmaxState& state, const float* out) {
      const float weight = std::exp(state.max - total.max);
      total.sum += weight * state.sum;
      add_scaled(sum.data(), weight, out, d);
    });
    const OutputItem& item = outputs[static_cast<int>(i / heads)];
    const std::int64_t head = i % heads;
    store_normalised(item.dtype, sum.data(), total, d, item.out, head * item.head_stride);
    if (item.lse != nullptr) item.lse[head * item.lse_stride] = total.lse();
  });
}

}  // namespace

std::size_t workspace_bytes(const FlashDecodeLimits& limits) {
  const std::size_t each =
      static_cast<std::size_t>(limits.head_dim) * sizeof(float) + sizeof(SoftmaxState);
  return std::tuple_size_v<PartialParts> * num_partials(limits) * each;
}

void attend(const AttendRequest& request, const transfer::SelectionView& selection,
            const FlashDecodeLimits& limits, std::byte* memory, std::int64_t max_tokens,
            std::int64_t max_selected, const OutputBatch& outputs, RowSource* source) {
  assert(request.kv.head_dim <= kMaxHeadDim);
  const std::size_t partials = num_partials(limits);
  auto* out = reinterpret_cast<float*>(memory);
  auto* states = reinterpret_cast<SoftmaxState*>(
      out + std::tuple_size_v<PartialParts> * partials * static_cast<std::size_t>(limits.head_dim));
  PartialParts parts{};
  parts[0] = {out, states, num_splits(max_tokens)};
  attend_spans(request, parts[0], source);
  if (selection.ids != nullptr) {
    parts[1] = {out + partials * static_cast<std::size_t>(limits.head_dim), states + partials,
                num_splits(max_selected)};
    attend_selected(request, selection, parts[1], source);
    count_selected(request, selection);
  }
  merge(request, parts, outputs);
}

void merge_results(const MergeBatch& parts, std::int64_t num_heads_total, int head_dim, void* out,
                   DType out_dtype, float* lse) {
  assert(head_dim <= kMaxHeadDim);
  transfer::parallel_for_each(num_heads_total, 64, [&](std::int64_t i) {
    std::array<float, kMaxHeadDim> sum{};
    SoftmaxState total;
    for (int p = 0; p < parts.count; ++p) total.max = std::max(total.max, parts[p].lse[i]);
    for (int p = 0; p < parts.count; ++p) {
      if (parts[p].lse[i] == -std::numeric_limits<float>::infinity()) continue;
      const float weight = std::exp(parts[p].lse[i] - total.max);
      total.sum += weight;
      add_scaled(sum.data(), weight, parts[p].out + i * head_dim, head_dim);
    }
    store_normalised(out_dtype, sum.data(), total, head_dim, out, i * head_dim);
    if (lse != nullptr) lse[i] = total.lse();
  });
}

}  // namespace kvtier::attention::cpu
