#include "services/console/text.h"

#include <algorithm>

namespace kvtier::services {

std::vector<std::string> aligned(const std::vector<std::vector<std::string>>& rows,
                                 std::size_t text_columns) {
  std::vector<std::size_t> widths(rows.empty() ? 0 : rows.front().size(), 0);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::vector<std::string> lines;
  for (const auto& row : rows) {
    std::string& line = lines.emplace_back();
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (i < text_columns ? row[i] + padding : padding + row[i]);
    }
  }
  return lines;
}

}  // namespace kvtier::services
