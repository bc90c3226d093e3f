#pragma once

#include "formats/safetensors.h"
#include "tests/llama/reference_model.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::testing {

inline formats::Tensor int_tensor(const std::vector<std::int32_t>& values,
                                  std::vector<std::int64_t> shape) {
  return {.dtype = DType::kInt32,
          .shape = std::move(shape),
          .data = reinterpret_cast<const std::byte*>(values.data()),
          .bytes = values.size() * sizeof(std::int32_t)};
}

/// Writes a task file with one case "tiny": `sequences` random sequences of 300 context tokens and
/// 12 more, of which the last 6 are the answers of one query and the frequent words.
inline void write_tiny_tasks(const std::filesystem::path& path, int vocab,
                             std::int64_t sequences = 2,
                             const std::string& metadata = "context=300",
                             std::vector<std::int32_t> answers = {304, 305, 306, 309, 310, 311}) {
  const std::vector<std::int32_t> tokens = random_tokens(sequences * 312, vocab, 21);
  formats::write_safetensors(
      path,
      {{"tiny.tokens", int_tensor(tokens, {sequences, 312})},
       {"tiny.answer_positions", int_tensor(answers, {static_cast<std::int64_t>(answers.size())})}},
      {{"tiny", metadata}});
}

/// As above, with answers given by marks of the last 12 tokens, or of as many as there are marks.
inline void write_marked_tasks(const std::filesystem::path& path, int vocab,
                               const std::vector<std::int32_t>& marks,
                               const std::string& metadata = "context=300 kind=copying") {
  const std::vector<std::int32_t> tokens = random_tokens(2 * 312, vocab, 21);
  formats::write_safetensors(
      path,
      {{"tiny.tokens", int_tensor(tokens, {2, 312})},
       {"tiny.answers", int_tensor(marks, {static_cast<std::int64_t>(marks.size())})}},
      {{"tiny", metadata}});
}

}  // namespace kvtier::testing
