#include "llama/tasks.h"

#include "include/types/failure.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace kvtier::llama {

namespace {

/// Answers of three tokens, then three frequent words, at the positions of the file.
void read_positions(const formats::Tensor& tensor, TaskCase& task) {
  task.answers.assign(tensor.as<std::int32_t>(), tensor.as<std::int32_t>() + tensor.elements());
  std::int64_t previous = task.context;
  bool ascending = task.context >= 1;
  for (const std::int64_t position : task.answers) {
    ascending = ascending && position > previous;
    previous = position;
  }
  if (!ascending || previous >= task.length || task.answers.size() < 6 ||
      task.answers.size() % 3 != 0) {
    throw_error(
        ErrorCode::kDataLoss, task.name,
        ".answer_positions: expected at least 6, in threes, ascending, after the context of ",
        task.context, " and below ", task.length, ", found ", task.answers.size(), " up to ",
        previous);
  }
  task.answer_tokens.assign(task.answers.size() / 3 - 1, 3);
}

/// Answers of any length, each token with the number of its answer.
void read_marks(const formats::Tensor& tensor, TaskCase& task) {
  if (task.context < 1 || tensor.elements() != task.tail()) {
    throw_error(ErrorCode::kDataLoss, task.name, ".answers: expected a number for each of ",
                task.tail(), " tokens after a context, found ", tensor.elements());
  }
  for (std::int64_t i = 0; i < task.tail(); ++i) {
    const std::int32_t mark = tensor.as<std::int32_t>()[i];
    if (mark == 0) continue;
    const std::int64_t last = task.queries();
    // The logits that predict the first token are the context's.
    if (i == 0 || mark < std::max<std::int64_t>(1, last) || mark > last + 1) {
      throw_error(ErrorCode::kDataLoss, task.name,
                  ".answers: expected numbers from 1 in order, none on the first token, found ",
                  mark, " after ", last);
    }
    if (mark > last) task.answer_tokens.push_back(0);
    ++task.answer_tokens.back();
    task.answers.push_back(task.context + i);
  }
  if (task.answers.empty()) {
    throw_error(ErrorCode::kDataLoss, task.name, ".answers: expected at least one, found none");
  }
}

}  // namespace

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
    throw_error(ErrorCode::kNotFound, "case: expected one of ", known, ", found ", name);
  }
  const formats::Tensor& tokens = file_.at(name + ".tokens", DType::kInt32, {-1, -1});
  const auto text = file_.metadata().find(name);

  TaskCase result;
  result.name = name;
  result.sequences = tokens.shape[0];
  result.length = tokens.shape[1];
  result.tokens = tokens.as<std::int32_t>();
  result.metadata = text == file_.metadata().end() ? "" : text->second;
  result.context = std::llround(metadata_number(result.metadata, "context"));

  if (file_.contains(name + ".answers")) {
    const std::string kind = metadata_word(result.metadata, "kind");
    result.kind = kind.empty() ? "answers" : kind;
    read_marks(file_.at(name + ".answers", DType::kInt32, {-1}), result);
  } else {
    result.kind = "needle-llama";
    read_positions(file_.at(name + ".answer_positions", DType::kInt32, {-1}), result);
  }
  return result;
}

std::string metadata_word(const std::string& text, const std::string& key) {
  const std::size_t at = (" " + text).find(" " + key + "=");
  if (at == std::string::npos) return {};
  const std::size_t begin = at + key.size() + 1;
  return text.substr(begin, text.find(' ', begin) - begin);
}

double metadata_number(const std::string& text, const std::string& key) {
  const std::string word = metadata_word(text, key);
  char* end = nullptr;
  const double value = std::strtod(word.c_str(), &end);
  if (end == word.c_str()) {
    throw_error(ErrorCode::kDataLoss, "metadata: expected ", key, "=NUMBER, found \"", text, "\"");
  }
  return value;
}

}  // namespace kvtier::llama
