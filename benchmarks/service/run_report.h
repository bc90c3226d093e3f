#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace kvtier::bench {

/// What a run says of itself (date, command, hardware, load before and after) and the rows that it
/// measured.
class RunReport {
 public:
  RunReport(const std::string& program, int argc, char** argv);

  /// Says one thing more of the run.
  void set(const std::string& name, nlohmann::json value) { report_[name] = std::move(value); }
  /// Adds rows, and shows each on standard error.
  void add(const nlohmann::json& rows);
  /// Writes the report as JSON to a file, or to standard output when `path` is empty.
  void write(const std::string& path);

 private:
  nlohmann::json report_;
};

}  // namespace kvtier::bench
