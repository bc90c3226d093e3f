#include "llama/weights.h"

#include "formats/safetensors.h"
#include "include/types/failure.h"

#include <nlohmann/json.hpp>

#include <fstream>
#include <map>
#include <set>
#include <string>

namespace kvtier::llama {
namespace {

using formats::SafeTensors;
using formats::Tensor;

std::set<std::string> shard_names(const std::filesystem::path& directory) {
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  std::ifstream file(index);
  if (!file) return {"model.safetensors"};
  const auto root = nlohmann::json::parse(file, nullptr, false);
  if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object()) {
    throw_error(ErrorCode::kDataLoss, index.string(),
                ": expected a JSON object with an object weight_map, found something else");
  }
  std::set<std::string> names;
  for (const auto& [tensor, shard] : root["weight_map"].items()) {
    const std::string name = shard.is_string() ? shard.get<std::string>() : std::string();
    if (name.empty() || name.find('/') != std::string::npos) {
      throw_error(ErrorCode::kDataLoss, index.string(), ": weight_map.", tensor,
                  ": expected a file name, found ", shard.dump());
    }
    names.insert(name);
  }
  return names;
}

/// All tensors of a checkpoint by name; remembers which were taken.
class Checkpoint {
 public:
  Checkpoint(const std::filesystem::path& directory, Compute& compute)
      : directory_(directory), compute_(compute) {
    for (const std::string& name : shard_names(directory)) {
      shards_.push_back(SafeTensors::open(directory / name));
    }
    for (const SafeTensors& shard : shards_) {
      for (const auto& [name, tensor] : shard.tensors()) {
        if (!tensors_.emplace(name, &tensor).second) {
          throw_error(ErrorCode::kInvalidArgument, shard.path().string(), ": ", name,
                      ": expected once, found in two shards");
        }
      }
    }
  }

  Matrix matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    return {take(name, {rows, columns}), rows, columns};
  }
  Vector vector(const std::string& name, std::int64_t size) { return take(name, {size}); }

  Projection projection(const std::string& name, std::int64_t rows, std::int64_t columns,
                        bool biased) {
    Projection result;
    result.weight = matrix(name + ".weight", rows, columns);
    if (biased) result.bias = vector(name + ".bias", rows);
    return result;
  }

  void ignore(const std::string& name) { tensors_.erase(name); }

  void reject_rest() const {
    for (const auto& [name, tensor] : tensors_) {
      // Rotation frequencies that old checkpoints store; they follow from the configuration.
      if (name.ends_with("rotary_emb.inv_freq")) continue;
      throw_error(ErrorCode::kInvalidArgument, directory_.string(), ": ", name,
                  ": expected only weights that config.json calls for, found one more");
    }
  }

 private:
  Buffer take(const std::string& name, const std::vector<std::int64_t>& shape) {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) {
      throw_error(ErrorCode::kNotFound, directory_.string(), ": expected the weight ", name, " ",
                  formats::shape_text(shape), ", found none");
    }
    const Tensor& tensor = *it->second;
    if (tensor.shape != shape || tensor.dtype == DType::kInt32) {
      throw_invalid(join(directory_.string(), ": ", name),
                    "fp32, fp16 or bf16 " + formats::shape_text(shape), describe(tensor));
    }
    const std::vector<float> values = to_float(tensor);
    Buffer buffer = compute_.allocate(values.size() * sizeof(float));
    compute_.upload(buffer.floats(), values.data(), values.size() * sizeof(float));
    tensors_.erase(it);
    return buffer;
  }

  std::filesystem::path directory_;
  Compute& compute_;
  std::vector<SafeTensors> shards_;
  std::map<std::string, const Tensor*> tensors_;
};

LayerWeights load_layer(Checkpoint& checkpoint, const ModelConfig& config, int layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.";
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t inner = config.intermediate_size;
  const std::int64_t q_columns = std::int64_t{config.query_heads} * config.head_dim;
  const std::int64_t kv_columns = std::int64_t{config.kv_heads} * config.head_dim;
  const bool biased = config.attention_bias;

  LayerWeights weights;
  weights.attention_norm = checkpoint.vector(prefix + "input_layernorm.weight", hidden);
  weights.q = checkpoint.projection(attention + "q_proj", q_columns, hidden, biased);
  weights.k = checkpoint.projection(attention + "k_proj", kv_columns, hidden, biased);
  weights.v = checkpoint.projection(attention + "v_proj", kv_columns, hidden, biased);
  weights.o = checkpoint.projection(attention + "o_proj", hidden, q_columns, biased);
  if (config.qk_norm()) {
    weights.q_norm = checkpoint.vector(attention + "q_norm.weight", config.head_dim);
    weights.k_norm = checkpoint.vector(attention + "k_norm.weight", config.head_dim);
  }
  weights.mlp_norm = checkpoint.vector(prefix + "post_attention_layernorm.weight", hidden);
  weights.gate = checkpoint.projection(prefix + "mlp.gate_proj", inner, hidden, false);
  weights.up = checkpoint.projection(prefix + "mlp.up_proj", inner, hidden, false);
  weights.down = checkpoint.projection(prefix + "mlp.down_proj", hidden, inner, false);
  return weights;
}

}  // namespace

Weights load_weights(const std::filesystem::path& directory, const ModelConfig& config,
                     Compute& compute) {
  Checkpoint checkpoint(directory, compute);
  Weights weights;
  weights.embedding =
      checkpoint.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size);
  for (int layer = 0; layer < config.layers; ++layer) {
    weights.layers.push_back(load_layer(checkpoint, config, layer));
  }
  weights.final_norm = checkpoint.vector("model.norm.weight", config.hidden_size);
  if (config.tied_embeddings) {
    checkpoint.ignore("lm_head.weight");  // A copy of the embedding that some files carry.
  } else {
    weights.head = checkpoint.matrix("lm_head.weight", config.vocab_size, config.hidden_size);
  }
  checkpoint.reject_rest();
  return weights;
}

}  // namespace kvtier::llama
