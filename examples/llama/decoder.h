#pragma once

#include "kvtier/engine.h"

#include "llama/compute.h"
#include "llama/kv_store.h"
#include "llama/model_config.h"
#include "llama/weights.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace kvtier::llama {

/// Queries, keys, values and outputs of one layer for consecutive tokens, rotary embedding applied,
/// in the memory of the decoder's `Compute`. `query` and `out` are fp32 `[tokens, query_heads,
/// head_dim]` and null where a layer computes only keys and values; `key` and `value` are bf16
/// `[tokens, kv_heads, head_dim]`.
struct LayerStep {
  int layer = 0;
  std::int64_t first_position = 0;
  std::int64_t tokens = 0;
  float* query = nullptr;
  std::uint16_t* key = nullptr;
  std::uint16_t* value = nullptr;
  float* out = nullptr;
};

/// Called as a forward pass goes: with tokens done and in all, counted over layers.
using Progress = std::function<void(std::int64_t, std::int64_t)>;
/// Called after each attention of a pass.
using StepObserver = std::function<void(const LayerStep&)>;

struct PassOptions {
  std::int64_t chunk_tokens = 512;  ///< Query tokens computed at once.
  Progress progress;
  StepObserver observer;
};

/// A Llama or Qwen3 decoder whose keys and values live in a kvtier session. Passes go layer by
/// layer over all their tokens, so dense attention needs fp32 keys and values of one layer only.
class Decoder {
 public:
  Decoder(const ModelConfig& config, Weights weights, std::unique_ptr<Compute> compute);

  [[nodiscard]] const ModelConfig& config() const noexcept { return config_; }
  [[nodiscard]] Compute& compute() noexcept { return *compute_; }

  /// Appends `tokens` to an empty session, computing dense causal attention here, exactly. The last
  /// layer stores its keys and values and stops, for nothing reads its output.
  /// Throws `kInvalidArgument` for a token outside the vocabulary, `kFailedPrecondition` when the
  /// session is not empty.
  void prefill(KvSession& session, std::span<const std::int32_t> tokens,
               const PassOptions& options = {});
  void prefill(Session& session, std::span<const std::int32_t> tokens,
               const PassOptions& options = {}) {
    EmbeddedSession embedded(session);
    prefill(embedded, tokens, options);
  }

  /// Appends `tokens` and attends through `Session::decode`, up to 64 or `chunk_tokens` at a time.
  /// Returns logits `[tokens, vocab_size]`, row t of the token after `tokens[t]`.
  [[nodiscard]] std::vector<float> decode(KvSession& session, std::span<const std::int32_t> tokens,
                                          const AttendOptions& attend,
                                          const PassOptions& options = {});
  [[nodiscard]] std::vector<float> decode(Session& session, std::span<const std::int32_t> tokens,
                                          const AttendOptions& attend,
                                          const PassOptions& options = {}) {
    EmbeddedSession embedded(session);
    return decode(embedded, tokens, attend, options);
  }

 private:
  class Attention;
  class DensePrefill;
  class Kvtier;
  struct Workspace;

  Buffer forward(std::span<const std::int32_t> tokens, std::int64_t first, Attention& attention,
                 bool last_output, const PassOptions& options);
  void attention_block(const LayerWeights& weights, const LayerStep& step, Workspace& work,
                       float* hidden, Attention& attention, const PassOptions& options);
  void mlp_block(const LayerWeights& weights, std::int64_t tokens, Workspace& work, float* hidden);
  [[nodiscard]] Buffer rope_table(std::int64_t first, std::int64_t tokens);
  void check_tokens(std::span<const std::int32_t> tokens) const;

  ModelConfig config_;
  // Before the weights: their buffers are freed through it.
  std::unique_ptr<Compute> compute_;
  Weights weights_;
  std::vector<double> frequencies_;
};

/// Reads the model in `directory`.
[[nodiscard]] Decoder load_decoder(const std::filesystem::path& directory,
                                   std::unique_ptr<Compute> compute);

}  // namespace kvtier::llama
