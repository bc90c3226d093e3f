#pragma once

#include "kvtier/tensor.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvtier::testing {

/// Shape and switches of a small random decoder, and a transformer in double precision that shares
/// no code with kvtier or its examples.
struct ReferenceModel {
  struct Weight {
    std::vector<std::int64_t> shape;
    std::vector<float> values;  ///< Exactly representable in bf16.
  };
  struct Llama3 {
    double factor = 8.0, low = 1.0, high = 4.0, original = 64.0;
  };

  bool qwen3 = false;
  bool tied = false;
  bool bias = false;
  bool llama3 = false;
  Llama3 scaling;
  int vocab = 50, hidden = 64, inner = 96, layers = 2, heads = 4, kv_heads = 2, head_dim = 64;
  double eps = 1e-5;
  double theta = 10000.0;
  int eos = -1;  ///< None when negative.
  std::map<std::string, Weight> weights;

  /// Fills `weights` with the tensors of a checkpoint with these switches.
  void randomize(unsigned seed);
  [[nodiscard]] std::string config_json() const;
  /// Writes config.json and the weights as `dtype`: one file, or two shards and an index.
  void write(const std::filesystem::path& directory, DType dtype = DType::kBFloat16,
             bool sharded = false) const;
  /// Returns logits `[tokens, vocab]` of dense causal attention over keys and values rounded to
  /// bf16.
  [[nodiscard]] std::vector<double> logits(const std::vector<std::int32_t>& tokens) const;

 private:
  using Rows = std::vector<std::vector<double>>;

  [[nodiscard]] Rows project(const Rows& x, const std::string& name) const;
  [[nodiscard]] std::vector<double> norm(const double* x, int size, const std::string& name) const;
  [[nodiscard]] Rows norm_rows(const Rows& x, const std::string& name) const;
  void rotate(double* x, std::int64_t position) const;
  void prepare_heads(Rows& x, int count, const std::string& norm_name) const;
  [[nodiscard]] Rows attention(const Rows& normed, const std::string& prefix) const;
  [[nodiscard]] Rows mlp(const Rows& normed, const std::string& prefix) const;
};

/// Returns `count` random token ids in [0, vocab).
[[nodiscard]] std::vector<std::int32_t> random_tokens(std::int64_t count, int vocab, unsigned seed);

}  // namespace kvtier::testing
