#pragma once

#include "benchmarks/quality/answers.h"
#include "llama/runtime_options.h"

#include <cstddef>
#include <optional>
#include <vector>

namespace kvtier::quality {

/// A row to fill: kvtier's own method, or the place of a selector in `make_selectors`.
struct Plan {
  AnswerRow row;
  std::optional<llama::Method> own{};
  bool int8 = false;  ///< Of its own: in the engine whose pages have rows in int8.
  std::size_t selector = 0;
};

/// Returns a plan for each row that is wanted but the first, dense one. Throws `kInvalidArgument`
/// when there is none.
[[nodiscard]] std::vector<Plan> make_plans(const AnswerOptions& options);

}  // namespace kvtier::quality
