#include "runtime/step/step.h"

#include "attention/flash_decode.h"
#include "runtime/engine/page_prefetch.h"
#include "runtime/sequence/row_cache.h"
#include "runtime/step/stage_timer.h"
#include "runtime/step/tiered_attention.h"
#include "scoring/selection_plan.h"
#include "transfer/kv/row_checks.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace kvtier::runtime {

namespace {

/// Query tokens [begin, begin + count) of one part.
struct Slice {
  const AttendPart* part = nullptr;
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

bool has_ids(const AttendPart& part) {
  return !part.inputs.selected.empty() || !part.outputs.selected.empty() ||
         !part.select.ids.empty();
}

/// One launch of every attend kernel over at most `batch_rows` query rows.
class AttendLaunch {
 public:
  AttendLaunch(SubmissionScope& scope, EngineState& engine, int layer, bool after_append)
      : scope_(scope), engine_(engine), layer_(layer), after_append_(after_append) {}

  [[nodiscard]] int rows() const noexcept { return rows_.count; }

  [[nodiscard]] bool accepts(const AttendPart& part) const {
    if (slices_.empty()) return true;
    const AttendPart& first = *slices_.front().part;
    return !has_ids(first) && !has_ids(part) && first.sketch == part.sketch &&
           first.options.same_launch(part.options);
  }

  void add(const Slice& slice) {
    const LayerState& state = slice.part->session->layer(layer_);
    const std::int64_t total = slice.part->inputs.query.shape[0] + slice.part->options.tokens_after;
    for (std::int64_t t = slice.begin; t < slice.begin + slice.count; ++t) {
      rows_.push({.sequence = sequences_.count,
                  .lag = static_cast<std::int32_t>(total - 1 - t),
                  .dense_from = slice.part->options.dense_from});
    }
    sequences_.push(state.view);
    sketches_.push(sparse(*slice.part) ? state.slabs[slice.part->sketch].device_addresses()
                                       : nullptr);
    max_length_ = std::max(max_length_, scope_.capturing() ? state.capacity : state.length);
    slices_.push_back(slice);
  }

  void enqueue() {
    if (slices_.empty()) return;
    if (slices_.front().part->prefetches) {
      if (prefetches()) prefetch();
      return finish();
    }
    const bool reads_static = options().recall_params.active || options().params.threshold > 0.0F;
    if (reads_static && engine_.pools.pages->has_tiers() && !scope_.capturing()) {
      ensure_static_resident(scope_.stream(), engine_, layers_of_slices(), options().rule, rows_);
      after_append_ = false;
    }
    read_queries();
    if (slices_.front().part->select.ids.empty()) {
      attend();
    } else {
      (void)choose();
      export_ids(slices_.front().part->select);
    }
    if (!scope_.capturing())
      engine_.statistics.query_tokens += static_cast<std::uint64_t>(rows_.count);
    finish();
  }

 private:
  void finish() {
    engine_.workspace.staging.finish(scope_.stream());
    slices_.clear();
    input_.reset();
    tables_after_append_ = false;
    rows_.count = sequences_.count = sketches_.count = 0;
    max_length_ = 0;
  }

  static bool sparse(const AttendPart& part) {
    return part.options.rule.mode == LayerMode::kSparse;
  }
  [[nodiscard]] const ResolvedOptions& options() const { return slices_.front().part->options; }
  [[nodiscard]] std::size_t flags_index() const {
    const AttendPart& part = *slices_.front().part;
    return sparse(part) ? part.sketch : engine_.pools.sketches.size();
  }

  /// Whether the selector chooses the tokens, from tables of the queries.
  [[nodiscard]] bool chooses() const {
    return sparse(*slices_.front().part) && slices_.front().part->inputs.selected.empty();
  }

  void read_queries() {
    transfer::QueryItems items;
    for (const Slice& slice : slices_) {
      const TensorView& query = slice.part->inputs.query;
      const HostStaging::Slice on_device =
          engine_.workspace.staging.input(scope_.stream(), query, slice.begin, slice.count);
      for (std::int64_t t = 0; t < slice.count; ++t) {
        items.push({.query = on_device.tokens(query.dtype),
                    .token = static_cast<std::int32_t>(t),
                    .lag = rows_[items.count].lag,
                    .flags = again_ ? engine_.statistics.repeated() : slice.part->session->flags(),
                    .counters = slice.part->session->layer(layer_).view.counters,
                    .layer = layer_});
      }
    }
    auto* queries = engine_.workspace.queries.as<float>();
    const bool after_append = std::exchange(after_append_, false);
    if (!chooses()) {
      transfer::pack_queries(scope_.stream(), engine_.kv, items, queries);
      return;
    }
    const SketchStore& store = engine_.pools.sketches[slices_.front().part->sketch];
    const scoring::QueryInput input{.kv = engine_.kv, .items = items, .after_append = after_append};
    if (!options().recall_params.active &&
        scoring::fuses_query_projection(scope_.stream(), select_request())) {
      input_ = input;
      return;
    }
    engine_.workspace.selector.read_queries(scope_.stream(), options().params, store.planes.view(),
                                            input, queries);
    tables_after_append_ = after_append;
  }

