#include "runtime/step/step.h"

#include "attention/flash_decode.h"
#include "hashing/append.h"
#include "runtime/sequence/row_cache.h"
#include "runtime/step/stage_timer.h"
#include "runtime/step/tiered_attention.h"
#include "scoring/dense_rule.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace kvtier::runtime {

namespace {

/// Query tokens [begin, begin + count) of one part.
struct Slice {
  const AttendPart* part = nullptr;
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

bool is_sparse(const AttendPart& part) { return part.options.rule.mode == LayerMode::kSparse; }

bool has_ids(const AttendPart& part) {
  return !part.inputs.selected.empty() || !part.outputs.selected.empty() ||
         !part.select.ids.empty();
}

bool shares_launch(const AttendPart& a, const AttendPart& b) {
  return !has_ids(a) && !has_ids(b) && a.sketch == b.sketch && a.options.same_launch(b.options);
}

/// The queries of one launch of each kernel, at most `Workspace::batch_queries`.
struct Launch {
  std::vector<Slice> slices;
  transfer::SequenceBatch sequences;
  scoring::SketchTables sketches;
  transfer::QueryBatch queries;
  std::int64_t max_length = 0;
  std::int64_t least_length = std::numeric_limits<std::int64_t>::max();
  bool dense = false;  ///< All tokens are attended, though the layer is sparse.
  /// As many tokens are taken as an error target takes at most, since it cannot weigh those that
  /// are always attended: they are on more pages than there are frames. The error is no larger.
  bool takes_most = false;
  std::optional<scoring::SelectionPlan> plan{};  ///< Once it has been made.

  /// The part whose options are those of all.
  [[nodiscard]] const AttendPart& first() const { return *slices.front().part; }
  [[nodiscard]] const ResolvedOptions& options() const { return first().options; }
  [[nodiscard]] bool sparse() const { return is_sparse(first()) && !dense; }
  [[nodiscard]] transfer::SpanRule rule() const {
    transfer::SpanRule rule = options().rule;
    if (dense) rule.mode = LayerMode::kDense;
    return rule;
  }
  [[nodiscard]] scoring::ScoreParams params() const {
    scoring::ScoreParams params = options().params;
    if (takes_most) params.threshold = 0.0F;
    return params;
  }
  /// Returns whether the selector chooses the tokens, from tables of the queries.
  [[nodiscard]] bool scores() const { return sparse() && first().inputs.selected.empty(); }
};

/// What `read_queries` leaves for the selection.
struct QueriesRead {
  std::optional<scoring::QueryInput> unread{};  ///< The selector, or attention, reads them itself.
  bool repeated = false;                        ///< What is done has been counted.
  scoring::SelectionPlan plan{};  ///< Nothing is fused where the selector does not choose.
};

/// Where attention writes.
struct Outputs {
  attention::OutputBatch results;
  scoring::MissedBatch missed;
};

scoring::IdTensor id_tensor(const HostStaging::Slice& slice, const TensorView& tensor) {
  return {.data = static_cast<std::int32_t*>(slice.data),
          .query_stride = slice.token_stride,
          .head_stride = slice.head_stride,
          .heads = static_cast<int>(tensor.shape[1]),
          .n = tensor.shape[2]};
}

scoring::IdFloats id_floats(const HostStaging::Slice& slice) {
  return {.data = static_cast<float*>(slice.data),
          .query_stride = slice.token_stride,
          .head_stride = slice.head_stride};
}

/// The launches of an attend, a select or a prefetch, in the order of `run`.
class Step {
 public:
  Step(SubmissionScope& scope, EngineState& engine, int layer)
      : scope_(scope), engine_(engine), workspace_(engine.workspace), layer_(layer) {}

  void add(Launch& launch, const Slice& slice) const {
    const AttendPart& part = *slice.part;
    const LayerState& state = part.session->layer(layer_);
    const std::int64_t total = part.inputs.query.shape[0] + part.options.tokens_after;
    for (std::int64_t t = slice.begin; t < slice.begin + slice.count; ++t) {
      launch.queries.push({.sequence = launch.sequences.count,
                           .lag = static_cast<std::int32_t>(total - 1 - t),
                           .dense_from = part.options.dense_from});
    }
    launch.sequences.push(state.view);
    launch.sketches.push(is_sparse(part) ? state.slabs[part.sketch].device_addresses() : nullptr);
    launch.max_length = std::max(launch.max_length, tokens_of(state));
    launch.least_length = std::min(launch.least_length, tokens_of(state));
    launch.slices.push_back(slice);
  }

