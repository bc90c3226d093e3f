#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace kvtier::services {

/// The tokens that steps of a trace have selected, as `kvtier replay --record-ids` writes them: a
/// safetensors file of int32 `counts` `[layers, steps, lists]`, of `ids`, the lists one after the
/// other, and of `shape`, the query heads, KV heads and tokens of context. There is a list for each
/// KV head, or for each query head.
struct SelectionTrace {
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t context = 0;
  std::int64_t layers = 0;
  std::int64_t steps = 0;
  std::vector<std::vector<std::int32_t>> lists;  ///< `[layers][steps][lists]`, rising.

  [[nodiscard]] std::int64_t num_lists() const {
    return static_cast<std::int64_t>(lists.size()) / (layers * steps);
  }
  /// Throws as `write_safetensors`. There must be a list.
  void write(const std::filesystem::path& path) const;
};

}  // namespace kvtier::services
