#pragma once

#include "benchmarks/quality/selector.h"
#include "llama/decoder.h"
#include "llama/eval.h"
#include "llama/tasks.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvtier::quality {

struct AnswerOptions {
  std::string task;  ///< Case of the task file.
  std::int64_t first_sequence = 0;
  std::int64_t sequences = 1;  ///< From that one on.
  std::vector<double> sparsities = {20, 100};
  int sink = 64;
  int window = 64;
  std::uint64_t seed = 0;
  /// Of norm-aware's planes, beside seed 0, for rows of their own with a selection per query head.
  std::vector<std::uint64_t> plane_seeds;
  /// Of kvtier's own selectors, in place of the usual ones: soft collision with orthogonal planes,
  /// and norm-aware with 64 and 600 planes.
  bool other_planes = false;
  int planes = 0;  ///< Of the norm-aware rows that are wanted; 0: all.
  /// Also the variants of `make_selectors`.
  bool variants = false;
  /// Names of selectors to run; empty: all.
  std::vector<std::string> only;
  std::function<void(const std::string&)> progress;  ///< Called with what begins.
};

/// One selector at one sparsity, averaged over sequences; `scores.right` has the questions of all.
struct AnswerRow {
  std::string name;
  std::string settings;
  std::string selection;  ///< per_query_head or per_kv_head.
  double sparsity = 0.0;  ///< 0: dense.
  double bits_per_token = 0.0;
  double rows_attended = 0.0;  ///< Mean per query token, query head and layer
  llama::Scores scores;
};

/// Answers a task with every selector. A context is prefilled once, densely; the tokens after it
/// are teacher-forced, and select k = floor(context / sparsity) tokens of the context between the
/// first `sink` and the last `window`, which are always attended, as are all tokens after the
/// context. kvtier's own selectors run in kvtier. For the others its attention is replaced layer by
/// layer, in the decoder, by one over the tokens that they choose. Throws `kInvalidArgument` for
/// options that do not fit the case or name no selector, `kNotFound` for an unknown case. The
/// decoder's arithmetic must be the CPU's.
[[nodiscard]] std::vector<AnswerRow> answer(llama::Decoder& decoder, const llama::TaskFile& tasks,
                                            const AnswerOptions& options);

}  // namespace kvtier::quality
