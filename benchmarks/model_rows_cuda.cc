#include "benchmarks/model_rows_cuda.h"

#include "kvtier/error.h"

#include "benchmarks/cudnn_attention_cuda.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace kvtier::bench {
namespace {

using services::show_bytes;

/// cuDNN's attention over dense caches, those of sliding layers as long as their window.
class DenseCaches {
 public:
  DenseCaches(const Run& run, const ModelCase& shape, const CaseOfModel& at)
      : shape_(shape),
        at_(at),
        library_(CudnnLibrary::load(run.cuda_libs())),
        full_(attention(at.tokens)) {
    if (shape.window > 0) sliding_ = attention(shape.window);
    for (int layer = 0; layer < shape.layers; ++layer) {
      begins_.push_back(values_);
      values_ += values_of(layer);
    }
    const std::size_t wanted = bytes() + GiB, found = GpuMemory().free;
    if (found < wanted) {
      throw Error(ErrorCode::kResourceExhausted, "dense KV on the GPU: expected at least " +
                                                     show_bytes(static_cast<double>(wanted)) +
                                                     " of free memory, found " +
                                                     show_bytes(static_cast<double>(found)));
    }
    keys_ = std::make_unique<DeviceTensor>(values_, 31);
    values_tensor_ = std::make_unique<DeviceTensor>(values_, 32);
  }

  [[nodiscard]] const std::string& library() const { return library_->name(); }
  [[nodiscard]] std::size_t bytes() const { return 4 * static_cast<std::size_t>(values_); }
  [[nodiscard]] int num_plans() const { return full_->num_plans(); }
  [[nodiscard]] RandomDecoder::Caches of(int layer) const {
    const std::int64_t begin = begins_[static_cast<std::size_t>(layer)];
    return {keys_->data() + begin, values_tensor_->data() + begin, tokens_of(layer)};
  }
  void attend(void* stream, int plan, int layer, const RandomDecoder& model) const {
    const CudnnAttention& attention = slides(shape_, layer) ? *sliding_ : *full_;
    const RandomDecoder::Caches caches = of(layer);
    attention.run(stream, std::min(plan, attention.num_plans() - 1), model.query(), caches.keys,
                  caches.values, model.context());
  }

 private:
  [[nodiscard]] std::unique_ptr<CudnnAttention> attention(std::int64_t tokens) const {
    return std::make_unique<CudnnAttention>(library_,
                                            CudnnAttention::Shape{.tokens = tokens,
                                                                  .batch = at_.batch,
                                                                  .query_heads = shape_.query_heads,
                                                                  .kv_heads = shape_.kv_heads,
                                                                  .head_dim = shape_.head_dim});
  }
  [[nodiscard]] std::int64_t tokens_of(int layer) const {
    return slides(shape_, layer) ? shape_.window : at_.tokens;
  }
  [[nodiscard]] std::int64_t values_of(int layer) const {
    return tokens_of(layer) * at_.batch * shape_.kv_heads * shape_.head_dim;
  }

  const ModelCase& shape_;
  CaseOfModel at_;
  std::shared_ptr<const CudnnLibrary> library_;
  std::unique_ptr<const CudnnAttention> full_, sliding_;
  std::vector<std::int64_t> begins_;
  std::int64_t values_ = 0;
  std::unique_ptr<DeviceTensor> keys_, values_tensor_;
};

}  // namespace

GpuMemory::GpuMemory() { KVTIER_CUDA_CHECK(cudaMemGetInfo(&free, &total)); }

TokenGraph::TokenGraph(Run& run, const std::function<void()>& token, std::function<void(int)> load)
    : run_(run), graph_(run.stream(), token), load_(std::move(load)) {}

