#include "kvtier/engine.h"

#include "benchmarks/benchmarks.h"
#include "benchmarks/cublas_cuda.h"
#include "benchmarks/cudnn_attention_cuda.h"
#include "benchmarks/kmeans_cuda.h"
#include "benchmarks/model_kernels_cuda.h"
#include "transfer/device/cuda_check.h"

#include <algorithm>
#include <utility>

namespace kvtier::bench {
namespace {

constexpr int kLayers = 4;
constexpr int kRepeats = 5;
constexpr int kIterations = 25;  // of k-means

/// An event of the library's user: what one stream has done, for another to wait for.
class Mark {
 public:
  Mark() { KVTIER_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Mark() { cudaEventDestroy(event_); }
  Mark(const Mark&) = delete;  // owns the event
  Mark& operator=(const Mark&) = delete;
  void record(cudaStream_t stream) { KVTIER_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void wait(cudaStream_t stream) { KVTIER_CUDA_CHECK(cudaStreamWaitEvent(stream, event_)); }

 private:
  cudaEvent_t event_{};
};

class SideStream {
 public:
  SideStream() { KVTIER_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~SideStream() { cudaStreamDestroy(stream_); }
  SideStream(const SideStream&) = delete;  // owns the stream
  SideStream& operator=(const SideStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_{};
};

/// The products and the attention of one layer over a whole prompt, without kvtier. Layers share
/// weights and buffers, but for two of keys and values that take turns.
class Prefill {
 public:
  Prefill(Run& run, const ModelCase& shape, std::int64_t tokens)
      : run_(run),
        shape_(shape),
        tokens_(tokens),
        blas_(run.cuda_libs(), run.stream()),
        // A causal mask leaves half of the products: here every query sees half of the keys.
        attention_(CudnnLibrary::load(run.cuda_libs()), {.tokens = tokens / 2,
                                                         .query_tokens = tokens,
                                                         .batch = 1,
                                                         .query_heads = shape.query_heads,
                                                         .kv_heads = shape.kv_heads,
                                                         .head_dim = shape.head_dim,
                                                         .heads_first = false}),
        q_weight_(q_columns() * shape.hidden, 1, 0.02F),
        kv_weight_(kv_columns() * shape.hidden, 2, 0.02F),
        out_weight_(q_columns() * shape.hidden, 3, 0.02F),
        gate_up_weight_(2 * shape.inner * shape.hidden, 4, 0.02F),
        down_weight_(shape.inner * shape.hidden, 5, 0.02F),
        hidden_(tokens * shape.hidden, 6),
        normed_(tokens * shape.hidden, 7),
        query_(tokens * q_columns(), 8),
        context_(tokens * q_columns(), 9),
        gate_up_(tokens * 2 * shape.inner, 10),
        gated_(tokens * shape.inner, 11),
        keys_(2 * tokens * kv_columns(), 12),
        values_(2 * tokens * kv_columns(), 13) {}

  [[nodiscard]] __nv_bfloat16* keys(int layer) const {
    return keys_.data() + layer % 2 * tokens_ * kv_columns();
  }
  [[nodiscard]] __nv_bfloat16* values(int layer) const {
    return values_.data() + layer % 2 * tokens_ * kv_columns();
  }

  void project(int layer) const {
    const std::int64_t h = shape_.hidden;
    rms_norm(run_.stream(), hidden_.data(), tokens_, h, normed_.data());
    blas_.multiply(normed_.data(), q_weight_.data(), tokens_, q_columns(), h, query_.data());
    blas_.multiply(normed_.data(), kv_weight_.data(), tokens_, kv_columns(), h, keys(layer));
    blas_.multiply(normed_.data(), kv_weight_.data(), tokens_, kv_columns(), h, values(layer));
  }
  void attend(int layer) const {
    attention_.run(run_.stream(), 0, query_.data(), keys(layer), values(layer), context_.data());
  }
  void finish() const {
    const std::int64_t h = shape_.hidden;
    blas_.multiply(context_.data(), out_weight_.data(), tokens_, h, q_columns(), hidden_.data(),
                   1.0F);
    rms_norm(run_.stream(), hidden_.data(), tokens_, h, normed_.data());
    blas_.multiply(normed_.data(), gate_up_weight_.data(), tokens_, 2 * shape_.inner, h,
                   gate_up_.data());
    gated(run_.stream(), gate_up_.data(), tokens_, shape_.inner, gated_.data());
    blas_.multiply(gated_.data(), down_weight_.data(), tokens_, h, shape_.inner, hidden_.data(),
                   1.0F);
  }

 private:
  [[nodiscard]] std::int64_t q_columns() const {
    return std::int64_t{shape_.query_heads} * shape_.head_dim;
  }
  [[nodiscard]] std::int64_t kv_columns() const {
    return std::int64_t{shape_.kv_heads} * shape_.head_dim;
  }

  Run& run_;
  const ModelCase& shape_;
  std::int64_t tokens_;
  CublasLibrary blas_;
  CudnnAttention attention_;
  DeviceTensor q_weight_, kv_weight_, out_weight_, gate_up_weight_, down_weight_;
  DeviceTensor hidden_, normed_, query_, context_, gate_up_, gated_, keys_, values_;
};

Times per_layer(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return {all[all.size() / 2] / kLayers, all.front() / kLayers, all.back() / kLayers};
}

/// Layers alone, and with each layer's keys and values appended by `side` while the next layer
/// computes; the end is when both are done.
Times time_prefill(Run& run, const Prefill& prefill, Session* session, const ModelCase& shape,
                   std::int64_t tokens) {
  const SideStream side;
  Mark ready, appended[2], done;
  const auto view = [&](const __nv_bfloat16* data) {
    return TensorView{
        data, DType::kBFloat16, {tokens, shape.kv_heads, shape.head_dim}, MemorySpace::kDevice};
  };
  const auto layers = [&] {
    for (int layer = 0; layer < kLayers; ++layer) {
      if (session != nullptr && layer >= 2) appended[layer % 2].wait(run.stream());
      prefill.project(layer);
      if (session != nullptr) {
        ready.record(run.stream());
        ready.wait(side.get());
        session->append(layer, view(prefill.keys(layer)), view(prefill.values(layer)),
                        StreamRef::of(side.get()));
        appended[layer % 2].record(side.get());
      }
      prefill.attend(layer);
      prefill.finish();
    }
    if (session == nullptr) return;
    done.record(side.get());
    done.wait(run.stream());
  };
  std::vector<double> all;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    if (session != nullptr) {
      session->truncate(0, StreamRef::of(run.stream()));
      session->reserve(tokens, StreamRef::of(run.stream()));
      KVTIER_CUDA_CHECK(cudaStreamSynchronize(run.stream()));
    }
    const double us = time_once(run.stream(), layers);
    if (repeat > 0) all.push_back(us);
  }
  return per_layer(std::move(all));
}

}  // namespace

void bench_ttft(Run& run, const ModelCase& shape, std::int64_t tokens) {
  const json parameters = {{"tokens", tokens}, {"layers", kLayers}};
  const auto with = [&](const char* what) {
    json all = parameters;
    all["with"] = what;
    return all;
  };
  const Prefill prefill(run, shape, tokens);
  Times alone = time_prefill(run, prefill, nullptr, shape, tokens);
  run.add("ttft", with("prefill alone"), alone);

  for (const KvPlacement placement : {KvPlacement::kDevice, KvPlacement::kHost}) {
    Config config;
    config.backend = Backend::kCuda;
    config.model = {.layers = kLayers,
                    .query_heads = shape.query_heads,
                    .kv_heads = shape.kv_heads,
                    .head_dim = shape.head_dim};
    config.retrieval = shape.retrieval;
    config.memory.placement = placement;
    config.memory.max_session_tokens = tokens;
    config.memory.host_bytes = static_cast<std::size_t>(tokens * kLayers * shape.kv_heads) *
                                   static_cast<std::size_t>(4 * shape.head_dim) +
                               64 * MiB;
    config.memory.device_bytes =
        (placement == KvPlacement::kDevice ? config.memory.host_bytes : 0) + 8 * GiB;
    Engine engine(config);
    Session session = engine.open();
    const Times times = time_prefill(run, prefill, &session, shape, tokens);
    // Clocks drift by as much as is asked for: against the runs alone before and after.
    const Times before = std::exchange(alone, time_prefill(run, prefill, nullptr, shape, tokens));
    run.add("ttft", with(placement == KvPlacement::kDevice ? "sketches" : "sketches, write-back"),
            times,
            {{"overhead", 2.0 * times.median / (before.median + alone.median) - 1.0},
             {"alone_before_us", before.median},
             {"alone_after_us", alone.median}});
  }

  KMeans kmeans(tokens, shape.kv_heads);
  const Times times = time_events(run.stream(), kRepeats,
                                  [&] { kmeans.run(run.stream(), prefill.keys(0), kIterations); });
  run.add("ttft", with("k-means of PQCache, m 2, b 6, alone"), times,
          {{"iterations", kIterations},
           {"mean_square", kmeans.mean_square(run.stream())},
           {"overhead", times.median / alone.median}});
}

}  // namespace kvtier::bench
