#pragma once

#include "llama/compute.h"
#include "llama/model_config.h"

#include <filesystem>
#include <vector>

namespace kvtier::llama {

/// `bias` is empty when the projection has none.
struct Projection {
  Matrix weight;
  Vector bias;
};

struct LayerWeights {
  Vector attention_norm;
  Projection q, k, v, o;
  Vector q_norm, k_norm;  ///< Qwen3 only, [head_dim].
  Vector mlp_norm;
  Projection gate, up, down;
};

struct Weights {
  Matrix embedding;  ///< [vocab_size, hidden_size]
  Matrix head;       ///< Empty when the embedding is used for output too.
  Vector final_norm;
  std::vector<LayerWeights> layers;
};

/// Reads the weights in `directory`, widened to fp32 and placed by `compute`: the shards that
/// `model.safetensors.index.json` names or, without one, `model.safetensors`. Throws `kNotFound`
/// (no file, or a weight that the configuration needs is missing), `kInvalidArgument` (a shape or
/// dtype other than the configuration's, or a weight that it does not know) and `kDataLoss` (a
/// damaged file), naming file and tensor.
[[nodiscard]] Weights load_weights(const std::filesystem::path& directory,
                                   const ModelConfig& config, Compute& compute);

}  // namespace kvtier::llama
