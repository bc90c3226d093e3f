#include "kvtier/paged.h"

#include "kvtier/error.h"

#include "attention/flash_decode.h"
#include "hashing/planes.h"
#include "hashing/sketch.h"
#include "include/types/failure.h"
#include "runtime/api/arguments.h"
#include "runtime/api/paged_arguments.h"
#include "runtime/step/resolved_options.h"
#include "scoring/selector.h"
#include "transfer/device/device.h"
#include "transfer/kv/paged_rows.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <new>

namespace kvtier {

namespace {

constexpr std::int64_t kPackedTokens = 1024;  // of a launch of `store`

/// The tokens from `first` on.
transfer::TokenTensor tokens_from(const TensorView& tensor, std::int64_t first) {
  const std::int64_t offset = first * tensor.strides[0];
  return {static_cast<const std::byte*>(tensor.data) +
              offset * static_cast<std::int64_t>(dtype_bytes(tensor.dtype)),
          tensor.dtype, tensor.strides[0], tensor.strides[1]};
}

transfer::PagedRows::Half half_of(const TensorView& tensor) {
  return {static_cast<const std::byte*>(tensor.data), tensor.strides[0], tensor.strides[1],
          tensor.strides[2]};
}

PagedConfig prepared(const PagedConfig& given) {
  PagedConfig config = validated(given);
  config.retrieval = config.retrieval.with_fixed_k();  // no kernel has an error target here
  return config;
}

}  // namespace

class PagedSketches::Impl {
 public:
  explicit Impl(const PagedConfig& config)
      : config_(prepared(config)),
        device_(transfer::make_device(config_.backend, config_.log)),
        main_(device_->make_stream()),
        kv_{.kv_heads = config_.model.kv_heads,
            .group = config_.model.query_heads / config_.model.kv_heads,
            .head_dim = config_.model.head_dim,
            .page_tokens = config_.block_tokens,
            .dtype = config_.model.kv_dtype},
        planes_(*device_, config_.retrieval.sketch(kv_.head_dim), kv_.head_dim),
        sketch_{.kv_heads = kv_.kv_heads, .num_planes = planes_.view().sketch_bits()} {
    make_sketches();
    make_workspace();
    main_->synchronize();
  }

  void store(int layer, const TensorView& keys, const TensorView& values, const TensorView& slots,
             StreamRef given) {
    const Call call(*this, layer, given);
    const std::int64_t tokens = shape().check_store(keys, values, slots);
    const auto* places = static_cast<const std::int32_t*>(slots.data);
    for (std::int64_t first = 0; first < tokens; first += kPackedTokens) {
      const auto count = static_cast<std::int32_t>(std::min(kPackedTokens, tokens - first));
      transfer::AppendBatch batch;
      batch.push({.sequence = {.counters = all_slots()},
                  .keys = tokens_from(keys, first),
                  .values = tokens_from(values, first),
                  .tokens = count,
                  .flags = flags(),
                  .layer = layer});
      transfer::pack_rows(call.stream(), kv_, batch, packed_.data());
      hashing::SketchBatch sketches;
      sketches.push({.blocks = blocks_of(layer),
                     .counters = all_slots(),
                     .tokens = count,
                     .slots = places + first});
      hashing::sketch_keys(call.stream(), planes_.view(), kv_, sketch_, sketches, packed_.data());
    }
    call.finish();
  }

  void select(int layer, const PagedBatch& batch, const TensorView& query,
              const PagedSelectOutputs& outputs, StreamRef given) {
    const Call call(*this, layer, given);
    const std::int64_t sequences = shape().check_batch(batch, query);
    shape().check_select(sequences, outputs, attended_bound(shape().max_length(batch)));
    for (std::int64_t first = 0; first < sequences; first += max_queries_) {
      const Launch launch = choose(call.stream(), layer, batch, query, first,
                                   std::min<std::int64_t>(max_queries_, sequences - first));
      const MutableTensorView& ids = outputs.ids;
      const MutableTensorView& bias = outputs.bias;
      transfer::AttendedList list{
          .ids = static_cast<std::int32_t*>(ids.data) + first * ids.strides[0],
          .query_stride = ids.strides[0],
          .head_stride = ids.strides[1],
          .n = ids.shape[2],
          .heads = static_cast<int>(ids.shape[1])};
      if (!bias.empty()) {
        list.bias = static_cast<float*>(bias.data) + first * bias.strides[0];
        list.bias_row_stride = bias.strides[0];
        list.bias_head_stride = bias.strides[1];
      }
      transfer::list_attended(call.stream(), launch.request.rule, launch.request.sequences,
                              launch.request.query_batch, kv_.kv_heads, launch.selection, list);
    }
    call.finish();
  }

