#include "kvtier/calibration.h"
#include "kvtier/error.h"

#include "include/types/failure.h"

#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

namespace kvtier {
namespace {

constexpr std::string_view kTitle = "kvtier calibration 1";
constexpr std::array<std::pair<std::string_view, HostAllocation>, 4> kNames{
    {{"auto", HostAllocation::kAuto},
     {"managed", HostAllocation::kManaged},
     {"registered", HostAllocation::kRegistered},
     {"driver", HostAllocation::kDriver}}};
constexpr std::string_view kMeasurable = "managed, registered or driver";

/// The shortest text that reads back as the same number.
std::string number_text(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

/// One line of a file, for messages.
struct Line {
  std::string_view file;
  int number = 0;
  std::string_view text{};

  [[noreturn]] void fail(std::string_view expected, std::string_view found) const {
    throw_error(ErrorCode::kInvalidArgument, file, ", line ", number, ": expected ", expected,
                ", found \"", found, "\"");
  }
};

/// Cuts the first word off.
std::string_view next_word(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  const std::size_t end = std::min(text.find(' '), text.size());
  const std::string_view word = text.substr(0, end);
  text.remove_prefix(end);
  return word;
}

template <typename Number>
Number to_number(const Line& line, std::string_view word, std::string_view expected) {
  Number number{};
  const char* const end = word.data() + word.size();
  const auto [stopped, error] = std::from_chars(word.data(), end, number);
  bool good = error == std::errc() && stopped == end && number >= Number{};
  if constexpr (std::is_floating_point_v<Number>) good = good && std::isfinite(number);
  if (!good) line.fail(expected, word);
  return number;
}

HostAllocation to_allocation(const Line& line, std::string_view word) {
  for (const auto& [name, allocation] : kNames) {
    if (name == word && allocation != HostAllocation::kAuto) return allocation;
  }
  line.fail(kMeasurable, word);
}

CalibrationEntry to_measured(const Line& line, std::string_view value) {
  std::string_view rest = value;
  CalibrationEntry entry{.allocation = to_allocation(line, next_word(rest))};
  entry.obtain_seconds = to_number<double>(line, next_word(rest), "seconds");
  for (double& rate : entry.gb_per_s) {
    rate = to_number<double>(line, next_word(rest), "a rate in GB/s");
  }
  if (const std::string_view more = next_word(rest); !more.empty()) {
    line.fail("the end of the line after " + std::to_string(entry.gb_per_s.size()) + " rates",
              more);
  }
  return entry;
}

CalibrationEntry to_refused(const Line& line, std::string_view value) {
  std::string_view rest = value;
  CalibrationEntry entry{.allocation = to_allocation(line, next_word(rest))};
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  if (rest.empty()) line.fail("a reason", rest);
  entry.refused = rest;
  return entry;
}

class Parser {
 public:
  void take(const Line& line) {
    const std::size_t colon = line.text.find(": ");
    const std::string_view key = line.text.substr(0, colon);
    if (colon == std::string_view::npos) line.fail("key: value", line.text);
    const std::string_view value = line.text.substr(colon + 2);
    if (key == "device") {
      set(line, device_, std::string(value));
    } else if (key == "region_bytes") {
      set(line, region_bytes_, to_number<std::size_t>(line, value, "a number of bytes"));
    } else if (key == "host_allocation") {
      set(line, best_, to_allocation(line, value));
    } else if (key == "measured" || key == "refused") {
      add(line, key == "measured" ? to_measured(line, value) : to_refused(line, value));
    } else {
      line.fail("device, region_bytes, host_allocation, measured or refused", key);
    }
  }

  Calibration finish(const Line& last) && {
    if (!device_) last.fail("a line device: ... before the end", last.text);
    if (!region_bytes_) last.fail("a line region_bytes: ... before the end", last.text);
    if (!best_) last.fail("a line host_allocation: ... before the end", last.text);
    for (const CalibrationEntry& entry : entries_) {
      if (entry.allocation == *best_ && entry.refused.empty()) {
        return {.device = std::move(*device_),
                .region_bytes = *region_bytes_,
                .best = *best_,
                .entries = std::move(entries_)};
      }
    }
    last.fail("a line measured: ... of the host_allocation before the end",
              host_allocation_name(*best_));
  }

 private:
  template <typename T, typename Value>
  static void set(const Line& line, std::optional<T>& to, Value value) {
    if (to) line.fail("each key once", line.text);
    to = std::move(value);
  }
  void add(const Line& line, CalibrationEntry entry) {
    for (const CalibrationEntry& earlier : entries_) {
      if (earlier.allocation == entry.allocation) line.fail("each allocation once", line.text);
    }
    entries_.push_back(std::move(entry));
  }

  std::optional<std::string> device_;
  std::optional<std::size_t> region_bytes_;
  std::optional<HostAllocation> best_;
  std::vector<CalibrationEntry> entries_;
};

}  // namespace

std::string_view host_allocation_name(HostAllocation allocation) noexcept {
  for (const auto& [name, value] : kNames) {
    if (value == allocation) return name;
  }
  return "unknown";
}

std::string to_text(const Calibration& calibration) {
  std::string text(kTitle);
  text += "\ndevice: " + calibration.device +
          "\nregion_bytes: " + std::to_string(calibration.region_bytes) +
          "\nhost_allocation: " + std::string(host_allocation_name(calibration.best)) +
          "\n# measured: allocation, seconds to obtain, GB/s at";
  for (const int rows : kCalibrationRows) text += " " + std::to_string(rows);
  text += " rows a gather\n";
  for (const CalibrationEntry& entry : calibration.entries) {
    const std::string name(host_allocation_name(entry.allocation));
    if (!entry.refused.empty()) {
      text += "refused: " + name + " " + entry.refused + "\n";
      continue;
    }
    text += "measured: " + name + " " + number_text(entry.obtain_seconds);
    for (const double rate : entry.gb_per_s) text += " " + number_text(rate);
    text += "\n";
  }
  return text;
}

Calibration parse_calibration(std::string_view text, std::string_view name) {
  Parser parser;
  Line line{.file = name};
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    line.text = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (++line.number == 1) {
      if (line.text != kTitle) line.fail(kTitle, line.text);
    } else if (!line.text.empty() && line.text.front() != '#') {
      parser.take(line);
    }
  }
  if (line.number == 0) line.fail(kTitle, "");
  return std::move(parser).finish(line);
}

Calibration read_calibration(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!std::filesystem::is_regular_file(path) || !(text << file.rdbuf())) {
    throw_error(ErrorCode::kNotFound, "calibration file: expected one that can be read, found ",
                path);
  }
  return parse_calibration(text.str(), path);
}

}  // namespace kvtier
