#include "attention/flash_decode.h"

#include "attention/flash_decode_kernels.h"
#include "transfer/device/with_cuda.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <memory>

namespace kvtier::attention {
namespace {

using transfer::kWithCuda;
using transfer::Stream;

// What callers have checked, for asserts.
[[maybe_unused]] bool valid(const FlashDecodeLimits& limits, const AttendRequest& request,
                            const transfer::SelectionView& selection, std::int64_t max_selected,
                            const OutputBatch& outputs) {
  return request.query_batch.count >= 0 && request.query_batch.count <= limits.num_queries &&
         request.kv.query_heads() <= limits.query_heads && request.kv.head_dim <= limits.head_dim &&
         request.kv.kv_heads >= 1 && request.kv.group >= 1 &&
         std::all_of(&request.query_batch[0], &request.query_batch[0] + request.query_batch.count,
                     [&](const transfer::QueryToken& query) {
                       return query.sequence >= 0 && query.sequence < request.sequences.count;
                     }) &&
         (selection.ids == nullptr || (max_selected >= 0 && max_selected <= selection.capacity)) &&
         outputs.count == request.query_batch.count;
}

/// Upper bound of the always-attended tokens of any query, from values fixed when a step is
/// captured.
std::int64_t max_span_tokens(const AttendRequest& request) {
  const transfer::SpanRule& rule = request.rule;
  if (rule.mode == LayerMode::kDense) return request.max_length;
  if (rule.mode == LayerMode::kSlidingWindow) {
    return std::min(rule.window_tokens, request.max_length);
  }
  std::int64_t dense_from = std::numeric_limits<std::int64_t>::max();
  for (int r = 0; r < request.query_batch.count; ++r) {
    dense_from = std::min(dense_from, request.query_batch[r].dense_from);
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
  assert(valid(limits_, request, selection, max_selected, outputs));
  if (request.query_batch.count == 0) return;
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
  assert(valid(limits_, request, selection, max_selected, outputs));
  assert(selection.staged_capacity == 0);
  if (request.query_batch.count == 0) return;
  cpu::attend(request, selection, limits_, memory_.data(), max_span_tokens(request), max_selected,
              outputs, &source);
}

void merge_results(Stream& stream, const MergeBatch& parts, std::int64_t num_heads_total,
                   int head_dim, void* out, DType out_dtype, float* lse) {
  if (num_heads_total == 0) return;
  enqueue<cpu::merge_results, cuda::merge_results>(stream, parts, num_heads_total, head_dim, out,
                                                   out_dtype, lse);
}

}  // namespace kvtier::attention