std::vector<double> TokenGraph::replay(int first, int count) const {
  std::vector<cudaEvent_t> events(2 * static_cast<std::size_t>(count));
  for (cudaEvent_t& event : events) KVTIER_CUDA_CHECK(cudaEventCreate(&event));
  for (int i = 0; i < count; ++i) {
    if (load_) load_(first + i);
    const auto at = 2 * static_cast<std::size_t>(i);
    KVTIER_CUDA_CHECK(cudaEventRecord(events[at], run_.stream()));
    graph_.launch(run_.stream());
    KVTIER_CUDA_CHECK(cudaEventRecord(events[at + 1], run_.stream()));
  }
  KVTIER_CUDA_CHECK(cudaStreamSynchronize(run_.stream()));
  std::vector<double> us;
  for (std::size_t i = 0; i < events.size(); i += 2) {
    float ms = 0.0F;
    KVTIER_CUDA_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
    us.push_back(1e3 * static_cast<double>(ms));
  }
  for (const cudaEvent_t event : events) cudaEventDestroy(event);
  return us;
}

void summarize(std::vector<double> us, ModelTime& time) {
  double sum = 0.0;
  for (const double one : us) sum += one;
  std::ranges::sort(us);
  const auto rank = static_cast<std::size_t>(std::ceil(0.99 * static_cast<double>(us.size())));
  time.times = {us[us.size() / 2], us.front(), us.back()};
  time.us_p99 = us[rank - 1];
  time.tokens_per_second = 1e6 * time.batch * static_cast<double>(us.size()) / sum;
}

json model_parameters(const ModelCase& shape, const CaseOfModel& at, const std::string& attention) {
  json values = {{"tokens", at.tokens},
                 {"batch", at.batch},
                 {"layers", shape.layers},
                 {"hidden", shape.hidden},
                 {"inner", shape.inner},
                 {"query_heads", shape.query_heads},
                 {"kv_heads", shape.kv_heads},
                 {"head_dim", shape.head_dim},
                 {"vocabulary", shape.vocabulary},
                 {"attention", attention}};
  if (!shape.name.empty()) values["shape"] = shape.name;
  if (shape.tensor_parallel > 1) values["tensor_parallel"] = shape.tensor_parallel;
  if (shape.experts > 0) {
    values["experts"] = shape.experts;
    values["active_experts"] = shape.active_experts;
  }
  if (shape.window > 0) values["window"] = shape.window;
  return values;
}

void add_model_row(Run& run, const ModelCase& shape, const std::string& attention,
                   const ModelTime& time, const json& measured) {
  json row = model_parameters(shape, {time.tokens, time.batch}, attention);
  row["us_p99"] = time.us_p99;
  row["tokens_per_second"] = time.tokens_per_second;
  row["gpu_bytes"] = time.gpu_bytes;
  row.update(measured);
  run.add("model", row, time.times);
}

ModelTime bench_dense_model(Run& run, const ModelCase& shape, const RandomDecoder& model,
                            const CaseOfModel& at) {
  const DenseCaches caches(run, shape, at);
  ModelTime best{.tokens = at.tokens, .batch = at.batch, .attention = "dense, " + caches.library()};
  best.dense = true;
  best.gpu_bytes = GpuMemory().used();
  int best_plan = -1;
  for (int plan = 0; plan < caches.num_plans(); ++plan) {
    const auto attend = [&](int layer) { caches.attend(run.stream(), plan, layer, model); };
    attend(0);  // what a library does at its first call is not for a graph
    attend(1 % shape.layers);
    KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
    const TokenGraph graph(run, [&] {
      model.decode(
          at.batch, at.tokens, [&](int layer) { return caches.of(layer); }, attend);
    });
    static_cast<void>(graph.replay(0, 3));
    ModelTime time = best;
    summarize(graph.replay(0, run.replays()), time);
    if (best_plan >= 0 && best.times.median <= time.times.median) continue;
    best = time;
    best_plan = plan;
  }
  add_model_row(run, shape, "cudnn", best,
                {{"kv_bytes", caches.bytes()}, {"plan", best_plan}, {"library", caches.library()}});
  return best;
}

}  // namespace kvtier::bench
