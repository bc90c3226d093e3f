#pragma once

#include <cstdint>

/// Inner loops of the CPU attention, compiled for several instruction sets. All rows are fp32, all
/// counts are elements, and the order of every sum is fixed, so results repeat on one machine.
namespace kvtier::attention::cpu {

/// `logits[i] = query . rows[index[i]]`, rows `stride` apart.
void dot_rows(const float* query, const float* rows, std::int64_t stride, const std::int32_t* index,
              int count, int head_dim, float* logits);

/// Returns the largest of `count` values, -infinity for none.
float max_of(const float* values, int count);

/// Replaces each logit by exp(logit - max) and returns their sum. Relative error below 3e-7; zero
/// below exp(-87).
float exp_and_sum(float* logits, int count, float max);

/// `sum = scale * sum + sum over i of weights[i] * rows[index[i]]`.
void accumulate_rows(float* sum, float scale, const float* weights, const float* rows,
                     std::int64_t stride, const std::int32_t* index, int count, int head_dim);

/// `sum += weight * values`.
void add_scaled(float* sum, float weight, const float* values, int count);

}  // namespace kvtier::attention::cpu