  /// Returns whether the launch attends to all tokens because that is faster.
  [[nodiscard]] bool dense_is_faster(Launch& launch) const {
    const AttendPart& first = launch.first();
    const ResolvedOptions& options = first.options;
    const auto wants_missed = [](const Slice& slice) {
      return !slice.part->outputs.missed.empty();
    };
    if (!options.may_be_dense || first.prefetches || has_ids(first) ||
        launch.least_length < scoring::kLeastDenseTokens ||
        std::ranges::any_of(launch.slices, wants_missed)) {
      return false;
    }
    const transfer::KvGeometry& kv = engine_.kv;
    const bool per_head = options.params.selection == Selection::kPerQueryHead;
    scoring::LaunchCost cost{.path = plan(launch).path,
                             .recall = options.recall_params.active,
                             .group = kv.group,
                             .least_tokens = launch.least_length,
                             .row_bytes = static_cast<double>(kv.row_bytes()),
                             .read_gbps = workspace_.selector.device().read_gbps};
    for (const Slice& slice : launch.slices) {
      const std::int64_t tokens = tokens_of(slice.part->session->layer(layer_));
      const std::int64_t selected = std::min(
          tokens, scoring::max_per_query(options.params, tokens) * (per_head ? kv.group : 1));
      const std::int64_t sets = slice.count * kv.kv_heads;
      cost.pairs += static_cast<double>(tokens * sets);
      cost.selected += static_cast<double>(selected * sets);
    }
    return scoring::dense_is_faster(cost);
  }

  /// `after_append`: nothing was enqueued since the append.
  void run(Launch& launch, bool after_append) {
    const AttendPart& first = launch.first();
    if (first.prefetches) {
      prefetch(launch);
    } else {
      const PagePool::Counters& pages = engine_.pools.pages->counters();
      const std::uint64_t restored = pages.restored;
      if (pages_may_be_evicted() && hold_weighed_rows(launch)) after_append = false;
      if (first.select.ids.empty()) {
        attend(launch, after_append);
      } else {
        select(launch, after_append);
      }
      if (pages.restored != restored) ++engine_.statistics.cold_steps;
    }
    workspace_.staging.finish(stream());
  }

 private:
  [[nodiscard]] transfer::Stream& stream() const { return scope_.stream(); }
  /// Returns whether the launch may find pages evicted.
  [[nodiscard]] bool pages_may_be_evicted() const {
    return engine_.pools.pages->has_tiers() && !scope_.capturing();
  }
  /// Tokens that the launch may find. A captured one is replayed up to the capacity.
  [[nodiscard]] std::int64_t tokens_of(const LayerState& layer) const {
    return scope_.capturing() ? layer.capacity : layer.length;
  }
  [[nodiscard]] transfer::StepFlags* flags(const Launch& launch) const {
    return launch.sparse() ? engine_.statistics.of_sketch(launch.first().sketch)
                           : engine_.statistics.unscored();
  }

  [[nodiscard]] std::vector<LayerState*> layers(const Launch& launch) const {
    std::vector<LayerState*> layers;
    for (const Slice& slice : launch.slices) layers.push_back(&slice.part->session->layer(layer_));
    return layers;
  }

  [[nodiscard]] static transfer::Batch<transfer::StepFlags*> session_flags(const Launch& launch) {
    transfer::Batch<transfer::StepFlags*> flags;
    for (const Slice& slice : launch.slices) flags.push(slice.part->session->flags());
    return flags;
  }

