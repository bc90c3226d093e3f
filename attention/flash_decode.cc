#include "attention/flash_decode.h"

#include "kvtier/error.h"

#include "attention/flash_decode_kernels.h"
#include "transfer/device/with_cuda.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <memory>
#include <string>

namespace kvtier::attention {
namespace {

using transfer::kWithCuda;
using transfer::Stream;

void expect_at_most(const char* what, std::int64_t found, std::int64_t limit) {
  if (found >= 0 && found <= limit) return;
  throw Error(ErrorCode::kInvalidArgument, std::string("attention: ") + what + ": expected 0.." +
                                               std::to_string(limit) + ", found " +
                                               std::to_string(found));
}

void check_request(const FlashDecodeLimits& limits, const AttendRequest& request,
                   const transfer::SelectionView& selection, std::int64_t max_selected,
                   const OutputBatch& outputs) {
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
  if (selection.ids != nullptr) expect_at_most("selected rows", max_selected, selection.capacity);
  if (outputs.count != request.rows.count) {
    throw Error(ErrorCode::kInvalidArgument, "attention: outputs: expected " +
                                                 std::to_string(request.rows.count) + ", found " +
                                                 std::to_string(outputs.count));
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

}  // namespace

std::size_t FlashDecode::workspace_bytes(Backend backend, const FlashDecodeLimits& limits) {
  if constexpr (kWithCuda) {
    if (backend == Backend::kCuda) return cuda::workspace_bytes(limits);
  }
  assert(backend == Backend::kCpu);
  return cpu::workspace_bytes(limits);
}

FlashDecode::FlashDecode(transfer::Device& device, const FlashDecodeLimits& limits)
    : limits_(limits),
      memory_(
          device.allocate(transfer::Space::kDevice, workspace_bytes(device.backend(), limits))) {
  const std::unique_ptr<Stream> stream = device.make_stream();
  stream->fill(memory_.data(), 0, memory_.bytes());
  stream->synchronize();
}

void FlashDecode::attend(Stream& stream, const AttendRequest& request,
                         const transfer::SelectionView& selection, std::int64_t max_selected,
                         const OutputBatch& outputs) {
  check_request(limits_, request, selection, max_selected, outputs);
  if (request.rows.count == 0) return;
  std::byte* const memory = memory_.data();
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::attend(stream.native(), request, selection, limits_, memory, outputs);
    }
  }
  const std::int64_t max_tokens = max_span_tokens(request);
  stream.run([=, limits = limits_] {
    cpu::attend(request, selection, limits, memory, max_tokens, max_selected, outputs, nullptr);
  });
}

void FlashDecode::attend_in_parts(const AttendRequest& request,
                                  const transfer::SelectionView& selection,
                                  std::int64_t max_selected, const OutputBatch& outputs,
                                  RowSource& source) {
  check_request(limits_, request, selection, max_selected, outputs);
  assert(selection.staged_capacity == 0);
  if (request.rows.count == 0) return;
  cpu::attend(request, selection, limits_, memory_.data(), max_span_tokens(request), max_selected,
              outputs, &source);
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
