#pragma once

#include "kvtier/tensor.h"

#include "formats/safetensors.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvtier::services {

/// One layer of a recorded trace. Tensors point into the trace's mapped file; rotary embedding is
/// already applied.
struct TraceLayer {
  std::string name;           ///< Number in the model, as the file gives it.
  formats::Tensor keys;       ///< `[kv_heads, tokens, head_dim]`
  formats::Tensor values;     ///< `[kv_heads, tokens, head_dim]`
  formats::Tensor queries;    ///< `[query_heads, steps, head_dim]`
  formats::Tensor attention;  ///< `[query_heads, steps, head_dim]`: the model's dense output.
};

/// Decode steps of one sequence, recorded from a model: a safetensors file with tensors `k`, `v`,
/// `q`, `o`, or with `layers.N.k` and so on for several layers. Step i attends to the tokens
/// 0 .. context + i inclusive, where context = tokens - steps.
class Trace {
 public:
  /// Opens and checks a trace. Throws what `SafeTensors::open` throws, `kNotFound` for a missing
  /// tensor, `kInvalidArgument` for tensors whose shapes or dtypes do not fit each other.
  [[nodiscard]] static Trace open(const std::filesystem::path& path);

  [[nodiscard]] const std::vector<TraceLayer>& layers() const noexcept { return layers_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }
  [[nodiscard]] std::int64_t kv_heads() const noexcept { return layers_[0].keys.shape[0]; }
  [[nodiscard]] std::int64_t query_heads() const noexcept { return layers_[0].queries.shape[0]; }
  [[nodiscard]] std::int64_t head_dim() const noexcept { return layers_[0].keys.shape[2]; }
  [[nodiscard]] std::int64_t tokens() const noexcept { return layers_[0].keys.shape[1]; }
  [[nodiscard]] std::int64_t steps() const noexcept { return layers_[0].queries.shape[1]; }
  [[nodiscard]] std::int64_t context() const noexcept { return tokens() - steps(); }

  /// Views entries [begin, begin + count) of the second dimension of a trace tensor as `[count,
  /// heads, head_dim]`, the layout of kvtier's calls, without a copy.
  [[nodiscard]] static TensorView by_token(const formats::Tensor& tensor, std::int64_t begin,
                                           std::int64_t count);

 private:
  explicit Trace(formats::SafeTensors file) : file_(std::move(file)) {}

  formats::SafeTensors file_;
  std::vector<TraceLayer> layers_;
};

}  // namespace kvtier::services
