#include "scoring/generic/generic_cuda.cuh"
#include "scoring/plan/paths_cuda.cuh"
#include "scoring/plan/selector_cuda.h"
#include "transfer/device/arena.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvtier::scoring::cuda {
namespace {

// Grid: query heads x queries.
__global__ void plan_rows(const __grid_constant__ GenericArgs args, PlanPurpose purpose) {
  const SelectRequest& request = args.request;
  const transfer::KvGeometry& kv = request.kv;
  const int query_index = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.x);
  const std::int64_t set = std::int64_t{query_index} * kv.query_heads() + head;
  std::uint32_t* histogram = args.scratch.histogram + set * kRadixBins;
  for (int bin = static_cast<int>(threadIdx.x); bin < kRadixBins; bin += kTileThreads) {
    histogram[bin] = 0;
  }
  if (threadIdx.x != 0) return;

  const transfer::QueryToken& query = request.query_batch[query_index];
  const transfer::AttendedSpans spans = transfer::attended_spans(
      request.rule, request.sequences[query.sequence].counters->length, query);
  const std::int64_t k =
      transfer::num_to_select(request.params.top_k, request.params.sparsity, spans);
  const auto most = static_cast<std::uint32_t>(k);
  args.scratch.states[set] = {.sought = most, .remaining = most, .wanted = most};
  if (head < kv.kv_heads) {
    args.workspace.selection.counts[std::int64_t{query_index} * kv.kv_heads + head] = 0;
  }
  if (head != 0) return;

  const bool scores = purpose == PlanPurpose::kScore;
  args.scratch.plans[query_index] = {.begin = spans.sink_end,
                                     .end = scores ? spans.eligible_end : spans.tail_begin,
                                     .k = k,
                                     .blocks = request.sketches[query.sequence],
                                     .slots = request.slots.of(query.sequence)};
  if (scores && request.flags != nullptr && spans.num_eligible() > 0) {
    const auto scored = static_cast<unsigned long long>(spans.num_eligible() * kv.kv_heads);
    atomicAdd(reinterpret_cast<unsigned long long*>(&request.flags->tokens_scored), scored);
  }
}

// Grid: heads of `ids` x queries. The block walks the ascending ids, so the order is theirs.
__global__ __launch_bounds__(kTileThreads) void export_id_rows(
    const __grid_constant__ GenericArgs args, const __grid_constant__ IdTensor ids,
    const __grid_constant__ IdFloats bias) {
  const transfer::SelectionView& selection = args.workspace.selection;
  const int kv_heads = args.request.kv.kv_heads;
  const bool per_kv_head = ids.heads == kv_heads;
  const int group = per_kv_head ? 1 : args.request.kv.group;
  const int head = static_cast<int>(blockIdx.x);
  const int in_group = head % group;
  const std::int64_t list = std::int64_t{blockIdx.y} * kv_heads + head / group;
  const std::int32_t* tokens = selection.ids + list * selection.capacity;
  const std::uint16_t* masks = selection.head_mask + list * selection.capacity;
  const unsigned wanted = per_kv_head ? 0xFFFFU : 1U << in_group;
  std::int32_t* out = ids.data + blockIdx.y * ids.query_stride + head * ids.head_stride;

  const int bias_heads = selection.bias_heads;
  const float* biases =
      selection.bias + list * selection.capacity * bias_heads + (bias_heads == 1 ? 0 : in_group);
  float* bias_out = bias.data == nullptr
                        ? nullptr
                        : bias.data + blockIdx.y * bias.query_stride + head * bias.head_stride;

  const std::int64_t count = selection.counts[list];
  std::int64_t written = 0;
  for (std::int64_t base = 0; base < count; base += kTileThreads) {
    const std::int64_t i = base + threadIdx.x;
    const bool mine = i < count && (masks[i] & wanted) != 0;
    std::uint32_t total = 0;
    const std::int64_t position = written + block_exclusive_sum<kTileThreads>(mine ? 1 : 0, &total);
    if (mine && position < ids.n) {
      out[position] = tokens[i];
      if (bias_out != nullptr) bias_out[position] = biases[i * bias_heads];
    }
    written += total;
  }
  for (std::int64_t i = written + threadIdx.x; i < ids.n; i += kTileThreads) {
    out[i] = -1;
    if (bias_out != nullptr) bias_out[i] = 0.0F;
  }
}

