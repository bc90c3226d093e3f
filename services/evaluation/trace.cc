#include "services/evaluation/trace.h"

#include "include/types/failure.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace kvtier::services {
namespace {

[[noreturn]] void reject(const std::filesystem::path& path, const std::string& tensor,
                         const std::string& expected, const formats::Tensor& found) {
  throw_invalid(path.string() + ": tensor " + tensor, expected, describe(found));
}

void check_layer(const std::filesystem::path& path, const std::string& prefix,
                 const TraceLayer& layer) {
  const formats::Tensor& k = layer.keys;
  const formats::Tensor& q = layer.queries;
  for (const auto& [name, tensor] : {std::pair{"k", &k}, std::pair{"q", &q}}) {
    const bool positive = std::all_of(tensor->shape.begin(), tensor->shape.end(),
                                      [](std::int64_t extent) { return extent > 0; });
    if (tensor->shape.size() != 3 || !positive || tensor->dtype == DType::kInt32) {
      reject(path, prefix + name, "float [heads, tokens, head_dim], none 0", *tensor);
    }
  }
  if (layer.values.shape != k.shape || layer.values.dtype != k.dtype) {
    reject(path, prefix + "v", "as " + prefix + "k, " + describe(k), layer.values);
  }
  if (q.shape[0] % k.shape[0] != 0 || q.shape[2] != k.shape[2] || q.shape[1] > k.shape[1]) {
    reject(path, prefix + "q",
           join("a multiple of ", k.shape[0], " heads, at most ", k.shape[1], " steps, head_dim ",
                k.shape[2]),
           q);
  }
  if (layer.attention.shape != q.shape || layer.attention.dtype == DType::kInt32) {
    reject(path, prefix + "o", "a float tensor shaped as " + prefix + "q, " + describe(q),
           layer.attention);
  }
}

TraceLayer read_layer(const formats::SafeTensors& file, const std::string& prefix,
                      std::string name) {
  TraceLayer layer{std::move(name), file.at(prefix + "k"), file.at(prefix + "v"),
                   file.at(prefix + "q"), file.at(prefix + "o")};
  check_layer(file.path(), prefix, layer);
  return layer;
}

/// Returns N of "layers.N.x".
std::optional<int> layer_number(std::string_view name) {
  constexpr std::string_view kPrefix = "layers.";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int number = 0;
  const char* begin = name.data() + kPrefix.size();
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(begin, end, number);
  if (error != std::errc{} || rest == end || *rest != '.') return std::nullopt;
  return number;
}

}  // namespace

Trace Trace::open(const std::filesystem::path& path) {
  Trace trace(formats::SafeTensors::open(path));
  const formats::SafeTensors& file = trace.file_;
  std::vector<int> numbers;
  for (const auto& [name, tensor] : file.tensors()) {
    if (const std::optional<int> number = layer_number(name)) numbers.push_back(*number);
  }
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  if (numbers.empty()) {
    const auto named = file.metadata().find("layer");
    trace.layers_.push_back(
        read_layer(file, "", named == file.metadata().end() ? "0" : named->second));
  }
  for (const int number : numbers) {
    const std::string prefix = "layers." + std::to_string(number) + ".";
    trace.layers_.push_back(read_layer(file, prefix, std::to_string(number)));
    const TraceLayer& first = trace.layers_.front();
    const TraceLayer& layer = trace.layers_.back();
    if (layer.keys.shape != first.keys.shape || layer.keys.dtype != first.keys.dtype) {
      reject(path, prefix + "k", "as in the first layer, " + describe(first.keys), layer.keys);
    }
    if (layer.queries.shape != first.queries.shape) {
      reject(path, prefix + "q", "as in the first layer, " + describe(first.queries),
             layer.queries);
    }
  }
  return trace;
}

TensorView Trace::by_token(const formats::Tensor& tensor, std::int64_t begin, std::int64_t count) {
  const std::int64_t heads = tensor.shape[0];
  const std::int64_t extent = tensor.shape[1];
  const std::int64_t head_dim = tensor.shape[2];
  const auto offset = static_cast<std::size_t>(begin * head_dim) * dtype_bytes(tensor.dtype);
  TensorView view(tensor.data + offset, tensor.dtype, {count, heads, head_dim});
  view.strides = {head_dim, extent * head_dim, 1, 0};
  return view;
}

}  // namespace kvtier::services
