#pragma once

#include "formats/atomic_file.h"
#include "services/console/console.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

namespace kvtier::services {

/// Returns a number, or null when it is none.
[[nodiscard]] inline nlohmann::json number(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
}

/// Where `--json FILE` puts a report; "-" is standard output, and the text for people then goes to
/// standard error.
class JsonReport {
 public:
  /// Throws as `AtomicFile`. `path` empty: no report.
  JsonReport(const std::string& path, const Console& console)
      : console_(console), is_standard_(path == "-") {
    if (!path.empty() && !is_standard_) file_.emplace(path);
  }

  [[nodiscard]] std::ostream& text() const { return is_standard_ ? console_.err : console_.out; }
  [[nodiscard]] bool is_wanted() const noexcept { return is_standard_ || file_; }
  void commit(std::string_view json) {
    if (is_standard_) console_.out << json << std::flush;
    if (file_) file_->commit(json);
  }

 private:
  const Console& console_;
  bool is_standard_;
  std::optional<formats::AtomicFile> file_;
};

}  // namespace kvtier::services
