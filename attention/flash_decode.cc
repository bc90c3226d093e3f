#include "attention/flash_decode.h"

#include "kvtier/error.h"

#include "attention/flash_decode_kernels.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <string>

namespace kvtier::attention {
namespace {

using transfer::kWithCuda;
using transfer::Stream;

constexpr std::int64_t kNumParts = 2;

std::int64_t num_partials(const FlashDecodeLimits& limits) {
  return std::int64_t{limits.rows} * limits.query_heads * FlashDecode::kMaxSplits;
}

void expect_at_most(const char* what, std::int64_t found, std::int64_t limit) {
  if (found >= 0 && found <= limit) return;
  throw Error(ErrorCode::kInvalidArgument, std::string("attention: ") + what + ": expected 0.." +
                                               std::to_string(limit) + ", found " +
                                               std::to_string(found));
}

void check_request(const FlashDecodeLimits& limits, const AttendRequest& request) {
  expect_at_most("query rows", request.rows.count, limits.rows);
  expect_at_most("query heads", request.kv.query_heads, limits.query_heads);
  expect_at_most("head_dim", request.kv.head_dim, limits.head_dim);
  if (request.kv.kv_heads < 1 || request.kv.query_heads % request.kv.kv_heads != 0) {
    throw Error(ErrorCode::kInvalidArgument, "attention: KV heads: expected a divisor of " +
                                                 std::to_string(request.kv.query_heads) +
                                                 ", found " + std::to_string(request.kv.kv_heads));
  }
  for (int r = 0; r < request.rows.count; ++r) {
    expect_at_most("sequence index", request.rows[r].sequence, request.sequences.count - 1);
  }
}

/// Upper bound of the always-attended tokens of any row, from values fixed when a step is captured.
std::int64_t max_span_tokens(const AttendRequest& request) {
  const transfer::SpanRule& rule = request.rule;
  if (rule.mode == LayerMode::kDense) return request.max_length;
  if (rule.mode == LayerMode::kSlidingWindow) {
    return std::min(rule.window_tokens, request.max_length);
  }
  std::int64_t dense_from = std::numeric_limits<std::int64_t>::max();
  for (int r = 0; r < request.rows.count; ++r) {
    dense_from = std::min(dense_from, request.rows[r].dense_from);
  }
  const std::int64_t dense =
      request.max_length - std::min(std::max<std::int64_t>(dense_from, 0), request.max_length);
  return std::min(rule.sink_tokens + std::max(rule.recent_tokens, dense), request.max_length);
}

int num_splits(Stream& stream, const AttendRequest& request, std::int64_t tokens) {
  int splits = 0;
  if constexpr (kWithCuda) {
    splits = stream.native() != nullptr ? cuda::num_splits(request, tokens)
                                        : cpu::num_splits(request, tokens);
  } else {
    splits = cpu::num_splits(request, tokens);
  }
  assert(splits >= 1 && splits <= FlashDecode::kMaxSplits);
  return splits;
}

}  // namespace

std::size_t FlashDecode::workspace_bytes(const FlashDecodeLimits& limits) {
  const std::size_t bytes_each =
      static_cast<std::size_t>(limits.head_dim) * sizeof(float) + sizeof(SoftmaxState);
  return static_cast<std::size_t>(kNumParts * num_partials(limits)) * bytes_each;
}

FlashDecode::FlashDecode(transfer::Device& device, const FlashDecodeLimits& limits)
    : limits_(limits),
      memory_(device.allocate(transfer::Space::kDevice, workspace_bytes(limits))),
      partial_out_(memory_.as<float>()),
      partial_state_(reinterpret_cast<SoftmaxState*>(
          partial_out_ + kNumParts * num_partials(limits) * limits.head_dim)) {}

void FlashDecode::spans(Stream& stream, const AttendRequest& request) {
  check_request(limits_, request);
  if (request.rows.count == 0) return;
  const int splits = num_splits(stream, request, max_span_tokens(request));
  splits_[0] = splits;
  const PartialView partial{partial_out_, partial_state_};
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) return cuda::spans(stream.native(), request, partial, splits);
  }
  stream.run([=] { cpu::spans(request, partial, splits); });
}

void FlashDecode::selected(Stream& stream, const AttendRequest& request,
                           const transfer::SelectionView& selection, std::int64_t max_selected) {
  check_request(limits_, request);
  expect_at_most("selected rows", max_selected, selection.capacity);
  if (request.rows.count == 0 || max_selected == 0) return;
  const int splits = num_splits(stream, request, max_selected);
  splits_[1] = splits;
  const std::int64_t partials = num_partials(limits_);
  const PartialView partial{partial_out_ + partials * limits_.head_dim, partial_state_ + partials};
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::selected(stream.native(), request, selection, partial, splits);
    }
  }
  stream.run([=] { cpu::selected(request, selection, partial, splits); });
}

void FlashDecode::merge(Stream& stream, const AttendRequest& request, const OutputBatch& outputs) {
  check_request(limits_, request);
  if (outputs.count != request.rows.count) {
    throw Error(ErrorCode::kInvalidArgument, "attention: outputs: expected " +
                                                 std::to_string(request.rows.count) + ", found " +
                                                 std::to_string(outputs.count));
  }
  PartialParts parts;
  const std::int64_t partials = num_partials(limits_);
  for (int i = 0; i < kNumParts; ++i) {
    parts.parts[i] = {partial_out_ + i * partials * limits_.head_dim,
                      partial_state_ + i * partials};
    parts.splits[i] = splits_[i];
    splits_[i] = 0;
  }
  if (request.rows.count == 0) return;
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) return cuda::merge(stream.native(), request, parts, outputs);
  }
  stream.run([=] { cpu::merge(request, parts, outputs); });
}

void merge_results(Stream& stream, const MergeBatch& parts, std::int64_t num_heads_total,
                   int head_dim, void* out, DType out_dtype, float* lse) {
  if (num_heads_total == 0) return;
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::merge_results(stream.native(), parts, num_heads_total, head_dim, out, out_dtype,
                                 lse);
    }
  }
  stream.run([=] { cpu::merge_results(parts, num_heads_total, head_dim, out, out_dtype, lse); });
}

}  // namespace kvtier::attention
