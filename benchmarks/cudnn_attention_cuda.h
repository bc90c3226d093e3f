#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvtier::bench {

struct CudnnFunctions;

/// Attention by cuDNN: query tokens of each sequence over dense bf16 keys and values. cuDNN is
/// found at run time; only its headers are needed to build, and a build without them says so in
/// `CudnnLibrary::load`.
class CudnnLibrary {
 public:
  /// Loads libcudnn.so.9 from one of `folders`, or from where the system finds it. Throws
  /// `Error(kNotFound)` naming what was tried, `Error(kUnimplemented)` without headers.
  [[nodiscard]] static std::shared_ptr<const CudnnLibrary> load(
      const std::vector<std::string>& folders);
  ~CudnnLibrary();
  CudnnLibrary(const CudnnLibrary&) = delete;  // one owner of the handle
  CudnnLibrary& operator=(const CudnnLibrary&) = delete;

  /// "cuDNN 9.19.0"
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

 private:
  friend class CudnnAttention;
  CudnnLibrary();

  std::unique_ptr<CudnnFunctions> functions_;
  void* handle_ = nullptr;
  std::string name_;
};

class CudnnAttention {
 public:
  struct Shape {
    std::int64_t tokens = 0;
    std::int64_t query_tokens = 1;  ///< Each sees all tokens.
    int batch = 1;
    int query_heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    /// Keys and values `[batch, kv_heads, tokens, head_dim]`, else `[batch, tokens, kv_heads,
    /// head_dim]`. Queries and output are `[batch, query_tokens, query_heads,
    /// head_dim]`.
    bool heads_first = true;
  };
  /// Builds the plans that cuDNN offers, in its order of preference, at most `kMaxPlans`. Throws
  /// `Error(kUnimplemented)` with cuDNN's words when there is none.
  CudnnAttention(std::shared_ptr<const CudnnLibrary> library, const Shape& shape);
  ~CudnnAttention();
  CudnnAttention(const CudnnAttention&) = delete;  // owns plans and workspace
  CudnnAttention& operator=(const CudnnAttention&) = delete;

  static constexpr int kMaxPlans = 4;
  [[nodiscard]] int num_plans() const noexcept;

  /// Enqueues; device pointers. Can be captured in a CUDA graph.
  void run(void* stream, int plan, const void* query, const void* keys, const void* values,
           void* out) const;

 private:
  struct Plans;

  std::shared_ptr<const CudnnLibrary> library_;
  std::unique_ptr<Plans> plans_;
};

}  // namespace kvtier::bench