  void attend(int layer, const PagedBatch& batch, const TensorView& query, const PagedLayer& cache,
              const PagedAttendOutputs& outputs, StreamRef given) {
    const Call call(*this, layer, given);
    const std::int64_t sequences = shape().check_batch(batch, query);
    shape().check_attend(sequences, cache, outputs);
    for (std::int64_t first = 0; first < sequences; first += max_queries_) {
      const std::int64_t count = std::min<std::int64_t>(max_queries_, sequences - first);
      const Launch launch = choose(call.stream(), layer, batch, query, first, count);
      const transfer::SelectionView rows = list(call.stream(), launch);
      transfer::gather_paged_rows(call.stream(), kv_, slots(),
                                  {.keys = half_of(cache.keys), .values = half_of(cache.values)},
                                  launch.request.query_batch, rows);
      // Every row is in the list, so none is attended for its place.
      const attention::AttendRequest request{.kv = kv_,
                                             .rule = {.mode = LayerMode::kSparse},
                                             .sequences = launch.request.sequences,
                                             .query_batch = launch.request.query_batch,
                                             .queries = queries_.as<float>(),
                                             .softmax_scale = launch.request.params.logit_scale,
                                             .logit_softcap = layer_of(layer).logit_softcap,
                                             .max_length = launch.request.max_length,
                                             .flags = flags(),
                                             .pages_on_device = true,
                                             .places = {}};
      flash_->attend(call.stream(), request, rows, rows.capacity, results(outputs, first, count));
    }
    call.finish();
  }

  [[nodiscard]] std::int64_t attended_bound(std::int64_t length) const {
    const RetrievalConfig& retrieval = config_.retrieval;
    const scoring::ScoreParams params = params_of(0);
    const std::int64_t always = std::int64_t{retrieval.sink_tokens} + retrieval.recent_tokens;
    return std::min(length, always + scoring::max_per_query(params, length));
  }

  void check() {
    const std::lock_guard lock(mutex_);
    check_faults();
  }

  [[nodiscard]] const PagedConfig& config() const { return config_; }
  [[nodiscard]] Backend backend() const { return device_->backend(); }
  [[nodiscard]] int device_index() const { return device_->index(); }
  [[nodiscard]] std::size_t sketch_bytes() const { return sketches_.bytes(); }
  [[nodiscard]] std::size_t device_bytes() const { return device_bytes_; }

 private:
  /// The stream of one call, and what goes before and after.
  class Call {
   public:
    Call(Impl& impl, int layer, StreamRef given)
        : impl_(impl), lock_(impl.mutex_), current_(*impl.device_), waits_(!given.given()) {
      runtime::check_layer(impl.config_.model, layer);
      impl.shape().check_stream(given);
      impl.check_faults();
      stream_ = waits_ ? impl.main_.get() : impl.adopted(given);
    }
    [[nodiscard]] transfer::Stream& stream() const { return *stream_; }
    void finish() const {
      if (!waits_) return;
      stream_->synchronize();
      impl_.check_faults();
    }

   private:
    Impl& impl_;
    std::lock_guard<std::mutex> lock_;
    transfer::CurrentDevice current_;
    bool waits_;
    transfer::Stream* stream_ = nullptr;
  };

  struct Launch {
    scoring::SelectRequest request;
    transfer::SelectionView selection;
  };

