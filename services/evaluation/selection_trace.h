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
  /// Returns whether a file is one of these. Throws as `SafeTensors::open`.
  [[nodiscard]] static bool is_in(const std::filesystem::path& path);
  /// Reads a file. Throws as `SafeTensors::open`, and `kDataLoss` when counts, ids and heads do not
  /// go together.
  [[nodiscard]] static SelectionTrace read(const std::filesystem::path& path);
  /// Throws as `write_safetensors`. There must be a list.
  void write(const std::filesystem::path& path) const;
};

}  // namespace kvtier::services
