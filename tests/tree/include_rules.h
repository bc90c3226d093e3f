#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// The dependency arrows of docs/architecture.md as functions over `#include` lines.
namespace kvtier::testing {

/// One `#include` line.
struct Include {
  std::string target;   ///< Between the quotes or angle brackets.
  bool quoted = false;  ///< "..." rather than <...>.
};

/// Returns whether a path relative to the root is a file of the repository.
using Exists = std::function<bool(const std::string&)>;

/// Returns the includes of a source, commented ones left out.
[[nodiscard]] std::vector<Include> find_includes(const std::vector<std::string>& lines);

/// Returns why `file` (relative to the root) must not contain `include`; empty when it may.
///
/// Example: ("hashing/sketch.cc", "scoring/selector.h") -> "hashing must not include scoring".
[[nodiscard]] std::string include_problem(std::string_view file, const Include& include,
                                          const Exists& exists);

}  // namespace kvtier::testing
