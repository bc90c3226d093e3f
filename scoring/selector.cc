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
  assert(request.query_batch.count <= limits.num_queries);
  assert(request.kv.query_heads() == limits.query_heads);
  assert(request.kv.kv_heads == limits.kv_heads);
  assert(request.max_length <= limits.max_tokens);
  assert(request.slots.blocks == nullptr ||
         (request.params.estimator == Estimator::kNormAware && request.params.query_bits > 0 &&
          request.params.threshold == 0.0F && request.params.coarse_bits == 0 &&
          request.keep_scores));
  static_cast<void>(request);
  static_cast<void>(limits);
}

/// Whether work may be forked to a stream and joined: not while that is in the capture of another
/// graph.
[[maybe_unused]] bool may_fork(const transfer::Stream& from, const transfer::Stream& to) {
  const std::uint64_t graph = to.capture_id();
  return graph == 0 || graph == from.capture_id();
}

[[maybe_unused]] SelectShape shape_of(const SelectRequest& request, bool recall) {
  const std::int64_t slabs =
      (request.max_length + hashing::kBlockTokens - 1) / hashing::kBlockTokens;
  return {.params = request.params,
          .rule = request.rule,
          .kv_heads = request.kv.kv_heads,
          .group = request.kv.group,
          .head_dim = request.kv.head_dim,
          .plane_dim = request.planes.head_dim,
          .int8_rows = request.kv.int8_pages,
          .fp16_sinks = request.kv.sink_capacity > 0,
          .num_queries = request.query_batch.count,
          .max_length = slabs * hashing::kBlockTokens,
          .keep_scores = request.keep_scores,
          .recall = recall};
}

}  // namespace

Selector::Selector(transfer::Device& device, const SelectorLimits& limits)
    : limits_(padded(limits)) {
  memory_ = device.allocate(transfer::Space::kDevice, workspace_bytes(device.backend(), limits_));
  transfer::Arena arena(memory_.data());
  at_ = place(arena, limits_, scratch_bytes(device.backend(), limits_));
  if constexpr (transfer::kWithCuda) {
    if (device.backend() != Backend::kCuda) return;
    exchange_ = cuda::lease_exchange();
    device_ = cuda::device_limits();
    aside_ = device.make_stream();
    aside_->fill(at_.scratch, 0, cuda::zeroed_bytes(limits_));
    aside_->synchronize();
  }
}

std::size_t Selector::workspace_bytes(Backend backend, const SelectorLimits& unpadded) {
  const SelectorLimits limits = padded(unpadded);
  transfer::Arena arena;
  (void)place(arena, limits, scratch_bytes(backend, limits));
  return arena.bytes();
}

Selector::Arrays Selector::place(transfer::Arena& arena, const SelectorLimits& limits,
                                 std::size_t scratch_bytes) {
  const auto num_queries = static_cast<std::size_t>(limits.num_queries);
  const std::size_t queries = num_queries * static_cast<std::size_t>(limits.query_heads);
  const std::size_t groups = num_queries * static_cast<std::size_t>(limits.kv_heads);
  const auto tokens = static_cast<std::size_t>(limits.max_tokens);
  const auto selected = static_cast<std::size_t>(limits.max_selected);
  Arrays at;
  at.entries = arena.take<float>(queries * kMaxEntriesPerHead);
  at.scalars = arena.take<QueryScalars>(queries);
  at.scores = arena.take<float>(queries * tokens);
  at.combined = arena.take<float>(groups * tokens);
  at.token_mask = arena.take<std::uint16_t>(groups * tokens);
  at.scratch = arena.take<std::byte>(scratch_bytes);
  at.rest_logs = arena.take<float>(queries);
  at.lse = arena.take<float>(queries);
  at.selection.ids = arena.take<std::int32_t>(groups * selected);
  at.selection.head_mask = arena.take<std::uint16_t>(groups * selected);
  at.selection.counts = arena.take<std::int32_t>(groups);
  at.selection.capacity = limits.max_selected;
  at.bias = arena.take<float>(queries * selected);
  if (limits.staged_rows == 0) return at;
  at.selection.staged =
      arena.take<std::byte>(groups * static_cast<std::size_t>(limits.staged_rows) *
                            static_cast<std::size_t>(limits.row_bytes));
  at.selection.staged_capacity = limits.staged_rows;
  return at;
}