  [[nodiscard]] scoring::SelectRequest select_request(const Launch& launch,
                                                      const QueriesRead& read) const {
    const SketchStore& store = engine_.pools.sketches[launch.first().sketch];
    return {.params = launch.params(),
            .rule = launch.options().rule,
            .kv = engine_.kv,
            .sketch = store.geometry,
            .planes = store.planes.view(),
            .sequences = launch.sequences,
            .sketches = launch.sketches,
            .query_batch = launch.queries,
            .queries = workspace_.queries.as<float>(),
            .max_length = launch.max_length,
            .flags = read.repeated ? engine_.statistics.repeated() : flags(launch),
            .keep_scores = !launch.first().select.scores.empty(),
            .tables_built = launch.scores(),
            .input = read.unread ? &*read.unread : nullptr,
            .packed = workspace_.queries.as<float>()};
  }

  /// What attention reads.
  [[nodiscard]] transfer::RowReading row_reading(const Launch& launch,
                                                 const transfer::SelectionView& selection) const {
    return {.sequences = launch.sequences,
            .flags = session_flags(launch),
            .query_batch = launch.queries,
            .selection = selection,
            .rule = launch.rule(),
            .frames = engine_.pools.frame_checks};
  }

  [[nodiscard]] std::int64_t max_selected(const Launch& launch) const {
    const TensorView& given = launch.first().inputs.selected;
    if (!given.empty()) {
      const std::int64_t lists = std::max<std::int64_t>(1, given.shape[1] / engine_.kv.kv_heads);
      return std::min(launch.max_length, given.shape[2] * lists);
    }
    const scoring::ScoreParams& params = launch.options().params;
    const bool per_head = params.selection == Selection::kPerQueryHead;
    return std::min(launch.max_length, scoring::max_per_query(params, launch.max_length) *
                                           (per_head ? engine_.kv.group : 1));
  }

  const scoring::SelectionPlan& plan(Launch& launch) const {
    if (!launch.plan) {
      launch.plan = workspace_.selector.plan(select_request(launch, {}),
                                             launch.options().recall_params.active);
    }
    return *launch.plan;
  }

  /// Rows are prefetched only where nothing has to be waited for.
  void prefetch(Launch& launch) {
    if (pages_may_be_evicted() && !TieredLaunch::all_resident(stream(), layers(launch))) return;
    const transfer::SelectionView selection = choose(launch, read_queries(launch, false));
    const std::vector<LayerState*> layers = this->layers(launch);
    StageTimer timer(scope_, engine_, engine_.statistics.seconds.fetch);
    enqueue_row_prefetch(stream(), engine_.pools,
                         {.layers = layers,
                          .reading = row_reading(launch, selection),
                          .flags = flags(launch),
                          .capturing = scope_.capturing()});
    timer.stop();
  }

  void select(Launch& launch, bool after_append) {
    const QueriesRead read = read_queries(launch, after_append);
    (void)choose(launch, read);
    export_ids(launch, read, launch.first().select);
  }

  void attend(Launch& launch, bool after_append) {
    const ResolvedOptions& options = launch.options();
    QueriesRead read = read_queries(launch, after_append);
    const bool resident =
        !pages_may_be_evicted() || TieredLaunch::all_resident(stream(), layers(launch));
    // Stages that are timed run apart, and evicted pages are restored between the two.
    const bool may_fuse = resident && !engine_.config.time_stages;
    const std::optional<transfer::CachedSequences> cached =
        may_fuse ? cached_rows(launch, read) : std::nullopt;
    if (cached || (may_fuse && read.plan.attends && engine_.pools.pages_on_device)) {
      Outputs outputs = make_outputs(launch);
      const attention::AttendTargets targets{.softmax_scale = options.softmax_scale,
                                             .logit_softcap = options.logit_softcap,
                                             .outputs = outputs.results};
      (void)choose(launch, read, &targets, cached ? &*cached : nullptr);
      return finish_attend(launch, read, outputs);
    }

    attention::AttendRequest request{.kv = engine_.kv,
                                     .rule = launch.rule(),
                                     .sequences = launch.sequences,
                                     .query_batch = launch.queries,
                                     .queries = workspace_.queries.as<float>(),
                                     .softmax_scale = options.softmax_scale,
                                     .logit_softcap = options.logit_softcap,
                                     .max_length = launch.max_length,
                                     .flags = flags(launch),
                                     .pages_on_device = engine_.pools.pages_on_device,
                                     .places = {}};
    transfer::SelectionView selection;
    std::int64_t most = 0;
    if (launch.sparse()) {
      selection = choose(launch, read);
      most = max_selected(launch);
      request.k_known = read.plan.k_known;
      request.top_k = options.params.top_k;
      request.sparsity = options.params.sparsity;
    } else if (read.unread) {
      request.items = &read.unread->items;
      if (read.unread->after_append && request.rule.mode == LayerMode::kDense &&
          engine_.pools.pages_on_device) {
        request.appending_tokens = hashing::kMostOverlappedTokens;
      }
    }
    if (!resident) {
      const std::vector<LayerState*> layers = this->layers(launch);
      StageTimer timer(scope_, engine_, engine_.statistics.seconds.fetch);
      TieredLaunch tiered(stream(), engine_, layers, request);
      if (!ensure_resident(launch, tiered, read, selection)) {
        Outputs outputs = make_outputs(launch);
        tiered.attend(selection, most, outputs.results, session_flags(launch));
        timer.stop();
        return finish_attend(launch, read, outputs);
      }
      timer.stop();
    }
    request.places = gather(launch, selection);
    Outputs outputs = make_outputs(launch);
    StageTimer timer(scope_, engine_, engine_.statistics.seconds.attend);
    workspace_.flash.attend(stream(), request, selection, most, outputs.results);
    timer.stop();
    finish_attend(launch, read, outputs);
  }

