#include "services/metrics/exposition.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string_view>

namespace kvtier::services {
namespace {

[[noreturn]] void fail(int line, const std::string& expected) {
  throw Error(ErrorCode::kInvalidArgument,
              "metrics, line " + std::to_string(line) + ": expected " + expected);
}

/// Reads one sample: name{label="value",...} value.
class LineReader {
 public:
  LineReader(std::string_view text, int line) : text_(text), line_(line) {}

  std::string name() {
    const std::size_t end = text_.find_first_of("{ ", at_);
    if (end == std::string_view::npos || end == at_) fail(line_, "a name and a value");
    return take(end);
  }
  Exposition::LabelSet labels() {
    Exposition::LabelSet labels;
    if (peek() != '{') return labels;
    ++at_;
    while (peek() != '}') {
      const std::size_t equals = text_.find('=', at_);
      if (equals == std::string_view::npos) fail(line_, "a label");
      std::string label = take(equals);
      at_ = equals + 1;
      labels[std::move(label)] = quoted();
      if (peek() == ',') ++at_;
    }
    ++at_;
    return labels;
  }
  double value() {
    const std::string number(text_.substr(std::min(text_.size(), at_)));
    char* end = nullptr;
    const double value = std::strtod(number.c_str(), &end);  // knows +Inf and NaN
    if (end == number.c_str()) fail(line_, "a number");
    return value;
  }

 private:
  [[nodiscard]] char peek() const {
    if (at_ >= text_.size()) fail(line_, "more");
    return text_[at_];
  }
  std::string take(std::size_t end) {
    const std::size_t begin = at_;
    at_ = end;
    return std::string(text_.substr(begin, end - begin));
  }
  std::string quoted() {
    std::string value;
    if (peek() != '"') fail(line_, "a value in quotes");
    for (++at_; peek() != '"'; ++at_) {
      if (peek() != '\\') {
        value += peek();
        continue;
      }
      ++at_;
      value += peek() == 'n' ? '\n' : peek();
    }
    ++at_;
    return value;
  }

  std::string_view text_;
  int line_;
  std::size_t at_ = 0;
};

bool matches(const Exposition::LabelSet& labels, const Exposition::LabelSet& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&labels](const auto& entry) {
    const auto it = labels.find(entry.first);
    return it != labels.end() && it->second == entry.second;
  });
}

}  // namespace

Exposition Exposition::parse(const std::string& text) {
  Exposition parsed;
  std::istringstream in(text);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.empty() || line.starts_with('#')) continue;
    LineReader reader(line, number);
    std::string name = reader.name();
    Sample sample;
    sample.labels = reader.labels();
    sample.value = reader.value();
    parsed.samples_[std::move(name)].push_back(std::move(sample));
  }
  return parsed;
}

double Exposition::sum(const std::string& name, const LabelSet& labels) const {
  const auto it = samples_.find(name);
  double total = 0;
  if (it == samples_.end()) return total;
  for (const Sample& sample : it->second) {
    if (matches(sample.labels, labels)) total += sample.value;
  }
  return total;
}

std::vector<std::string> Exposition::values(const std::string& name,
                                            const std::string& label) const {
  const auto it = samples_.find(name);
  std::set<std::string> values;
  if (it != samples_.end()) {
    for (const Sample& sample : it->second) {
      const auto found = sample.labels.find(label);
      if (found != sample.labels.end()) values.insert(found->second);
    }
  }
  return {values.begin(), values.end()};
}

std::map<double, double> Exposition::buckets(const std::string& name,
                                             const LabelSet& labels) const {
  std::map<double, double> counts;
  const auto it = samples_.find(name + "_bucket");
  if (it == samples_.end()) return counts;
  for (const Sample& sample : it->second) {
    const auto bound = sample.labels.find("le");
    if (bound == sample.labels.end() || !matches(sample.labels, labels)) continue;
    counts[std::strtod(bound->second.c_str(), nullptr)] += sample.value;
  }
  return counts;
}

std::optional<double> Exposition::quantile(const Exposition& before, const std::string& name,
                                           const LabelSet& labels, double q) const {
  std::map<double, double> counts = buckets(name, labels);
  for (const auto& [bound, count] : before.buckets(name, labels)) counts[bound] -= count;
  if (counts.empty() || counts.rbegin()->second <= 0) return std::nullopt;
  const double wanted = q * counts.rbegin()->second;
  const auto it = std::find_if(counts.begin(), counts.end(),
                               [wanted](const auto& entry) { return entry.second >= wanted; });
  return it->first;
}

}  // namespace kvtier::services
