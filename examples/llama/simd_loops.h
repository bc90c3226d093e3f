#pragma once

#include <cstdint>

/// The vectorised inner loops of the CPU decoder: plain functions, compiled for several instruction
/// sets, chosen when the program is loaded.
namespace kvtier::llama {

struct SoftmaxState {
  float max = 0.0F;  ///< Largest logit so far; -infinity before the first block.
  float sum = 0.0F;  ///< Sum of exp(logit - max).
};

/// One block of an online softmax: replaces `row[0, valid)` by exp(row - new max) and
/// `row[valid, width)` by 0, updates `state`, and returns the factor by which results accumulated
/// before must be multiplied. `valid` may be 0: nothing changes then, and the factor is 1.
float softmax_block(float* row, std::int64_t valid, std::int64_t width, SoftmaxState& state);

void scale_row(float* row, std::int64_t count, float factor);
void add_rows(float* x, const float* y, std::int64_t count);
float sum_of_squares(const float* x, std::int64_t count);
/// out = x * factor * weight.
void scale_by(const float* x, const float* weight, float factor, std::int64_t count, float* out);
/// gate = gate / (1 + exp(-gate)) * up.
void silu_times(float* gate, const float* up, std::int64_t count);

}  // namespace kvtier::llama