// Grid: blocks of ids x heads of `ids` x queries. With fewer heads of ids than of scores, a token's
// score is the largest of its group; with more, the group's.
__global__ __launch_bounds__(kTileThreads) void export_score_rows(
    const __grid_constant__ GenericArgs args, const __grid_constant__ IdTensor ids,
    const __grid_constant__ IdFloats out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  if (i >= ids.n) return;
  const int head = static_cast<int>(blockIdx.y);
  const std::int64_t query_index = blockIdx.z;
  const std::int32_t id = ids.data[query_index * ids.query_stride + head * ids.head_stride + i];
  const float* scores =
      args.request.params.shared() ? args.workspace.combined : args.workspace.scores;
  const int first = static_cast<int>(std::int64_t{head} * args.sets / ids.heads);
  const int count = max(1, args.sets / ids.heads);
  float best = -std::numeric_limits<float>::infinity();
  const QueryPlan& plan = args.scratch.plans[query_index];
  for (int h = 0; h < count && id >= plan.begin && id < plan.end; ++h) {
    best = fmaxf(best, args.row(scores, query_index * args.sets + first + h)[id]);
  }
  out.data[query_index * out.query_stride + head * out.head_stride + i] = best;
}

Stage make_stage(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace) {
  Stage stage{.stream = static_cast<cudaStream_t>(stream),
              .request = request,
              .workspace = workspace,
              .scratch = scratch_layout(workspace.limits, workspace.scratch)};
  stage.scratch.filter.stream_keys = workspace.token_mask;
  return stage;
}

}  // namespace

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  int value = 0;
  KVTIER_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

DeviceLimits device_limits() {
  return {.processors = device_attribute(cudaDevAttrMultiProcessorCount),
          .major = device_attribute(cudaDevAttrComputeCapabilityMajor),
          .block_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          // Two transfers a clock, of kHz and bits.
          .read_gbps = 2.0 * device_attribute(cudaDevAttrMemoryClockRate) *
                       device_attribute(cudaDevAttrGlobalMemoryBusWidth) / 8e6};
}

Scratch scratch_layout(const SelectorLimits& limits, std::byte* base, std::size_t* bytes,
                       std::size_t* zeroed) {
  const std::int64_t num_queries = limits.num_queries;
  const std::int64_t sets = num_queries * limits.query_heads;
  Scratch scratch{};
  scratch.tiles = (limits.max_tokens + kTileTokens - 1) / kTileTokens;
  scratch.segments = scratch.tiles * (kTileTokens / kSegmentTokens);

  transfer::Arena arena(base);
  const auto place = [&arena]<typename T>(T*& array, std::int64_t count) {
    array = arena.take<T>(static_cast<std::size_t>(count));
  };
  const auto place_bytes = [&arena]<typename T>(T*& array, std::size_t size) {
    array = reinterpret_cast<T*>(arena.take<std::byte>(size));
  };
  const std::int64_t groups = num_queries * limits.kv_heads;
  place_bytes(scratch.filter.mailboxes, mailboxes_bytes(groups));
  const int group = limits.query_heads / limits.kv_heads;
  place(scratch.filter.fused_parts, fused_parts_words(groups, group));
  place(scratch.filter.fused_ids, fused_ids_words(groups, limits.max_selected));
  if (zeroed != nullptr) *zeroed = arena.bytes();
  place(scratch.plans, num_queries);
  place(scratch.states, sets);
  place(scratch.histogram, sets * kRadixBins);
  place(scratch.ties, sets * scratch.segments);
  place(scratch.chosen, num_queries * limits.kv_heads * scratch.segments);
  place(scratch.partials, sets * scratch.tiles);
  place(scratch.normalisers, sets);
  place_bytes(scratch.estimates, estimates_bytes(sets));
  FilterScratch& filter = scratch.filter;
  // Masses of bins, 8 bytes each, are in the same memory: a call has one or the other.
  place(filter.masses, std::max(groups * limits.max_tokens, sets * kRadixBins * 2));
  scratch.masses = reinterpret_cast<std::uint64_t*>(filter.masses);
  place(filter.fused_sums, std::max<std::int64_t>(groups, kFusedParts) * group);
  place_bytes(filter.stream_groups, static_cast<std::size_t>(groups * stream_group_bytes()));
  place(filter.stream_sums, (groups + kMostStreamBlocks) * kMaxGroup);
  place(filter.stream_counts, (groups + kMostStreamBlocks) * 2 * kFusedBins);
  place(filter.stream_recall, (groups + kMostStreamBlocks) * kFusedHeads * kRecallSums);
  if (bytes != nullptr) *bytes = arena.bytes();
  return scratch;
}