  // The stages, in their order.

  /// Waits for the pages of always-attended tokens where these are weighed before a selection.
  /// Returns whether any are, also where they are too many and most tokens are taken instead.
  bool hold_weighed_rows(Launch& launch) {
    const bool recall = launch.options().recall_params.active;
    if (!launch.scores() || !(recall || launch.params().threshold > 0.0F)) return false;
    const std::size_t too_many = ensure_static_resident(stream(), engine_, layers(launch),
                                                        launch.options().rule, launch.queries);
    if (too_many == 0) return true;
    if (recall) fail_too_many(engine_, too_many);
    launch.takes_most = true;
    launch.plan.reset();
    return true;
  }

  QueriesRead read_queries(Launch& launch, bool after_append, bool repeated = false) {
    transfer::QueryItems items;
    for (const Slice& slice : launch.slices) {
      SessionState& session = *slice.part->session;
      const TensorView& query = slice.part->inputs.query;
      const HostStaging::Slice on_device =
          workspace_.staging.input(stream(), query, slice.begin, slice.count);
      for (std::int64_t t = 0; t < slice.count; ++t) {
        items.push({.query = on_device.tokens(query.dtype),
                    .token = static_cast<std::int32_t>(t),
                    .lag = launch.queries[items.count].lag,
                    .flags = repeated ? engine_.statistics.repeated() : session.flags(),
                    .counters = session.layer(layer_).view.counters,
                    .layer = layer_});
      }
    }
    auto* const packed = workspace_.queries.as<float>();
    QueriesRead read{.repeated = repeated};
    const scoring::QueryInput input{.kv = engine_.kv, .items = items, .after_append = after_append};
    if (!launch.scores()) {
      const bool on_gpu = stream().native() != nullptr;
      if (on_gpu && !launch.sparse() && !pages_may_be_evicted()) {
        read.unread = input;
      } else {
        transfer::pack_queries(stream(), engine_.kv, items, packed);
      }
      return read;
    }
    read.plan = plan(launch);
    if (read.plan.reads_queries) {
      read.unread = input;
      return read;
    }
    const SketchStore& store = engine_.pools.sketches[launch.first().sketch];
    workspace_.selector.read_queries(stream(), launch.params(), store.planes.view(), input, packed);
    return read;
  }

  /// The row cache of the launch, where one kernel can select and attend through it.
  [[nodiscard]] std::optional<transfer::CachedSequences> cached_rows(const Launch& launch,
                                                                     const QueriesRead& read) {
    const bool one_each = launch.queries.count == launch.sequences.count;
    if (read.plan.cached_rows == 0 || engine_.pools.pages_on_device || engine_.kv.row_checks ||
        !one_each || max_selected(launch) > read.plan.cached_rows) {
      return std::nullopt;
    }
    const std::vector<LayerState*> layers = this->layers(launch);
    return cached_sequences(stream(), engine_.pools, layers, scope_.capturing());
  }

