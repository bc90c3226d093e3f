#pragma once

#include "llama/bench.h"
#include "llama/eval.h"

#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

namespace kvtier::llama {

/// What a report says about the run beside its figures.
struct RunInfo {
  std::string model;    ///< Directory, as given.
  std::string command;  ///< The command line.
  int threads = 0;      ///< As given; 0: all.
};

/// Returns how many tokens a method takes: "33x", "e=0.03", or "-" of a dense one.
[[nodiscard]] std::string size_text(const Method& method);

/// Prints one table per case, 109 columns wide, then where the keys and values were.
void print_report(std::ostream& out, const ModelConfig& model, const EvalResult& result);

/// Throws `kUnavailable`, with the name of the option, unless a file can be written at `path`;
/// `kInvalidArgument` for "-", which is standard output elsewhere. Leaves everything as it is. No
/// path, nothing to do.
void check_writable(const std::filesystem::path& path, const std::string& option);

/// Writes {"model", "command", "date", "cases": [...]}, one entry per row of the table, to a
/// temporary name first. Throws `kUnavailable` when the file cannot be written.
void write_json(const std::filesystem::path& path, const RunInfo& info, const EvalResult& result);

/// Writes {"command", "date", "rows": [...]}, one entry per row of `bench`, as above.
void write_json(const std::filesystem::path& path, const std::string& command,
                const ModelConfig& model, const std::vector<BenchRow>& rows);

/// Writes `result.logits` to a safetensors file: fp32 `[tail, vocab]` each, named
/// CASE.SEQUENCE.ROW, with rows counted within their case. Throws what `write_safetensors` throws.
void write_logits(const std::filesystem::path& path, std::int64_t vocab_size,
                  const EvalResult& result);

}  // namespace kvtier::llama