  [[nodiscard]] scoring::SelectRequest select_request() const {
    const SketchStore& store = engine_.pools.sketches[slices_.front().part->sketch];
    return {.params = options().params,
            .rule = options().rule,
            .kv = engine_.kv,
            .sketch = store.geometry,
            .planes = store.planes.view(),
            .sequences = sequences_,
            .sketches = sketches_,
            .rows = rows_,
            .queries = engine_.workspace.queries.as<float>(),
            .max_length = max_length_,
            .flags = again_ ? engine_.statistics.repeated()
                            : engine_.statistics.of_sketch(flags_index()),
            .keep_scores = !slices_.front().part->select.scores.empty(),
            .tables_built = chooses(),
            .after_append = tables_after_append_,
            .may_exchange = engine_.workspace.selector.may_exchange(),
            .input = input_ ? &*input_ : nullptr,
            .packed = engine_.workspace.queries.as<float>()};
  }

  [[nodiscard]] scoring::IdTensor id_tensor(const HostStaging::Slice& slice,
                                            const TensorView& tensor) const {
    return {.data = static_cast<std::int32_t*>(slice.data),
            .row_stride = slice.token_stride,
            .head_stride = slice.head_stride,
            .heads = static_cast<int>(tensor.shape[1]),
            .n = tensor.shape[2]};
  }

  /// Where `attend` is given, the selection's kernel attends too.
  transfer::SelectionView choose(const attention::AttendTargets* attend = nullptr) {
    const Slice& first = slices_.front();
    const TensorView& given = first.part->inputs.selected;
    StageTimer timer(scope_, engine_, engine_.statistics.seconds.score);
    transfer::SelectionView selection;
    if (given.empty()) {
      scoring::SelectRequest request = select_request();
      request.attend = attend;
      selection =
          engine_.workspace.selector.select(scope_.stream(), request, options().recall_params);
    } else {
      const HostStaging::Slice ids =
          engine_.workspace.staging.input(scope_.stream(), given, first.begin, first.count);
      const TensorView& bias = first.part->inputs.bias;
      HostStaging::Slice biases;
      if (!bias.empty()) {
        biases = engine_.workspace.staging.input(scope_.stream(), bias, first.begin, first.count);
      }
      selection = engine_.workspace.selector.adopt(scope_.stream(), select_request(),
                                                   id_tensor(ids, given), id_floats(biases));
    }
    timer.stop();
    return selection;
  }

  static scoring::IdFloats id_floats(const HostStaging::Slice& slice) {
    return {.data = static_cast<float*>(slice.data),
            .row_stride = slice.token_stride,
            .head_stride = slice.head_stride};
  }

  void export_ids(const SelectOutputs& outputs) {
    const Slice& first = slices_.front();
    const auto slice_of = [&](const MutableTensorView& tensor) {
      return tensor.empty() ? HostStaging::Slice{}
                            : engine_.workspace.staging.output(tensor, first.begin, first.count);
    };
    const scoring::IdTensor ids = id_tensor(slice_of(outputs.ids), outputs.ids);
    const scoring::SelectRequest request = select_request();
    engine_.workspace.selector.export_ids(scope_.stream(), request, ids,
                                          id_floats(slice_of(outputs.bias)));
    if (outputs.scores.empty()) return;
    engine_.workspace.selector.export_scores(scope_.stream(), request, ids,
                                             id_floats(slice_of(outputs.scores)));
  }

  [[nodiscard]] std::int64_t selected_bound() const {
    const Slice& first = slices_.front();
    const TensorView& given = first.part->inputs.selected;
    const scoring::ScoreParams& params = options().params;
    const int group = engine_.kv.group();
    if (!given.empty()) {
      const std::int64_t lists = std::max<std::int64_t>(1, given.shape[1] / engine_.kv.kv_heads);
      return std::min(max_length_, given.shape[2] * lists);
    }
    const bool per_head = params.selection == Selection::kPerQueryHead;
    return std::min(max_length_, max_per_row(params, max_length_) * (per_head ? group : 1));
  }

  /// Whether one kernel selects and attends. Stages that are timed apart run apart.
  [[nodiscard]] bool attends_as_it_chooses() const {
    return chooses() && !options().recall_params.active && !engine_.pools.pages->has_tiers() &&
           !engine_.config.time_stages && engine_.config.memory.placement == KvPlacement::kDevice &&
           scoring::fuses_attention(scope_.stream(), select_request());
  }

