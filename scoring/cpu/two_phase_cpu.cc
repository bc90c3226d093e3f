#include "scoring/cpu/priority_cpu.h"
#include "scoring/cpu/selector_call_cpu.h"
#include "scoring/score_math.h"
#include "scoring/two_phase.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvtier::scoring::cpu {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

/// One (query, KV head): its sets, of which there is one, or one for each query head.
class Group {
 public:
  Group(const Call& coarse, const Call& fine, int query_index, int kv_head)
      : coarse_(coarse),
        fine_(fine),
        query_index_(query_index),
        kv_head_(kv_head),
        spans_(coarse.spans(query_index)),
        count_(spans_.num_eligible()),
        sets_(coarse.per_query_head() ? coarse.group() : 1),
        masks_(static_cast<std::size_t>(count_)),
        biases_(static_cast<std::size_t>(count_ * sets_)) {}

  /// Takes the candidates; returns how many tokens are one.
  std::int64_t take_candidates() {
    const ScoreParams& params = coarse_.request().params;
    const std::int64_t k = transfer::num_to_select(params.top_k, params.sparsity, spans_);
    for (int s = 0; s < sets_; ++s) {
      const PrioritySet set(priority_key(params, set_index(s)), spans_.sink_end, order(s), count_,
                            k, kNone);
      set.visit([&](std::int64_t i) {
        mask(i) = static_cast<std::uint16_t>(mask(i) | (1U << s));
        bias(s, i) = set.bias(i);
      });
    }
    return count_ - std::count(masks_.begin(), masks_.end(), std::uint16_t{0});
  }

  /// Scores the candidates by the whole code, as the first phase has normalised the heads; what
  /// orders a set becomes ln p of this phase and the bias of the first.
  void score_candidates() {
    const SelectRequest& request = fine_.request();
    const GroupQuery query = fine_.group_query(query_index_, kv_head_);
    prepare_group(request.params, query);
    std::byte* const* blocks = request.sketches[request.query_batch[query_index_].sequence];
    const int group = fine_.group();
    std::array<float, kMaxGroup> totals{}, scores{};
    std::array<TilePartial, kMaxGroup> unused{};
    for (int h = 0; h < group; ++h) {
      const TilePartial* partials =
          coarse_.partials(query_index_, kv_head_) + h * coarse_.partial_stride();
      totals[static_cast<std::size_t>(h)] = partials[spans_.sink_end / kTileTokens].sum;
    }
    for (std::int64_t i = 0; i < count_; ++i) {
      if (mask(i) != 0) {
        const std::int64_t token = spans_.sink_end + i;
        const SketchTile tile{.block = blocks[token / hashing::kBlockTokens],
                              .kv_head = kv_head_,
                              .first = static_cast<int>(token % hashing::kBlockTokens),
                              .count = 1};
        score_tile(request.params, request.sketch, query, tile, scores.data(), 1, unused.data(), 1);
        if (!fine_.per_query_head()) {
          float combined = kLowestScore;
          combine_tile(request.params, scores.data(), 1, totals.data(), group, 1, &combined);
          scores[0] = combined;
        }
      }
      for (int s = 0; s < sets_; ++s) {
        const float score = scores[static_cast<std::size_t>(s)];
        const bool candidate = ((mask(i) >> s) & 1) != 0 && score > kLowestScore;
        order(s)[i] = candidate ? settled_score(score + bias(s, i)) : kLowestScore;
      }
    }
  }

  void choose() {
    const ScoreParams& params = fine_.request().params;
    const std::int64_t k = transfer::num_to_select(params.top_k, params.sparsity, spans_);
    std::fill(masks_.begin(), masks_.end(), std::uint16_t{0});
    std::vector<PrioritySet> sets;
    for (int s = 0; s < sets_ && count_ > 0; ++s) {
      sets.emplace_back(priority_key(params, set_index(s)), spans_.sink_end, order(s), count_, k,
                        kNone);
      const unsigned heads = sets_ == 1 ? all_heads(fine_.group()) : 1U << s;
      sets.back().visit(
          [&](std::int64_t i) { mask(i) = static_cast<std::uint16_t>(mask(i) | heads); });
    }
    SelectionWriter writer(fine_.selection(),
                           std::int64_t{query_index_} * fine_.kv_heads() + kv_head_);
    for (std::int64_t i = 0; i < count_; ++i) {
      if (mask(i) == 0) continue;
      writer.add(spans_.sink_end + i, mask(i), [&](int s) {
        if (((mask(i) >> s) & 1) == 0) return 0.0F;
        return sets[static_cast<std::size_t>(s)].bias(i) + bias(s, i);
      });
    }
    writer.finish();
  }

 private:
  [[nodiscard]] int set_index(int s) const { return kv_head_ * sets_ + s; }
  [[nodiscard]] float* order(int s) const {
    float* first = coarse_.per_query_head()
                       ? coarse_.scores(query_index_, kv_head_) + s * coarse_.max_tokens()
                       : coarse_.combined(query_index_, kv_head_);
    return first + spans_.sink_end;
  }
  [[nodiscard]] std::uint16_t& mask(std::int64_t i) { return masks_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] float& bias(int s, std::int64_t i) {
    return biases_[static_cast<std::size_t>(s * count_ + i)];
  }

  const Call& coarse_;
  const Call& fine_;
  int query_index_;
  int kv_head_;
  const AttendedSpans& spans_;
  std::int64_t count_;
  int sets_;
  std::vector<std::uint16_t> masks_;  // bit s: of set s
  std::vector<float> biases_;         // [sets][count], of the first phase
};

}  // namespace

void select_in_two_phases(const SelectRequest& request, const SelectorWorkspace& workspace) {
  SelectRequest first = request, second = request;
  first.params = coarse_phase(request.params);
  second.params = fine_phase(request.params);
  SelectorWorkspace with_coarse = workspace;
  with_coarse.tables = workspace.coarse_tables;
  const Call coarse(first, with_coarse);
  const Call fine(second, workspace);
  score(coarse);
  combine(coarse);
  const hashing::SketchGeometry prefix{.kv_heads = request.kv.kv_heads,
                                       .num_planes = first.params.num_planes()};
  std::atomic<std::int64_t> bytes = 0;
  fine.for_each_group([&](int query_index, int kv_head) {
    Group group(coarse, fine, query_index, kv_head);
    const std::int64_t candidates = group.take_candidates();
    group.score_candidates();
    group.choose();
    bytes += fine.spans(query_index).num_eligible() * prefix.token_bytes() +
             candidates * request.sketch.token_bytes();
  });
  transfer::cpu::count(request.flags, &transfer::StepFlags::sketch_bytes, bytes);
}

}  // namespace kvtier::scoring::cpu
