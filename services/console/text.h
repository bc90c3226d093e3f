#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

/// The text of reports.
namespace kvtier::services {

/// Returns what `printf` would print.
template <typename... Values>
[[nodiscard]] std::string format(const char* pattern, Values... values) {
  std::string text(static_cast<std::size_t>(std::snprintf(nullptr, 0, pattern, values...)), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, values...);
  return text;
}

/// Returns a line for each of `rows`, in columns as wide as their widest cell: the first
/// `text_columns` to the left, the others to the right. All rows have as many cells.
[[nodiscard]] std::vector<std::string> aligned(const std::vector<std::vector<std::string>>& rows,
                                               std::size_t text_columns);

}  // namespace kvtier::services
