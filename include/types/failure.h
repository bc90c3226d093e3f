#pragma once

#include "kvtier/error.h"

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
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

/// Returns the name of an enumerator by those of all, in the order of their numbers from 0 on;
/// `unknown` for one beyond.
template <typename Enum>
[[nodiscard]] constexpr std::string_view enumerator_name(
    Enum value, std::initializer_list<std::string_view> names,
    std::string_view unknown = "unknown") noexcept {
  const auto number = static_cast<std::size_t>(value);
  return number < names.size() ? names.begin()[number] : unknown;
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

/// Collects problems as "field: expected ..., found ...".
class Problems {
 public:
  template <typename Found>
  void require(bool ok, std::string_view field, std::string_view expected, const Found& found) {
    if (!ok) list_.push_back(join(field, ": expected ", expected, ", found ", found));
  }
  void append(std::string_view prefix, const std::vector<std::string>& others) {
    for (const std::string& other : others) list_.push_back(join(prefix, other));
  }
  [[nodiscard]] std::vector<std::string> take() { return std::move(list_); }

 private:
  std::vector<std::string> list_;
};

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
