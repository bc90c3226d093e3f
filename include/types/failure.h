#pragma once

#include "kvtier/error.h"

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// Messages of errors: "what: expected X, found Y" (CONTRIBUTING.md).
namespace kvtier {

/// Joins text and numbers.
template <typename... Parts>
[[nodiscard]] std::string join(const Parts&... parts) {
  std::string text;
  const auto add = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (add(parts), ...);
  return text;
}

/// Throws an error whose message is the parts joined.
template <typename... Parts>
[[noreturn]] void throw_error(ErrorCode code, const Parts&... parts) {
  throw Error(code, join(parts...));
}

/// Throws `kInvalidArgument`, "`what`: expected `expected`, found `found`".
template <typename Found>
[[noreturn]] void throw_invalid(std::string_view what, std::string_view expected,
                                const Found& found) {
  throw_error(ErrorCode::kInvalidArgument, what, ": expected ", expected, ", found ", found);
}

/// Returns a configuration that is valid. Throws `kInvalidArgument` with all that `validate` says.
template <typename Config>
[[nodiscard]] const Config& validated(const Config& config) {
  const std::vector<std::string> problems = config.validate();
  if (problems.empty()) return config;
  std::string message = join("configuration: expected valid values, found ", problems.size(),
                             problems.size() == 1 ? " problem" : " problems");
  for (const std::string& problem : problems) message += "\n  " + problem;
  throw Error(ErrorCode::kInvalidArgument, message);
}

}  // namespace kvtier