  [[nodiscard]] runtime::PagedShape shape() const { return {config_, device_->backend()}; }
  [[nodiscard]] LayerConfig layer_of(int layer) const {
    const auto& all = config_.model.layer_options;
    return all.empty() ? LayerConfig{} : all[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] scoring::ScoreParams params_of(int layer) const {
    const float scale = 1.0F / std::sqrt(static_cast<float>(kv_.head_dim));
    return scoring::score_params(config_.retrieval, kv_.head_dim,
                                 layer_of(layer).softmax_scale.value_or(scale), layer);
  }

  transfer::Buffer allocate(std::size_t bytes, transfer::Space space = transfer::Space::kDevice) {
    if (space == transfer::Space::kDevice) device_bytes_ += bytes;
    return device_->allocate(space, bytes);
  }

  void make_sketches() {
    const std::int64_t num_slots = config_.num_blocks * config_.block_tokens;
    const std::int64_t blocks = (num_slots + hashing::kBlockTokens - 1) / hashing::kBlockTokens;
    layer_blocks_ = blocks;
    const auto all = static_cast<std::size_t>(blocks * config_.model.layers);
    sketches_ = allocate(all * static_cast<std::size_t>(sketch_.block_bytes()));
    main_->fill(sketches_.data(), 0, sketches_.bytes());
    tables_ = allocate(all * sizeof(std::byte*));
    std::vector<std::byte*> table(all);
    for (std::size_t i = 0; i < all; ++i) {
      table[i] = sketches_.data() + i * static_cast<std::size_t>(sketch_.block_bytes());
    }
    const transfer::CopyRun run{tables_.data(), table.data(), all * sizeof(std::byte*)};
    main_->copy({&run, 1});
    slot_counters_ = allocate(sizeof(transfer::SequenceCounters));
    main_->fill(slot_counters_.data(), 0, slot_counters_.bytes());
    transfer::set_length(*main_, all_slots(), 0, num_slots);
    main_->synchronize();  // before the table is gone
  }

  void make_workspace() {
    max_queries_ = config_.max_batch_rows;
    table_stride_ = (config_.max_tokens + config_.block_tokens - 1) / config_.block_tokens;
    const scoring::SelectorLimits limits{
        .num_queries = max_queries_,
        .query_heads = kv_.query_heads(),
        .kv_heads = kv_.kv_heads,
        .max_tokens = config_.max_tokens,
        .max_selected = scoring::max_per_query(params_of(0), config_.max_tokens)};
    const attention::FlashDecodeLimits flash_limits{
        .num_queries = max_queries_, .query_heads = kv_.query_heads(), .head_dim = kv_.head_dim};
    device_bytes_ += scoring::Selector::workspace_bytes(device_->backend(), limits) +
                     attention::FlashDecode::workspace_bytes(device_->backend(), flash_limits);
    selector_ = std::make_unique<scoring::Selector>(*device_, limits);
    flash_ = std::make_unique<attention::FlashDecode>(*device_, flash_limits);

    const auto num_queries = static_cast<std::size_t>(max_queries_);
    const auto heads = static_cast<std::size_t>(kv_.query_heads());
    const auto lists = num_queries * static_cast<std::size_t>(kv_.kv_heads);
    const std::size_t entries =
        lists * static_cast<std::size_t>(attended_bound(config_.max_tokens));
    queries_ =
        allocate(num_queries * heads * static_cast<std::size_t>(kv_.head_dim) * sizeof(float));
    packed_ = allocate(static_cast<std::size_t>(kPackedTokens * kv_.kv_heads * kv_.row_bytes()));
    slots_ = allocate(num_queries * static_cast<std::size_t>(table_stride_) * sizeof(std::int32_t));
    counters_ = allocate(num_queries * sizeof(transfer::SequenceCounters));
    ids_ = allocate(entries * sizeof(std::int32_t));
    masks_ = allocate(entries * sizeof(std::uint16_t));
    biases_ = allocate(entries * sizeof(float));
    counts_ = allocate(lists * sizeof(std::int32_t));
    staged_ = allocate(entries * static_cast<std::size_t>(kv_.row_bytes()));
    host_ = allocate(sizeof(Host), transfer::Space::kPinnedHost);
    new (host_.data()) Host{};
  }

  [[nodiscard]] std::byte* const* blocks_of(int layer) const {
    return tables_.as<std::byte*>() + layer * layer_blocks_;
  }
  [[nodiscard]] transfer::SequenceCounters* all_slots() const {
    return slot_counters_.as<transfer::SequenceCounters>();
  }
  [[nodiscard]] transfer::SlotTables slots() const {
    return {.blocks = slots_.as<std::int32_t>(),
            .stride = table_stride_,
            .block_tokens = config_.block_tokens};
  }
  [[nodiscard]] transfer::StepFlags* flags() const { return &host_.as<Host>()->flags; }

  /// Selects for sequences [first, first + count) of a batch.
  Launch choose(transfer::Stream& stream, int layer, const PagedBatch& batch,
                const TensorView& query, std::int64_t first, std::int64_t count) {
    const std::int64_t max_length = shape().max_length(batch);
    transfer::read_tables(stream,
                          {.blocks = static_cast<const std::int32_t*>(batch.blocks.data) +
                                     first * batch.blocks.strides[0],
                           .stride = batch.blocks.strides[0],
                           .lengths = static_cast<const std::int32_t*>(batch.lengths.data) +
                                      first * batch.lengths.strides[0],
                           .length_stride = batch.lengths.strides[0],
                           .sequences = static_cast<int>(count),
                           .block_tokens = config_.block_tokens,
                           .num_blocks = config_.num_blocks,
                           .max_length = max_length},
                          slots_.as<std::int32_t>(), table_stride_,
                          counters_.as<transfer::SequenceCounters>(), &host_.as<Host>()->faults);

    Launch launch;
    scoring::SelectRequest& request = launch.request;
    request.params = params_of(layer);
    request.rule = {.mode = LayerMode::kSparse,
                    .sink_tokens = config_.retrieval.sink_tokens,
                    .recent_tokens = config_.retrieval.recent_tokens};
    request.kv = kv_;
    request.sketch = sketch_;
    request.planes = planes_.view();
    request.slots = slots();
    request.queries = queries_.as<float>();
    request.max_length = max_length;
    request.flags = flags();
    request.tables_built = true;
    transfer::QueryItems items;
    for (int i = 0; i < count; ++i) {
      transfer::SequenceCounters* counters = counters_.as<transfer::SequenceCounters>() + i;
      request.sequences.push({.counters = counters});
      request.sketches.push(blocks_of(layer));
      request.query_batch.push(
          {.sequence = i, .lag = 0, .dense_from = std::numeric_limits<std::int64_t>::max()});
      items.push({.query = tokens_from(query, first + i),
                  .flags = flags(),
                  .counters = counters,
                  .layer = layer});
    }
    selector_->read_queries(stream, request.params, request.planes, {.kv = kv_, .items = items},
                            queries_.as<float>());
    launch.selection = selector_->select(stream, request);
    return launch;
  }

  /// Lists what the queries of a launch attend, in the workspace.
  transfer::SelectionView list(transfer::Stream& stream, const Launch& launch) {
    const std::int64_t capacity = attended_bound(launch.request.max_length);
    transfer::AttendedList list{.ids = ids_.as<std::int32_t>(),
                                .bias = biases_.as<float>(),
                                .head_mask = masks_.as<std::uint16_t>(),
                                .all_heads = static_cast<std::uint16_t>((1U << kv_.group) - 1),
                                .counts = counts_.as<std::int32_t>(),
                                .query_stride = capacity * kv_.kv_heads,
                                .head_stride = capacity,
                                .bias_row_stride = capacity * kv_.kv_heads,
                                .bias_head_stride = capacity,
                                .n = capacity,
                                .heads = kv_.kv_heads};
    transfer::list_attended(stream, launch.request.rule, launch.request.sequences,
                            launch.request.query_batch, kv_.kv_heads, launch.selection, list);
    const bool weighted = config_.retrieval.rule == SelectionRule::kPriority;
    return {.ids = list.ids,
            .head_mask = list.head_mask,
            .counts = list.counts,
            .bias = weighted ? list.bias : nullptr,
            .capacity = capacity,
            .staged = staged_.data(),
            .staged_capacity = capacity};
  }

  [[nodiscard]] static attention::OutputBatch results(const PagedAttendOutputs& outputs,
                                                      std::int64_t first, std::int64_t count) {
    attention::OutputBatch batch;
    const auto element = static_cast<std::int64_t>(dtype_bytes(outputs.out.dtype));
    for (std::int64_t query_index = first; query_index < first + count; ++query_index) {
      attention::OutputItem item{.out = static_cast<std::byte*>(outputs.out.data) +
                                        query_index * outputs.out.strides[0] * element,
                                 .dtype = outputs.out.dtype,
                                 .head_stride = outputs.out.strides[1]};
      if (!outputs.lse.empty()) {
        item.lse = static_cast<float*>(outputs.lse.data) + query_index * outputs.lse.strides[0];
        item.lse_stride = outputs.lse.strides[1];
      }
      batch.push(item);
    }
    return batch;
  }

  transfer::Stream* adopted(StreamRef stream) {
    std::unique_ptr<transfer::Stream>& slot = adopted_[stream.handle()];
    if (!slot) slot = device_->adopt(stream);
    return slot.get();
  }

  void check_faults() {
    transfer::TableFaults& found = host_.as<Host>()->faults;
    const transfer::TableFaults now{
        .blocks = std::atomic_ref(found.blocks).load(std::memory_order_relaxed),
        .lengths = std::atomic_ref(found.lengths).load(std::memory_order_relaxed)};
    const std::uint64_t blocks = now.blocks - seen_.blocks;
    const std::uint64_t lengths = now.lengths - seen_.lengths;
    seen_ = now;
    if (blocks > 0) {
      throw_error(ErrorCode::kInvalidArgument, "blocks: expected ids in 0..",
                  config_.num_blocks - 1, ", found ", blocks,
                  " others, which were read as block 0");
    }
    if (lengths > 0) {
      throw_error(ErrorCode::kInvalidArgument, "lengths: expected 0 up to max_length, found ",
                  lengths, " others, which were clamped");
    }
  }

  /// What kernels write for the host.
  struct Host {
    transfer::StepFlags flags;
    transfer::TableFaults faults;
  };

  PagedConfig config_;
  std::mutex mutex_;
  std::unique_ptr<transfer::Device> device_;
  std::unique_ptr<transfer::Stream> main_;
  std::map<void*, std::unique_ptr<transfer::Stream>> adopted_;
  transfer::KvGeometry kv_;
  hashing::Planes planes_;
  hashing::SketchGeometry sketch_;

  transfer::Buffer sketches_;       // [layers][blocks over slots]
  transfer::Buffer tables_;         // their addresses
  transfer::Buffer slot_counters_;  // of all slots, as one sequence
  std::int64_t layer_blocks_ = 0;
  std::unique_ptr<scoring::Selector> selector_;
  std::unique_ptr<attention::FlashDecode> flash_;
  int max_queries_ = 0;
  std::int64_t table_stride_ = 0;
  transfer::Buffer queries_;   // fp32 [queries][query_heads][head_dim]
  transfer::Buffer packed_;    // [tokens][kv_heads][row]
  transfer::Buffer slots_;     // [queries][table_stride]
  transfer::Buffer counters_;  // [rows]
  // What queries attend, [queries][kv_heads][`attended_bound`]:
  transfer::Buffer ids_;
  transfer::Buffer masks_;
  transfer::Buffer biases_;
  transfer::Buffer counts_;
  transfer::Buffer staged_;
  transfer::Buffer host_;
  transfer::TableFaults seen_;
  std::size_t device_bytes_ = 0;
};

PagedSketches::PagedSketches(const PagedConfig& config) : impl_(std::make_unique<Impl>(config)) {}
PagedSketches::~PagedSketches() = default;
PagedSketches::PagedSketches(PagedSketches&&) noexcept = default;
PagedSketches& PagedSketches::operator=(PagedSketches&&) noexcept = default;

void PagedSketches::store(int layer, const TensorView& keys, const TensorView& values,
                          const TensorView& slots, StreamRef stream) {
  impl_->store(layer, keys, values, slots, stream);
}
std::int64_t PagedSketches::attended_bound(std::int64_t length) const {
  return impl_->attended_bound(length);
}
void PagedSketches::select(int layer, const PagedBatch& batch, const TensorView& query,
                           const PagedSelectOutputs& outputs, StreamRef stream) {
  impl_->select(layer, batch, query, outputs, stream);
}
void PagedSketches::attend(int layer, const PagedBatch& batch, const TensorView& query,
                           const PagedLayer& cache, const PagedAttendOutputs& outputs,
                           StreamRef stream) {
  impl_->attend(layer, batch, query, cache, outputs, stream);
}
void PagedSketches::check() { impl_->check(); }
Backend PagedSketches::backend() const noexcept { return impl_->backend(); }
int PagedSketches::device_index() const noexcept { return impl_->device_index(); }
const PagedConfig& PagedSketches::config() const noexcept { return impl_->config(); }
std::size_t PagedSketches::sketch_bytes() const noexcept { return impl_->sketch_bytes(); }
std::size_t PagedSketches::device_bytes() const noexcept { return impl_->device_bytes(); }

}  // namespace kvtier
