#include "tests/services/metrics/exposition.h"

#include "kvtier/error.h"

#include <algorithm>
#include <cstdlib>
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
  MetricsReading::LabelSet labels() {
    MetricsReading::LabelSet labels;
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

}  // namespace

MetricsReading read_exposition(const std::string& text) {
  MetricsReading reading;
  std::istringstream in(text);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.empty() || line.starts_with('#')) continue;
    LineReader reader(line, number);
    const std::string name = reader.name();
    MetricsReading::LabelSet labels = reader.labels();
    reading.add(name, std::move(labels), reader.value());
  }
  return reading;
}

}  // namespace kvtier::services
