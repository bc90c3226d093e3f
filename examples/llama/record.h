#pragma once

#include "llama/decoder.h"
#include "llama/runtime_options.h"
#include "llama/tasks.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace kvtier::llama {

struct RecordOptions {
  std::string task;
  std::int64_t sequence = 0;
  std::int64_t steps = 0;    ///< Tokens after the context; 0: all.
  std::optional<int> layer;  ///< One layer, under plain names; all otherwise.
  RuntimeOptions runtime;
};

/// Writes a trace of dense decoding: for each layer N `layers.N.k`, `.v` bf16 `[kv_heads, context +
/// steps, head_dim]` and `.q`, `.o` bf16 `[query_heads, steps, head_dim]` (`k`, `v`, `q`, `o` of
/// the one layer asked for), rotary embedding applied. Step i attends tokens 0 to context + i
/// inclusive. Metadata: case, sequence, context, scale.
void record(Decoder& decoder, const TaskFile& tasks, const RecordOptions& options,
            const std::filesystem::path& out);

}  // namespace kvtier::llama
