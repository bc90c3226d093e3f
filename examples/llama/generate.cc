#include "llama/generate.h"

#include "include/types/failure.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>

namespace kvtier::llama {

std::vector<std::int32_t> parse_ids(const std::string& text) {
  std::string list = text;
  if (text.starts_with('@')) {
    std::ifstream file(text.substr(1));
    if (file.peek(); file.bad() || !file.is_open()) {
      throw_error(ErrorCode::kNotFound, "--prompt-ids: expected a readable file, found ",
                  text.substr(1));
    }
    list.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  constexpr const char* kSeparators = ", \t\r\n";
  std::vector<std::int32_t> ids;
  for (std::size_t at = list.find_first_not_of(kSeparators); at != std::string::npos;) {
    const std::size_t end = std::min(list.find_first_of(kSeparators, at), list.size());
    std::int32_t id = 0;
    const auto [stop, error] = std::from_chars(list.data() + at, list.data() + end, id);
    if (error != std::errc() || stop != list.data() + end || id < 0) {
      throw_invalid("--prompt-ids", "token ids", '"' + list.substr(at, end - at) + '"');
    }
    ids.push_back(id);
    at = list.find_first_not_of(kSeparators, end);
  }
  if (ids.empty()) throw_invalid("--prompt-ids", "at least one id", "none");
  return ids;
}

std::vector<std::int32_t> generate(Decoder& decoder, const GenerateOptions& options,
                                   const std::function<void(std::int32_t)>& on_token) {
  const std::int64_t last = decoder.config().vocab_size - 1;
  for (const std::int32_t id : options.prompt) {
    if (id < 0 || id > last) throw_invalid("--prompt-ids", join("ids of 0 to ", last), id);
  }
  const auto prompt = static_cast<std::int64_t>(options.prompt.size());
  Method method = options.method;
  AttendOptions attend;
  if (method.dense) {
    attend.mode = LayerMode::kDense;
  } else {
    method.retrieval.sparsity = method.sparsity;
    attend.retrieval = &method.retrieval;
  }
  const std::int64_t capacity = prompt + options.max_tokens;
  const auto store = make_kv_store(
      engine_config(decoder.config(), options.runtime, {method}, capacity), options.runtime.kv);
  const std::unique_ptr<KvSession> session = store->open(capacity);
  const std::span<const std::int32_t> tokens = options.prompt;
  decoder.prefill(*session, tokens.first(tokens.size() - 1));

  std::vector<std::int32_t> result;
  std::int32_t token = options.prompt.back();
  const std::vector<std::int32_t>& ends = decoder.config().eos_tokens;
  for (std::int64_t i = 0; i < options.max_tokens; ++i) {
    const std::vector<float> logits = decoder.decode(*session, {&token, 1}, attend);
    token =
        static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    result.push_back(token);
    if (on_token) on_token(token);
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) break;
  }
  return result;
}

}  // namespace kvtier::llama