  void attend() {
    transfer::Stream& stream = scope_.stream();
    if (attends_as_it_chooses()) {
      const attention::AttendTargets targets{.softmax_scale = options().softmax_scale,
                                             .logit_softcap = options().logit_softcap,
                                             .outputs = output_batch()};
      (void)choose(&targets);
      return finish_attend();
    }
    attention::AttendRequest request{
        .kv = engine_.kv,
        .rule = options().rule,
        .sequences = sequences_,
        .rows = rows_,
        .queries = engine_.workspace.queries.as<float>(),
        .softmax_scale = options().softmax_scale,
        .logit_softcap = options().logit_softcap,
        .max_length = max_length_,
        .flags = engine_.statistics.of_sketch(flags_index()),
        .pages_on_device = engine_.config.memory.placement == KvPlacement::kDevice,
        .places = {}};

    transfer::SelectionView selection;
    std::int64_t max_selected = 0;
    if (sparse(*slices_.front().part)) {
      selection = choose();
      max_selected = selected_bound();
      request.k_known = chooses() && !options().recall_params.active &&
                        options().params.threshold == 0.0F &&
                        scoring::k_known_on_host(stream, select_request());
      request.top_k = options().params.top_k;
      request.sparsity = options().params.sparsity;
    }
    if (engine_.pools.pages->has_tiers() && !scope_.capturing()) {
      const std::vector<LayerState*> layers = layers_of_slices();
      if (!TieredLaunch::all_resident(stream, layers)) {
        StageTimer timer(scope_, engine_, engine_.statistics.seconds.fetch);
        TieredLaunch tiered(stream, engine_, layers, request);
        const bool together = ensure_resident(tiered, selection);
        if (!together) tiered.attend(selection, max_selected, output_batch(), session_flags());
        timer.stop();
        if (!together) return finish_attend();
      }
    }
    if (selection.staged_capacity > 0) {
      StageTimer timer(scope_, engine_, engine_.statistics.seconds.fetch);
      const std::vector<LayerState*> layers = layers_of_slices();
      request.places = fetch_rows(stream, engine_.pools, fetch_of(layers, reading_of(selection)));
      timer.stop();
    } else if (engine_.kv.row_checks) {
      transfer::verify_rows(stream, engine_.kv, reading_of(selection));
    }
    StageTimer timer(scope_, engine_, engine_.statistics.seconds.attend);
    engine_.workspace.flash.attend(stream, request, selection, max_selected, output_batch());
    timer.stop();
    finish_attend();
  }

  [[nodiscard]] Fetch fetch_of(std::span<LayerState* const> layers,
                               const transfer::RowReading& reading) const {
    return {.layers = layers,
            .reading = reading,
            .flags = engine_.statistics.of_sketch(flags_index()),
            .capturing = scope_.capturing()};
  }

  /// Rows are fetched ahead only where nothing has to be waited for.
  [[nodiscard]] bool prefetches() {
    return !engine_.pools.pages->has_tiers() || scope_.capturing() ||
           TieredLaunch::all_resident(scope_.stream(), layers_of_slices());
  }

  void prefetch() {
    read_queries();
    const transfer::SelectionView selection = choose();
    const std::vector<LayerState*> layers = layers_of_slices();
    StageTimer timer(scope_, engine_, engine_.statistics.seconds.fetch);
    enqueue_row_prefetch(scope_.stream(), engine_.pools, fetch_of(layers, reading_of(selection)));
    timer.stop();
  }

  /// Waits for the pages of a selection, and makes it again when other calls have used the
  /// workspace meanwhile: it is the same, and its pages are resident.
  bool ensure_resident(TieredLaunch& tiered, transfer::SelectionView& selection) {
    (void)scope_.workspace_lost();
    bool together = tiered.ensure_resident(selection);
    while (scope_.workspace_lost()) {
      again_ = true;
      read_queries();
      if (sparse(*slices_.front().part)) selection = choose();
      together = tiered.ensure_resident(selection);
    }
    again_ = false;
    return together;
  }

  [[nodiscard]] transfer::Batch<transfer::StepFlags*> session_flags() const {
    transfer::Batch<transfer::StepFlags*> flags;
    for (const Slice& slice : slices_) flags.push(slice.part->session->flags());
    return flags;
  }

  /// What attention will read.
  [[nodiscard]] transfer::RowReading reading_of(const transfer::SelectionView& selection) const {
    return {.sequences = sequences_,
            .flags = session_flags(),
            .rows = rows_,
            .selection = selection,
            .rule = options().rule,
            .frames = engine_.pools.frame_checks};
  }