SelectorWorkspace Selector::workspace(const ScoreParams& params) const {
  QueryTables coarse;
  if (params.coarse_bits > 0) {
    const std::int64_t heads = std::int64_t{limits_.num_queries} * limits_.query_heads;
    coarse = {.entries = at_.entries + heads * entries_per_head(params),
              .entries_per_head = entries_per_head(coarse_phase(params)),
              .scalars = at_.scalars};
  }
  return {.limits = limits_,
          .tables = {.entries = at_.entries,
                     .entries_per_head = entries_per_head(params),
                     .scalars = at_.scalars},
          .coarse_tables = coarse,
          .scores = at_.scores,
          .combined = at_.combined,
          .token_mask = at_.token_mask,
          .scratch = at_.scratch,
          .rest_logs = at_.rest_logs,
          .selection = params.rule == SelectionRule::kPriority ? biased_selection(!params.shared())
                                                               : at_.selection};
}

transfer::SelectionView Selector::biased_selection(bool per_query_head) const {
  transfer::SelectionView view = at_.selection;
  view.bias = at_.bias;
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
  assert(input.items.count <= limits_.num_queries);
  assert(input.kv.query_heads() == limits_.query_heads);
  scoring::read_queries(stream, params, planes, input, queries, at_.entries, at_.scalars);
}

transfer::SelectionView Selector::select(transfer::Stream& stream, const SelectRequest& request,
                                         const RecallParams& recall_params) {
  check(request, limits_);
  const SelectionPlan& how = plan(request, recall_params.active);
  if (!request.tables_built && !how.reads_queries) {
    build_query_tables(stream, request.params, request.planes, request.queries,
                       request.query_batch.count, request.kv.query_heads(), at_.entries,
                       at_.scalars);
  }
  const SelectorWorkspace space = workspace(request.params);
  assert(request.params.coarse_bits == 0 || !recall_params.active);
  if (request.params.coarse_bits > 0 && !how.reads_queries) {
    build_query_tables(stream, coarse_phase(request.params), request.planes, request.queries,
                       request.query_batch.count, request.kv.query_heads(),
                       const_cast<float*>(space.coarse_tables.entries), at_.scalars);
  }
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      const int count = request.query_batch.count;
      const bool in_parts = how.part_queries > 0 && request.cached != nullptr;
      const int each = in_parts ? how.part_queries : count;
      const bool forks = in_parts && may_fork(stream, *aside_);
      if (forks) aside_->wait(stream.record());
      try {
        bool odd = false;
        for (int first = 0; first < count; first += each, odd = !odd) {
          cuda::select(odd && forks ? aside_->native() : stream.native(), request, space,
                       recall_params, how, {first, std::min(each, count - first), odd ? each : 0});
        }
      } catch (...) {
        if (forks) stream.wait(aside_->record());
        throw;
      }
      if (forks) stream.wait(aside_->record());
      return space.selection;
    }
  }
  stream.run([=] { cpu::select(request, space, recall_params); });
  return space.selection;
}

void Selector::export_missed(transfer::Stream& stream, const SelectRequest& request,
                             const MissedBatch& batch) {
  assert(batch.count == request.query_batch.count);
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::export_missed(stream.native(), request, workspace(request.params), batch,
                                 plan(request, true));
    }
  }
  stream.run([batch, rest_logs = at_.rest_logs, heads = request.kv.query_heads()] {
    cpu::export_missed(batch, heads, rest_logs);
  });
}

transfer::SelectionView Selector::adopt(transfer::Stream& stream, const SelectRequest& request,
                                        const IdTensor& ids, const IdFloats& bias) {
  check(request, limits_);
  SelectorWorkspace space = workspace(request.params);
  space.selection =
      bias.data != nullptr ? biased_selection(ids.heads > limits_.kv_heads) : at_.selection;
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
  transfer::enqueue<cpu::export_ids, cuda::export_ids>(stream, request, space, out, bias);
}

void Selector::export_scores(transfer::Stream& stream, const SelectRequest& request,
                             const IdTensor& ids, const IdFloats& out) {
  check(request, limits_);
  const SelectorWorkspace space = workspace(request.params);
  transfer::enqueue<cpu::export_scores, cuda::export_scores>(stream, request, space, ids, out);
}

}  // namespace kvtier::scoring
