#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::llama {

enum class Architecture : std::uint8_t { kLlama, kQwen3 };

/// Frequency scaling of Llama 3.1: long wavelengths are stretched by `factor`, short ones kept,
/// those between blended.
struct Llama3Scaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_context = 8192.0;
};

/// What a `config.json` in Hugging Face layout says about a decoder.
struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  int layers = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  std::optional<Llama3Scaling> rope_scaling;
  bool tied_embeddings = false;
  bool attention_bias = false;  ///< Biases on the q, k, v and o projections.
  std::vector<std::int32_t> eos_tokens;
  std::int64_t max_positions = 0;  ///< Tokens for which it is made; 0: not given.

  /// RMS norm of each head's q and k before the rotary embedding.
  [[nodiscard]] bool qk_norm() const noexcept { return architecture == Architecture::kQwen3; }
  [[nodiscard]] int group() const noexcept { return query_heads / kv_heads; }
};

/// Reads the text of a `config.json`. Throws `kDataLoss` when it is no JSON object, and
/// `kInvalidArgument` naming the field, what is expected and what was found: for a missing or
/// impossible value, and for every field that would change the result in a way this decoder does
/// not compute. A field it does not know is accepted only when null or false.
[[nodiscard]] ModelConfig parse_model_config(std::string_view json);

/// Reads `directory`/config.json. Throws `kNotFound` when it cannot be opened.
[[nodiscard]] ModelConfig read_model_config(const std::filesystem::path& directory);

/// Returns the head_dim / 2 rotation frequencies, in radians per token.
[[nodiscard]] std::vector<double> rope_frequencies(const ModelConfig& config);

}  // namespace kvtier::llama
