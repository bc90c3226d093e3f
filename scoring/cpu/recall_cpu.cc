#include "scoring/cpu/recall_cpu.h"

#include "include/types/log_sum_exp.h"
#include "scoring/cpu/simd_math.h"
#include "scoring/cpu/top_k_cpu.h"
#include "scoring/miss_tolerance.h"
#include "transfer/device/simd.h"
#include "transfer/kv/page_rows.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

namespace kvtier::scoring::cpu {

namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

// Key norms, and what a score has beside the logit, of tokens of one block.
KVTIER_SIMD_CLONES
void load_norms(const std::uint32_t* norms, std::int64_t count, float* key, float* log_value) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    key[i] = simd::from_fp16_magnitude(static_cast<std::uint16_t>(norms[i]));
    log_value[i] = simd::log(simd::from_fp16_magnitude(static_cast<std::uint16_t>(norms[i] >> 16)));
  }
}

// e^(slope * logit + offset), 0 for tokens without a score.
KVTIER_SIMD_CLONES
void to_weights(float* logits, std::int64_t count, float slope, float offset) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float weight = simd::exp(slope * logits[i] + offset);
    logits[i] = logits[i] > kLowestScore ? weight : 0.0F;
  }
}

double sum_of(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float value : values) sum += static_cast<double>(value);
  return sum;
}

struct Moments {
  double count = 0.0;
  double mean = 0.0;
  double variance = 0.0;
  double key_square = 0.0;  // mean of ||k||^2
  double max = kNone;
};

// Turns the scores into logits, which have no value norm; tokens without a score stay lowest.
Moments read_logits(const RecallGroup& group, int head, std::vector<float>& logits) {
  const SelectRequest& request = group.request;
  std::byte* const* blocks = request.sketches[request.query_batch[group.query_index].sequence];
  const bool weighted = request.params.weighting == ValueWeighting::kLogit;
  const float* scores = group.scores + head * group.head_stride;
  std::vector<float> key(hashing::kBlockTokens);
  std::vector<float> log_value(hashing::kBlockTokens);
  double sum = 0.0, squares = 0.0, key_squares = 0.0;
  Moments moments;
  for (std::int64_t token = group.spans.sink_end; token < group.spans.eligible_end;) {
    const auto in_block = static_cast<int>(token % hashing::kBlockTokens);
    const std::int64_t count =
        std::min<std::int64_t>(hashing::kBlockTokens - in_block, group.spans.eligible_end - token);
    const std::byte* block = blocks[token / hashing::kBlockTokens];
    load_norms(reinterpret_cast<const std::uint32_t*>(
                   block + request.sketch.norms_offset(group.kv_head, in_block)),
               count, key.data(), log_value.data());
    const std::int64_t first = token - group.spans.sink_end;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      float& logit = logits[static_cast<std::size_t>(first + i)];
      logit = scores[first + i];
      if (!(logit > kLowestScore)) continue;
      if (weighted) logit -= log_value[at];
      const auto x = static_cast<double>(logit);
      moments.count += 1.0;
      moments.max = std::max(moments.max, x);
      sum += x;
      squares += x * x;
      key_squares += static_cast<double>(key[at]) * static_cast<double>(key[at]);
    }
    token += count;
  }
  if (moments.count == 0.0) return moments;
  moments.mean = sum / moments.count;
  moments.variance = std::max(0.0, squares / moments.count - moments.mean * moments.mean);
  moments.key_square = key_squares / moments.count;
  return moments;
}

}  // namespace

double log_of_static(const SelectRequest& request, const HeadIndex& at,
                     const transfer::AttendedSpans& spans, ValueWeighting weighting) {
  const transfer::KvGeometry& kv = request.kv;
  const transfer::SequenceView& sequence =
      request.sequences[request.query_batch[at.query_index].sequence];
  const std::int64_t resident_begin = sequence.counters->resident_begin;
  const std::int64_t query_head = std::int64_t{at.kv_head} * kv.group + at.head;
  const float* query = request.queries +
                       (at.query_index * std::int64_t{kv.query_heads()} + query_head) * kv.head_dim;
  const auto dim = static_cast<std::size_t>(kv.head_dim);
  std::vector<float> row(2 * dim);
  double sum = kNone;
  const auto add = [&](std::int64_t token) {
    transfer::cpu::read_row(kv, sequence, resident_begin, at.kv_head, token, row.data());
    double logit = 0.0;
    double square = 0.0;
    for (std::size_t x = 0; x < dim; ++x) {
      logit += static_cast<double>(query[x]) * static_cast<double>(row[x]);
      square += static_cast<double>(row[dim + x]) * static_cast<double>(row[dim + x]);
    }
    logit *= static_cast<double>(request.params.logit_scale);
    if (weighting != ValueWeighting::kNone) logit += 0.5 * std::log(square);
    if (std::isfinite(logit)) sum = log_add(sum, logit);
  };
  for (std::int64_t token = 0; token < spans.sink_end; ++token) add(token);
  for (std::int64_t token = spans.tail_begin; token < spans.visible; ++token) add(token);
  return sum;
}

