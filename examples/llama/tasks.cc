#include "llama/tasks.h"

#include "kvtier/error.h"

#include <cmath>
#include <cstdlib>

namespace kvtier::llama {

TaskFile::TaskFile(const std::filesystem::path& path) : file_(formats::SafeTensors::open(path)) {}

std::vector<std::string> TaskFile::names() const {
  constexpr std::string_view kSuffix = ".tokens";
  std::vector<std::string> names;
  for (const auto& [name, tensor] : file_.tensors()) {
    if (name.ends_with(kSuffix)) names.push_back(name.substr(0, name.size() - kSuffix.size()));
  }
  return names;
}

TaskCase TaskFile::at(const std::string& name) const {
  if (!file_.contains(name + ".tokens")) {
    std::string known;
    for (const std::string& other : names()) known += (known.empty() ? "" : ", ") + other;
    throw Error(ErrorCode::kNotFound, "case: expected one of " + known + ", found " + name);
  }
  const formats::Tensor& tokens = file_.at(name + ".tokens", DType::kInt32, {-1, -1});
  const formats::Tensor& answers = file_.at(name + ".answer_positions", DType::kInt32, {-1});
  const auto text = file_.metadata().find(name);

  TaskCase result;
  result.name = name;
  result.sequences = tokens.shape[0];
  result.length = tokens.shape[1];
  result.tokens = tokens.as<std::int32_t>();
  result.answers.assign(answers.as<std::int32_t>(),
                        answers.as<std::int32_t>() + answers.elements());
  result.metadata = text == file_.metadata().end() ? "" : text->second;
  result.context = std::llround(metadata_number(result.metadata, "context"));

  std::int64_t previous = result.context;
  bool ascending = result.context >= 1;
  for (const std::int64_t position : result.answers) {
    ascending = ascending && position > previous;
    previous = position;
  }
  if (!ascending || previous >= result.length || result.answers.size() < 6 ||
      result.answers.size() % 3 != 0) {
    throw Error(ErrorCode::kDataLoss,
                name +
                    ".answer_positions: expected at least 6, in threes, ascending, after the "
                    "context of " +
                    std::to_string(result.context) + " and below " + std::to_string(result.length) +
                    ", found " + std::to_string(result.answers.size()) + " up to " +
                    std::to_string(previous));
  }
  return result;
}

double metadata_number(const std::string& text, const std::string& key) {
  const std::size_t at = (" " + text).find(" " + key + "=");
  const char* begin = at == std::string::npos ? "" : text.c_str() + at + key.size() + 1;
  char* end = nullptr;
  const double value = std::strtod(begin, &end);
  if (end == begin) {
    throw Error(ErrorCode::kDataLoss,
                "metadata: expected " + key + "=NUMBER, found \"" + text + "\"");
  }
  return value;
}

}  // namespace kvtier::llama
