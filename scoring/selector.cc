#include "scoring/selector.h"

#include "scoring/cpu/recall_cpu.h"
#include "scoring/selector_kernels.h"
#include "scoring/two_phase.h"
#include "transfer/device/with_cuda.h"

#include <algorithm>
#include <cassert>
#include <memory>

namespace kvtier::scoring {

namespace {

constexpr std::size_t kAlignment = 256;

/// Byte offsets of the regions of the workspace.
struct Layout {
  std::size_t entries = 0;
  std::size_t scalars = 0;
  std::size_t scores = 0;
  std::size_t combined = 0;
  std::size_t token_mask = 0;
  std::size_t scratch = 0;
  std::size_t rest_logs = 0;
  std::size_t lse = 0;
  std::size_t ids = 0;
  std::size_t head_mask = 0;
  std::size_t counts = 0;
  std::size_t bias = 0;
  std::size_t staged = 0;
  std::size_t total = 0;
};

Layout layout(const SelectorLimits& limits, std::size_t scratch_bytes) {
  Layout result;
  const auto place = [&result](std::size_t& offset, std::size_t bytes) {
    offset = result.total;
    result.total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  const auto rows = static_cast<std::size_t>(limits.rows);
  const std::size_t queries = rows * static_cast<std::size_t>(limits.query_heads);
  const std::size_t groups = rows * static_cast<std::size_t>(limits.kv_heads);
  const auto tokens = static_cast<std::size_t>(limits.max_tokens);
  const auto selected = static_cast<std::size_t>(limits.max_selected);
  place(result.entries, queries * kMaxEntriesPerHead * sizeof(float));
  place(result.scalars, queries * sizeof(QueryScalars));
  place(result.scores, queries * tokens * sizeof(float));
  place(result.combined, groups * tokens * sizeof(float));
  place(result.token_mask, groups * tokens * sizeof(std::uint16_t));
  place(result.scratch, scratch_bytes);
  place(result.rest_logs, queries * sizeof(float));
  place(result.lse, queries * sizeof(float));
  place(result.ids, groups * selected * sizeof(std::int32_t));
  place(result.head_mask, groups * selected * sizeof(std::uint16_t));
  place(result.counts, groups * sizeof(std::int32_t));
  place(result.bias, queries * selected * sizeof(float));
  place(result.staged, groups * static_cast<std::size_t>(limits.staged_rows) *
                           static_cast<std::size_t>(limits.row_bytes));
  return result;
}

std::size_t scratch_bytes(Backend backend, const SelectorLimits& limits) {
  if constexpr (transfer::kWithCuda) {
    if (backend == Backend::kCuda) return cuda::scratch_bytes(limits);
  }
  assert(backend == Backend::kCpu);
  return cpu::scratch_bytes(limits);
}

/// Rows of whole sketch blocks, so that a kernel's tile never crosses into the next row.
SelectorLimits padded(const SelectorLimits& limits) {
  SelectorLimits result = limits;
  result.max_tokens = (limits.max_tokens + hashing::kBlockTokens - 1) / hashing::kBlockTokens *
                      hashing::kBlockTokens;
  return result;
}

void check(const SelectRequest& request, const SelectorLimits& limits) {
  assert(request.rows.count <= limits.rows);
  assert(request.kv.query_heads == limits.query_heads);
  assert(request.kv.kv_heads == limits.kv_heads);
  assert(request.max_length <= limits.max_tokens);
  assert(request.slots.blocks == nullptr ||
         (request.params.estimator == Estimator::kNormAware && request.params.query_bits > 0 &&
          request.params.threshold == 0.0F && request.params.coarse_bits == 0 &&
          request.keep_scores));
  static_cast<void>(request);
  static_cast<void>(limits);
}

[[maybe_unused]] SelectShape shape_of(const SelectRequest& request, bool recall) {
  const std::int64_t slabs =
      (request.max_length + hashing::kBlockTokens - 1) / hashing::kBlockTokens;
  return {.params = request.params,
          .rule = request.rule,
          .kv_heads = request.kv.kv_heads,
          .group = request.kv.group(),
          .head_dim = request.kv.head_dim,
          .plane_dim = request.planes.head_dim,
          .int8_rows = request.kv.int8_pages,
          .fp16_sinks = request.kv.sink_capacity > 0,
          .rows = request.rows.count,
          .max_length = slabs * hashing::kBlockTokens,
          .keep_scores = request.keep_scores,
          .recall = recall};
}

}  // namespace

Selector::Selector(transfer::Device& device, const SelectorLimits& limits)
    : limits_(padded(limits)) {
  const Layout at = layout(limits_, scratch_bytes(device.backend(), limits_));
  memory_ = device.allocate(transfer::Space::kDevice, at.total);
  std::byte* base = memory_.data();
  entries_ = reinterpret_cast<float*>(base + at.entries);
  scalars_ = reinterpret_cast<QueryScalars*>(base + at.scalars);
  scores_ = reinterpret_cast<float*>(base + at.scores);
  combined_ = reinterpret_cast<float*>(base + at.combined);
  token_mask_ = reinterpret_cast<std::uint16_t*>(base + at.token_mask);
  scratch_ = base + at.scratch;
  rest_logs_ = reinterpret_cast<float*>(base + at.rest_logs);
  lse_ = reinterpret_cast<float*>(base + at.lse);
  selection_.ids = reinterpret_cast<std::int32_t*>(base + at.ids);
  selection_.head_mask = reinterpret_cast<std::uint16_t*>(base + at.head_mask);
  selection_.counts = reinterpret_cast<std::int32_t*>(base + at.counts);
  bias_ = reinterpret_cast<float*>(base + at.bias);
  selection_.capacity = limits.max_selected;
  selection_.staged = limits.staged_rows > 0 ? base + at.staged : nullptr;
  selection_.staged_capacity = limits.staged_rows;
  if constexpr (transfer::kWithCuda) {
    if (device.backend() != Backend::kCuda) return;
    exchange_ = cuda::lease_exchange();
    device_ = cuda::device_limits();
    const std::unique_ptr<transfer::Stream> stream = device.make_stream();
    stream->fill(scratch_, 0, cuda::zeroed_bytes(limits_));
    stream->synchronize();
  }
}

std::size_t Selector::workspace_bytes(const SelectorLimits& unpadded) {
  const SelectorLimits limits = padded(unpadded);
  std::size_t scratch = cpu::scratch_bytes(limits);
  if constexpr (transfer::kWithCuda) scratch = std::max(scratch, cuda::scratch_bytes(limits));
  return layout(limits, scratch).total;
}

SelectorWorkspace Selector::workspace(const ScoreParams& params) const {
  QueryTables coarse;
  if (params.coarse_bits > 0) {
    const std::int64_t heads = std::int64_t{limits_.rows} * limits_.query_heads;
    coarse = {.entries = entries_ + heads * entries_per_head(params),
              .entries_per_head = entries_per_head(coarse_phase(params)),
              .scalars = scalars_};
  }
  return {.limits = limits_,
          .tables = {.entries = entries_,
                     .entries_per_head = entries_per_head(params),
                     .scalars = scalars_},
          .coarse_tables = coarse,
          .scores = scores_,
          .combined = combined_,
          .token_mask = token_mask_,
          .scratch = scratch_,
          .rest_logs = rest_logs_,
          .selection = params.rule == SelectionRule::kPriority ? biased_selection(!params.shared())
                                                               : selection_};
}

transfer::SelectionView Selector::biased_selection(bool per_query_head) const {
  transfer::SelectionView view = selection_;
  view.bias = bias_;
  view.bias_heads = per_query_head ? limits_.query_heads / limits_.kv_heads : 1;
  return view;
}

const SelectionPlan& Selector::plan(const SelectRequest& request, bool recall) {
  if constexpr (transfer::kWithCuda) {
    if (device_.processors > 0) {
      const SelectShape shape = shape_of(request, recall);
      if (!(shape == planned_)) {
        plan_ = cuda::plan_selection(shape, device_, exchange_.held());
        planned_ = shape;
      }
    }
  }
  return plan_;
}

void Selector::read_queries(transfer::Stream& stream, const ScoreParams& params,
                            const hashing::PlanesView& planes, const QueryInput& input,
                            float* queries) {
  assert(input.items.count <= limits_.rows);
  assert(input.kv.query_heads == limits_.query_heads);
  scoring::read_queries(stream, params, planes, input, queries, entries_, scalars_);
}

transfer::SelectionView Selector::select(transfer::Stream& stream, const SelectRequest& request) {
  return select(stream, request, {});
}

transfer::SelectionView Selector::select(transfer::Stream& stream, const SelectRequest& request,
                                         const RecallParams& recall_params) {
  check(request, limits_);
  if (request.input != nullptr) transfer::check_queries(request.kv, request.input->items);
  const SelectionPlan& how = plan(request, recall_params.active);
  if (!request.tables_built && !how.reads_queries) {
    build_query_tables(stream, request.params, request.planes, request.queries, request.rows.count,
                       request.kv.query_heads, entries_, scalars_);
  }
  const SelectorWorkspace space = workspace(request.params);
  if (request.params.coarse_bits > 0) {
    assert(!recall_params.active);
    build_query_tables(stream, coarse_phase(request.params), request.planes, request.queries,
                       request.rows.count, request.kv.query_heads,
                       const_cast<float*>(space.coarse_tables.entries), scalars_);
  }
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      cuda::select(stream.native(), request, space, recall_params, how);
      return space.selection;
    }
  }
  stream.run([=] { cpu::select(request, space, recall_params); });
  return space.selection;
}

