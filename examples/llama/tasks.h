#pragma once

#include "formats/safetensors.h"

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace kvtier::llama {

/// One case: sequences that share a context length and the positions of their answers.
struct TaskCase {
  std::string name;
  std::string kind;  ///< As the file states it, such as "copying"; "needle-llama" for that format.
  std::int64_t context = 0;
  std::int64_t sequences = 0;
  std::int64_t length = 0;               ///< Tokens per sequence: context, questions and answers.
  const std::int32_t* tokens = nullptr;  ///< [sequences, length]
  std::vector<std::int64_t> answers;     ///< Ascending positions, above `context`.
  /// How many of `answers` each answer has, in order. Those left are the frequent words.
  std::vector<std::int64_t> answer_tokens;
  std::string metadata;  ///< As stored, such as "context=4096 dense_exact=0.98".

  [[nodiscard]] std::span<const std::int32_t> sequence(std::int64_t index) const {
    return {tokens + index * length, static_cast<std::size_t>(length)};
  }
  [[nodiscard]] std::int64_t tail() const noexcept { return length - context; }
  [[nodiscard]] std::int64_t queries() const noexcept {
    return static_cast<std::int64_t>(answer_tokens.size());
  }
};

/// A file of cases: `CASE.tokens` int32 `[sequences, length]`, the metadata string CASE with
/// "context=N" and more, and one of
/// - `CASE.answers` int32 `[length - context]`: 0, or the number of the answer that the token
///   belongs to, from 1 in order; "kind=WORD" in the metadata;
/// - `CASE.answer_positions` int32 `[answers]`, needle-llama's: answers of three tokens, then the
///   three frequent words.
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

/// Returns the word after "key=" in a metadata string; empty without one.
[[nodiscard]] std::string metadata_word(const std::string& text, const std::string& key);

/// Returns the number after "key=" in a metadata string; throws `kDataLoss` without one.
[[nodiscard]] double metadata_number(const std::string& text, const std::string& key);

}  // namespace kvtier::llama