  void finish_attend() {
    const MutableTensorView& ids = slices_.front().part->outputs.selected;
    if (!ids.empty()) export_ids({.ids = ids});
    if (options().recall_params.active) export_missed();
    if (engine_.page_prefetch == nullptr || scope_.capturing()) return;
    for (const Slice& slice : slices_)
      engine_.page_prefetch->attended(*slice.part->session, layer_);
  }

  [[nodiscard]] std::vector<LayerState*> layers_of_slices() const {
    std::vector<LayerState*> layers;
    for (const Slice& slice : slices_) layers.push_back(&slice.part->session->layer(layer_));
    return layers;
  }

  // After `output_batch`, which names the log-sum-exps.
  void export_missed() {
    int row = 0;
    for (const Slice& slice : slices_) {
      const MutableTensorView& missed = slice.part->outputs.missed;
      HostStaging::Slice to;
      if (!missed.empty()) to = engine_.workspace.staging.output(missed, slice.begin, slice.count);
      for (std::int64_t t = 0; t < slice.count; ++t, ++row) {
        if (missed.empty()) continue;
        lse_[row].missed = static_cast<float*>(to.data) + t * to.token_stride;
        lse_[row].missed_stride = to.head_stride;
      }
    }
    engine_.workspace.selector.export_missed(scope_.stream(), select_request(), lse_);
  }

  [[nodiscard]] attention::OutputBatch output_batch() {
    attention::OutputBatch outputs;
    lse_.count = 0;
    for (const Slice& slice : slices_) {
      const MutableTensorView& out = slice.part->outputs.out;
      const MutableTensorView& lse = slice.part->outputs.lse;
      const HostStaging::Slice to = engine_.workspace.staging.output(out, slice.begin, slice.count);
      HostStaging::Slice lse_to;
      if (!lse.empty()) lse_to = engine_.workspace.staging.output(lse, slice.begin, slice.count);
      const auto element = static_cast<std::int64_t>(dtype_bytes(out.dtype));
      for (std::int64_t t = 0; t < slice.count; ++t) {
        attention::OutputItem item{
            .out = static_cast<std::byte*>(to.data) + t * to.token_stride * element,
            .dtype = out.dtype,
            .head_stride = to.head_stride};
        if (!lse.empty()) {
          item.lse = static_cast<float*>(lse_to.data) + t * lse_to.token_stride;
          item.lse_stride = lse_to.head_stride;
        } else if (!slice.part->outputs.missed.empty()) {
          item.lse = engine_.workspace.selector.lse(outputs.count);
          item.lse_stride = 1;
        }
        lse_.push({.lse = item.lse, .lse_stride = item.lse_stride});
        outputs.push(item);
      }
    }
    return outputs;
  }

  SubmissionScope& scope_;
  EngineState& engine_;
  int layer_;
  bool after_append_;                 ///< Until the first launch.
  bool tables_after_append_ = false;  ///< Nothing but the tables was enqueued since the append.
  bool again_ = false;                ///< What is done has been counted.
  /// The queries, where the selector reads them with the sketches.
  std::optional<scoring::QueryInput> input_;
  std::vector<Slice> slices_;
  transfer::SequenceBatch sequences_;
  scoring::SketchTables sketches_;
  transfer::QueryBatch rows_;
  scoring::MissedBatch lse_;  ///< Of the rows of the last attention.
  std::int64_t max_length_ = 0;
};

}  // namespace

bool can_batch_with(const AttendPart& part, std::span<const AttendPart> parts, int batch_rows) {
  const AttendPart& first = parts.front();
  if (part.options.rule.mode != LayerMode::kSparse || part.options.recall_params.active ||
      !part.inputs.selected.empty() || parts.size() > static_cast<std::size_t>(batch_rows)) {
    return false;
  }
  return parts.size() == 1 ||
         (!has_ids(part) && first.sketch == part.sketch && first.options.same_launch(part.options));
}

void attend(SubmissionScope& scope, EngineState& engine, int layer,
            std::span<const AttendPart> parts, bool after_append) {
  AttendLaunch launch(scope, engine, layer, after_append);
  for (const AttendPart& part : parts) {
    const std::int64_t tokens = part.inputs.query.shape[0];
    for (std::int64_t begin = 0; begin < tokens;) {
      if (!launch.accepts(part) || launch.rows() == engine.workspace.batch_queries ||
          (begin > 0 && has_ids(part))) {
        launch.enqueue();
      }
      const std::int64_t count =
          std::min<std::int64_t>(tokens - begin, engine.workspace.batch_queries - launch.rows());
      launch.add({&part, begin, count});
      begin += count;
    }
  }
  launch.enqueue();
}

}  // namespace kvtier::runtime
