#pragma once

#include "formats/safetensors.h"
#include "tests/llama/reference_model.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvtier::testing {

/// Writes a task file with one case "tiny": `sequences` random sequences of 300 context tokens and
/// 12 more, of which the last 6 are the answers of one query and the frequent words.
inline void write_tiny_tasks(const std::filesystem::path& path, int vocab,
                             std::int64_t sequences = 2,
                             const std::string& metadata = "context=300",
                             std::vector<std::int32_t> answers = {304, 305, 306, 309, 310, 311}) {
  const std::vector<std::int32_t> tokens = random_tokens(sequences * 312, vocab, 21);
  const auto tensor = [](const std::vector<std::int32_t>& values, std::vector<std::int64_t> shape) {
    return formats::Tensor{.dtype = DType::kInt32,
                           .shape = std::move(shape),
                           .data = reinterpret_cast<const std::byte*>(values.data()),
                           .bytes = values.size() * sizeof(std::int32_t)};
  };
  formats::write_safetensors(
      path,
      {{"tiny.tokens", tensor(tokens, {sequences, 312})},
       {"tiny.answer_positions", tensor(answers, {static_cast<std::int64_t>(answers.size())})}},
      {{"tiny", metadata}});
}

}  // namespace kvtier::testing