  /// Selects, or takes the caller's ids. Where `attend` is given, the selection's kernel attends
  /// too, with `cached` through the row cache.
  transfer::SelectionView choose(const Launch& launch, const QueriesRead& read,
                                 const attention::AttendTargets* attend = nullptr,
                                 const transfer::CachedSequences* cached = nullptr) {
    const Slice& first = launch.slices.front();
    const TensorView& given = first.part->inputs.selected;
    StageTimer timer(scope_, engine_, engine_.statistics.seconds.score);
    scoring::SelectRequest request = select_request(launch, read);
    transfer::SelectionView selection;
    if (given.empty()) {
      request.attend = attend;
      request.cached = cached;
      selection = workspace_.selector.select(stream(), request, launch.options().recall_params);
    } else {
      const HostStaging::Slice ids =
          workspace_.staging.input(stream(), given, first.begin, first.count);
      const TensorView& bias = first.part->inputs.bias;
      HostStaging::Slice biases;
      if (!bias.empty()) {
        biases = workspace_.staging.input(stream(), bias, first.begin, first.count);
      }
      selection =
          workspace_.selector.adopt(stream(), request, id_tensor(ids, given), id_floats(biases));
    }
    timer.stop();
    return selection;
  }

  /// Waits for the pages of a selection. Makes it again when other calls have used the workspace
  /// meanwhile: it is the same, and its pages are resident, unless they are too many at once. Then
  /// others may have taken the frames of rows that it weighs. Returns false when the pages are too
  /// many.
  bool ensure_resident(Launch& launch, TieredLaunch& tiered, QueriesRead& read,
                       transfer::SelectionView& selection) {
    (void)scope_.workspace_lost();
    bool together = tiered.ensure_resident(selection);
    while (scope_.workspace_lost()) {
      if (!together) (void)hold_weighed_rows(launch);
      (void)scope_.workspace_lost();  // it has nothing of the call
      read = read_queries(launch, false, /*repeated=*/true);
      if (launch.sparse()) selection = choose(launch, read);
      together = tiered.ensure_resident(selection);
    }
    read.repeated = false;
    return together;
  }

  /// Copies selected rows to staging, where there is any, and compares with their checks those that
  /// attention reads. Returns where cached rows are.
  transfer::RowCachePlaces gather(const Launch& launch, const transfer::SelectionView& selection) {
    if (selection.staged_capacity > 0) {
      StageTimer timer(scope_, engine_, engine_.statistics.seconds.fetch);
      const std::vector<LayerState*> layers = this->layers(launch);
      const transfer::RowCachePlaces places = fetch_rows(stream(), engine_.pools,
                                                         {.layers = layers,
                                                          .reading = row_reading(launch, selection),
                                                          .flags = flags(launch),
                                                          .capturing = scope_.capturing()});
      timer.stop();
      return places;
    }
    if (engine_.kv.row_checks) {
      transfer::verify_rows(stream(), engine_.kv, row_reading(launch, selection));
    }
    return {};
  }

  [[nodiscard]] Outputs make_outputs(const Launch& launch) const {
    Outputs outputs;
    for (const Slice& slice : launch.slices) {
      const AttendOutputs& to = slice.part->outputs;
      const auto staged = [&](const MutableTensorView& tensor) {
        return tensor.empty() ? HostStaging::Slice{}
                              : workspace_.staging.output(tensor, slice.begin, slice.count);
      };
      const HostStaging::Slice out = staged(to.out);
      const HostStaging::Slice lse = staged(to.lse);
      const auto element = static_cast<std::int64_t>(dtype_bytes(to.out.dtype));
      for (std::int64_t t = 0; t < slice.count; ++t) {
        attention::OutputItem item{
            .out = static_cast<std::byte*>(out.data) + t * out.token_stride * element,
            .dtype = to.out.dtype,
            .head_stride = out.head_stride};
        if (!to.lse.empty()) {
          item.lse = static_cast<float*>(lse.data) + t * lse.token_stride;
          item.lse_stride = lse.head_stride;
        } else if (!to.missed.empty()) {
          item.lse = workspace_.selector.lse(outputs.results.count);
          item.lse_stride = 1;
        }
        outputs.missed.push({.lse = item.lse, .lse_stride = item.lse_stride});
        outputs.results.push(item);
      }
    }
    return outputs;
  }