void Selector::export_missed(transfer::Stream& stream, const SelectRequest& request,
                             const MissedBatch& batch) {
  assert(batch.count == request.rows.count);
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::export_missed(stream.native(), request, workspace(request.params), batch);
    }
  }
  stream.run([batch, rest_logs = rest_logs_, heads = request.kv.query_heads] {
    cpu::export_missed(batch, heads, rest_logs);
  });
}

transfer::SelectionView Selector::adopt(transfer::Stream& stream, const SelectRequest& request,
                                        const IdTensor& ids, const IdFloats& bias) {
  check(request, limits_);
  SelectorWorkspace space = workspace(request.params);
  space.selection =
      bias.data != nullptr ? biased_selection(ids.heads > limits_.kv_heads) : selection_;
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      cuda::adopt(stream.native(), request, space, ids, bias);
      return space.selection;
    }
  }
  stream.run([=] { cpu::adopt(request, space, ids, bias); });
  return space.selection;
}

void Selector::export_ids(transfer::Stream& stream, const SelectRequest& request,
                          const IdTensor& out, const IdFloats& bias) {
  check(request, limits_);
  const SelectorWorkspace space = workspace(request.params);
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::export_ids(stream.native(), request, space, out, bias);
    }
  }
  stream.run([=] { cpu::export_ids(request, space, out, bias); });
}

void Selector::export_scores(transfer::Stream& stream, const SelectRequest& request,
                             const IdTensor& ids, const IdFloats& out) {
  check(request, limits_);
  const SelectorWorkspace space = workspace(request.params);
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::export_scores(stream.native(), request, space, ids, out);
    }
  }
  stream.run([=] { cpu::export_scores(request, space, ids, out); });
}

}  // namespace kvtier::scoring