EstimatedMass::EstimatedMass(const RecallGroup& group)
    : recall_params_(group.recall_params),
      first_token_(group.spans.sink_end),
      num_eligible_(group.spans.num_eligible()),
      heads_(static_cast<std::size_t>(group.request.kv.group)) {
  assert(group.request.params.estimator == Estimator::kNormAware);
  if (num_eligible_ == 0) return;
  for (int head = 0; head < group.request.kv.group; ++head) estimate(group, head);
}

void EstimatedMass::estimate(const RecallGroup& group, int head) {
  Head& result = heads_[static_cast<std::size_t>(head)];
  result.weights.resize(static_cast<std::size_t>(num_eligible_));
  const Moments moments = read_logits(group, head, result.weights);
  const auto norm = static_cast<double>(group.scalars[head].query_norm);
  const double noise = recall_params_.noise * norm * norm * moments.key_square;
  const double slope = moments.variance > noise ? 1.0 - noise / moments.variance : 0.0;
  // logit = mean + slope * (x - mean) + slope * noise / 2
  const double base = (1.0 - slope) * moments.mean + slope * noise / 2.0;
  result.max = moments.count > 0.0 ? base + slope * moments.max : 0.0;
  to_weights(result.weights.data(), num_eligible_, static_cast<float>(slope),
             static_cast<float>(base - result.max));
  const double log_eligible = std::log(sum_of(result.weights)) + result.max;
  const double static_log = log_of_static(group.request, {group.query_index, group.kv_head, head},
                                          group.spans, ValueWeighting::kNone);
  result.log_total = log_add(static_log, log_eligible);
}

std::int64_t EstimatedMass::num_to_keep(const float* order, int first_head, int heads,
                                        std::int64_t most) const {
  if (!(recall_params_.missed > 0.0) || most <= 0) return most;
  std::vector<double> factors;  // from weights to shares of the visible tokens' attention
  double rest = 0.0;
  for (int h = first_head; h < first_head + heads; ++h) {
    const Head& head = heads_[static_cast<std::size_t>(h)];
    const bool any = head.log_total > kNone;
    factors.push_back(any ? std::exp(head.max - head.log_total) / heads : 0.0);
    rest += factors.back() * sum_of(head.weights);
  }
  std::vector<std::pair<std::uint32_t, std::int64_t>> best;
  best.reserve(static_cast<std::size_t>(most));
  visit_top_k(order, num_eligible_, most,
              [&](std::int64_t i) { best.emplace_back(~ordered_key(order[i]), i); });
  std::ranges::sort(best);
  const std::int64_t least = std::min(recall_params_.least, most);
  const MissTolerance tolerance(recall_params_.missed, num_eligible_, most);
  std::int64_t kept = 0;
  while (kept < most && (kept < least || rest > tolerance.of(static_cast<std::int32_t>(kept)))) {
    const auto token = static_cast<std::size_t>(best[static_cast<std::size_t>(kept++)].second);
    for (std::size_t h = 0; h < factors.size(); ++h) {
      const Head& head = heads_[static_cast<std::size_t>(first_head) + h];
      rest -= factors[h] * static_cast<double>(head.weights[token]);
    }
  }
  return kept;
}

float EstimatedMass::log_of_rest(int head, const std::int32_t* ids, const std::uint16_t* masks,
                                 std::int64_t count) const {
  const Head& from = heads_[static_cast<std::size_t>(head)];
  double sum = 0.0;
  std::int64_t next = 0;
  for (std::int64_t i = 0; i < num_eligible_; ++i) {
    const bool listed = next < count && ids[next] == first_token_ + i;
    const bool attended = listed && ((masks[next] >> head) & 1) != 0;
    if (listed) ++next;
    if (!attended) sum += static_cast<double>(from.weights[static_cast<std::size_t>(i)]);
  }
  return static_cast<float>(std::log(sum) + from.max);
}

void export_missed(const MissedBatch& batch, int query_heads, const float* rest_logs) {
  for (int query_index = 0; query_index < batch.count; ++query_index) {
    const MissedItem& item = batch[query_index];
    if (item.missed == nullptr) continue;
    for (int head = 0; head < query_heads; ++head) {
      const float rest = rest_logs[query_index * query_heads + head];
      const float lse = item.lse[head * item.lse_stride];
      item.missed[head * item.missed_stride] = rest > -std::numeric_limits<float>::infinity()
                                                   ? 1.0F / (1.0F + std::exp(lse - rest))
                                                   : 0.0F;
    }
  }
}

}  // namespace kvtier::scoring::cpu
