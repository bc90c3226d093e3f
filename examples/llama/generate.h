#pragma once

#include "llama/decoder.h"
#include "llama/runtime_options.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvtier::llama {

struct GenerateOptions {
  std::vector<std::int32_t> prompt;
  std::int64_t max_tokens = 32;
  RuntimeOptions runtime;
  Method method;  ///< `sparsity` divides the tokens visible at each step; 0: as `retrieval` says.
};

/// Parses "1,2,3", or "@FILE" with ids apart by commas or white space. Throws `kInvalidArgument`
/// naming the word that is no id, and `kNotFound` when the file cannot be opened.
[[nodiscard]] std::vector<std::int32_t> parse_ids(const std::string& text);

/// Returns the greedy continuation of the prompt: dense prefill of all but its last token, then one
/// token at a time through kvtier, until an end token (returned too) or `max_tokens`. `on_token` is
/// called with each as it comes.
std::vector<std::int32_t> generate(Decoder& decoder, const GenerateOptions& options,
                                   const std::function<void(std::int32_t)>& on_token = {});

}  // namespace kvtier::llama