  /// Takes the place of the selection that an earlier launch has left.
  void select_none(const Launch& launch) {
    scoring::SelectRequest request = select_request(launch, {});
    request.rule = {.mode = LayerMode::kDense};
    (void)workspace_.selector.adopt(stream(), request, {});
  }

  void export_ids(const Launch& launch, const QueriesRead& read, const SelectOutputs& outputs) {
    const Slice& first = launch.slices.front();
    const auto staged = [&](const MutableTensorView& tensor) {
      return tensor.empty() ? HostStaging::Slice{}
                            : workspace_.staging.output(tensor, first.begin, first.count);
    };
    const scoring::IdTensor ids = id_tensor(staged(outputs.ids), outputs.ids);
    const scoring::SelectRequest request = select_request(launch, read);
    workspace_.selector.export_ids(stream(), request, ids, id_floats(staged(outputs.bias)));
    if (outputs.scores.empty()) return;
    workspace_.selector.export_scores(stream(), request, ids, id_floats(staged(outputs.scores)));
  }

  /// What was selected, and how much was missed, when asked for.
  void finish_attend(const Launch& launch, const QueriesRead& read, Outputs& outputs) {
    const MutableTensorView& ids = launch.first().outputs.selected;
    if (!ids.empty()) {
      if (!launch.sparse()) select_none(launch);
      export_ids(launch, read, {.ids = ids});
    }
    if (launch.sparse() && launch.options().recall_params.active) {
      int query = 0;
      for (const Slice& slice : launch.slices) {
        const MutableTensorView& missed = slice.part->outputs.missed;
        if (missed.empty()) {
          query += static_cast<int>(slice.count);
          continue;
        }
        const HostStaging::Slice to = workspace_.staging.output(missed, slice.begin, slice.count);
        for (std::int64_t t = 0; t < slice.count; ++t, ++query) {
          outputs.missed[query].missed = static_cast<float*>(to.data) + t * to.token_stride;
          outputs.missed[query].missed_stride = to.head_stride;
        }
      }
      workspace_.selector.export_missed(stream(), select_request(launch, read), outputs.missed);
    }
  }

  SubmissionScope& scope_;
  EngineState& engine_;
  Workspace& workspace_;
  int layer_;
};

}  // namespace

bool can_batch_with(const AttendPart& part, std::span<const AttendPart> parts, int batch_queries) {
  if (!is_sparse(part) || part.options.recall_params.active || !part.inputs.selected.empty() ||
      parts.size() > static_cast<std::size_t>(batch_queries)) {
    return false;
  }
  return parts.size() == 1 || shares_launch(parts.front(), part);
}

QueryCount attend(SubmissionScope& scope, EngineState& engine, int layer,
                  std::span<const AttendPart> parts, bool after_append) {
  Step step(scope, engine, layer);
  Launch launch;
  QueryCount count;
  const auto flush = [&] {
    if (launch.slices.empty()) return;
    launch.dense = step.dense_is_faster(launch);
    step.run(launch, std::exchange(after_append, false));
    const auto queries = static_cast<std::uint64_t>(launch.queries.count);
    count.all += queries;
    if (launch.dense) count.dense += queries;
    launch = {};
  };
  const int most = engine.workspace.batch_queries;
  for (const AttendPart& part : parts) {
    const std::int64_t tokens = part.inputs.query.shape[0];
    for (std::int64_t begin = 0; begin < tokens;) {
      const bool joins = launch.slices.empty() || shares_launch(launch.first(), part);
      if (!joins || launch.queries.count == most || (begin > 0 && has_ids(part))) flush();
      const std::int64_t taken =
          std::min<std::int64_t>(tokens - begin, most - launch.queries.count);
      step.add(launch, {&part, begin, taken});
      begin += taken;
    }
  }
  flush();
  return count;
}

}  // namespace kvtier::runtime
