#pragma once

#include "formats/safetensors.h"

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace kvtier::llama {

/// One retrieval case: sequences that share a context length and the positions of their answers.
/// The answers are `queries` groups of three tokens, then the three frequent words.
struct TaskCase {
  std::string name;
  std::int64_t context = 0;
  std::int64_t sequences = 0;
  std::int64_t length = 0;               ///< Tokens per sequence: context, questions and answers.
  const std::int32_t* tokens = nullptr;  ///< [sequences, length]
  std::vector<std::int64_t> answers;     ///< Ascending positions, above `context`.
  std::string metadata;                  ///< As stored, such as "context=4096 dense_exact=0.98".

  [[nodiscard]] std::span<const std::int32_t> sequence(std::int64_t index) const {
    return {tokens + index * length, static_cast<std::size_t>(length)};
  }
  [[nodiscard]] std::int64_t tail() const noexcept { return length - context; }
  [[nodiscard]] std::int64_t queries() const noexcept {
    return static_cast<std::int64_t>(answers.size()) / 3 - 1;
  }
};

/// A file of cases: `CASE.tokens` int32 `[sequences, length]`, `CASE.answer_positions` int32
/// `[answers]`, and the metadata string CASE with "context=N" and more.
class TaskFile {
 public:
  explicit TaskFile(const std::filesystem::path& path);

  [[nodiscard]] std::vector<std::string> names() const;
  /// Throws `kNotFound` with the names there are, or `kDataLoss` when positions or context do not
  /// fit the tokens. The result refers to this object.
  [[nodiscard]] TaskCase at(const std::string& name) const;

 private:
  formats::SafeTensors file_;
};

/// Returns the number after "key=" in a metadata string; throws `kDataLoss` without one.
[[nodiscard]] double metadata_number(const std::string& text, const std::string& key);

}  // namespace kvtier::llama