ExchangeLease lease_exchange() {
  int device = 0;
  KVTIER_CUDA_CHECK(cudaGetDevice(&device));
  // Blocks of a launch, or of two launches: those of two parts of a batch.
  constexpr int kMostWaiting = static_cast<int>(kFusedBlocks) - 1;
  static_assert(2 * (kChoiceBlocks - 1) <= kMostWaiting);
  return {device, (device_attribute(cudaDevAttrMultiProcessorCount) - 1) / kMostWaiting};
}

std::size_t zeroed_bytes(const SelectorLimits& limits) {
  std::size_t bytes = 0;
  (void)scratch_layout(limits, nullptr, nullptr, &bytes);
  return bytes;
}

std::size_t scratch_bytes(const SelectorLimits& limits) {
  std::size_t bytes = 0;
  (void)scratch_layout(limits, nullptr, &bytes);
  return bytes;
}

void enqueue_plan(const Stage& stage, PlanPurpose purpose) {
  const dim3 grid(static_cast<unsigned>(stage.request.kv.query_heads()),
                  static_cast<unsigned>(stage.num_queries()));
  launch(stage, plan_rows, grid, generic_args(stage), purpose);
}

void select(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
            const RecallParams& recall_params, const SelectionPlan& plan, const QueryPart& part) {
  if (part.count == 0) return;
  if (request.params.coarse_bits > 0 && plan.path == SelectionPath::kGeneric) {
    return enqueue_two_phases(static_cast<cudaStream_t>(stream), request, workspace);
  }
  const Stage stage = make_stage(stream, request, workspace);
  const bool scores = request.rule.mode == LayerMode::kSparse && request.max_length > 0;
  const bool thresholds = request.params.threshold > 0.0F;
  if (plan.path != SelectionPath::kGeneric) return enqueue_path(stage, plan, part, recall_params);
  enqueue_plan(stage, PlanPurpose::kScore);
  if (!scores) return;
  enqueue_scores(stage);
  if (thresholds || recall_params.active) clear_estimates(stage);
  if (thresholds) enqueue_static(stage, true);
  if (recall_params.active) enqueue_static(stage, false);
  if (stage.shared() || thresholds || recall_params.active) {
    enqueue_normalisers(stage, recall_params);
  }
  if (stage.shared()) enqueue_combine(stage);
  if (recall_params.active) enqueue_weights(stage);
  if (recall_params.missed > 0.0) enqueue_top_of_recall(stage, recall_params);
  if (stage.prioritised()) {
    enqueue_priorities(stage, recall_params.missed > 0.0);
  } else if (!(recall_params.missed > 0.0)) {
    enqueue_top_k(stage);
  }
  enqueue_marks(stage);
  enqueue_compact(stage, stage.prioritised() ? BiasSource::kPriorities : BiasSource::kNone);
}

void export_missed(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
                   const MissedBatch& batch, const SelectionPlan& plan) {
  const auto wanted = [](const MissedItem& item) { return item.missed != nullptr; };
  if (std::none_of(batch.items, batch.items + batch.count, wanted)) return;
  const Stage stage = make_stage(stream, request, workspace);
  if (plan.path == SelectionPath::kStream) return enqueue_missed_of_stream(stage, batch);
  enqueue_missed(stage, batch);
}

void adopt(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
           const IdTensor& ids, const IdFloats& bias) {
  if (request.query_batch.count == 0) return;
  const Stage stage = make_stage(stream, request, workspace);
  enqueue_plan(stage, PlanPurpose::kAdopt);
  if (request.max_length <= 0) return;
  enqueue_adopt(stage, ids, bias);
  enqueue_compact(stage, bias.data != nullptr ? BiasSource::kGiven : BiasSource::kNone);
}

void export_ids(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
                const IdTensor& out, const IdFloats& bias) {
  if (request.query_batch.count == 0 || out.n == 0) return;
  const Stage stage = make_stage(stream, request, workspace);
  const dim3 grid(static_cast<unsigned>(out.heads),
                  static_cast<unsigned>(request.query_batch.count));
  launch(stage, export_id_rows, grid, generic_args(stage), out, bias);
}

void export_scores(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
                   const IdTensor& ids, const IdFloats& out) {
  if (request.query_batch.count == 0 || ids.n == 0) return;
  const Stage stage = make_stage(stream, request, workspace);
  dim3 grid = tile_grid(stage, ids.heads);
  grid.x = static_cast<unsigned>((ids.n + kTileThreads - 1) / kTileThreads);
  launch(stage, export_score_rows, grid, generic_args(stage), ids, out);
}

}  // namespace kvtier::scoring::cuda
