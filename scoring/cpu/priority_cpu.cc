#include "scoring/cpu/priority_cpu.h"

#include "scoring/cpu/simd_math.h"
#include "scoring/cpu/top_k_cpu.h"
#include "transfer/device/simd.h"

namespace kvtier::scoring::cpu {

namespace {

// Adds -ln u to the scores of `count` tokens from `first` on.
KVTIER_SIMD_CLONES
void add_priorities(std::uint32_t key, std::int64_t first, std::int64_t count, float* scores) {
  const auto begin = static_cast<std::uint32_t>(first);
  const auto n = static_cast<std::int32_t>(count);
#pragma omp simd
  for (std::int32_t i = 0; i < n; ++i) {
    const float u = priority_uniform(key, begin + static_cast<std::uint32_t>(i));
    scores[i] = scores[i] > kLowestScore ? scores[i] - simd::log(u) : kLowestScore;
  }
}

}  // namespace

float score_of_priority(std::uint32_t key, std::int64_t token, float priority) {
  if (!(priority > kLowestScore)) return kLowestScore;
  return priority + simd::log(priority_uniform(key, static_cast<std::uint32_t>(token)));
}

PrioritySet::PrioritySet(std::uint32_t key, std::int64_t first, float* scores, std::int64_t count,
                         std::int64_t k, float log_least)
    : key_(key), first_(first), priorities_(scores), count_(count), cut_(log_least) {
  add_priorities(key, first, count, scores);
  if (k >= count) return;
  const TopK top = find_top_k(scores, count, k + 1);
  const float next = score_of_key(top.threshold);
  if (next < log_least) return;
  cut_ = next;
  ties_ = top.ties - 1;
}

float PrioritySet::bias(std::int64_t i) const {
  return priority_bias(cut_, score_of_priority(key_, first_ + i, priorities_[i]));
}

}  // namespace kvtier::scoring::cpu
