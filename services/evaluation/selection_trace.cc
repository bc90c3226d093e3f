#include "services/evaluation/selection_trace.h"

#include "formats/safetensors.h"
#include "include/types/failure.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

namespace kvtier::services {
namespace {

formats::Tensor int32_tensor(const std::vector<std::int32_t>& values,
                             std::vector<std::int64_t> shape) {
  return {.dtype = DType::kInt32,
          .shape = std::move(shape),
          .data = reinterpret_cast<const std::byte*>(values.data()),
          .bytes = values.size() * sizeof(std::int32_t)};
}

template <typename... Parts>
[[noreturn]] void refuse_file(const std::filesystem::path& path, const Parts&... parts) {
  throw_error(ErrorCode::kDataLoss, path.string(), ": expected ", parts...);
}

}  // namespace

bool SelectionTrace::is_in(const std::filesystem::path& path) {
  const formats::SafeTensors file = formats::SafeTensors::open(path);
  return file.contains("counts") && file.contains("ids") && file.contains("shape");
}

SelectionTrace SelectionTrace::read(const std::filesystem::path& path) {
  const formats::SafeTensors file = formats::SafeTensors::open(path);
  const formats::Tensor& counts = file.at("counts", DType::kInt32, {-1, -1, -1});
  const formats::Tensor& ids = file.at("ids", DType::kInt32, {-1});
  const std::int32_t* const shape = file.at("shape", DType::kInt32, {3}).as<std::int32_t>();
  SelectionTrace recorded{.query_heads = shape[0],
                          .kv_heads = shape[1],
                          .context = shape[2],
                          .layers = counts.shape[0],
                          .steps = counts.shape[1],
                          .lists = {}};
  const bool heads = recorded.kv_heads > 0 && recorded.query_heads % recorded.kv_heads == 0;
  if (!heads || counts.elements() == 0 ||
      (counts.shape[2] != recorded.kv_heads && counts.shape[2] != recorded.query_heads)) {
    refuse_file(path, "a list for each of the KV heads or the query heads, found ", counts.shape[2],
                " for ", shape[1], " and ", shape[0]);
  }
  std::span<const std::int32_t> left(ids.as<std::int32_t>(),
                                     static_cast<std::size_t>(ids.elements()));
  for (std::int64_t i = 0; i < counts.elements(); ++i) {
    const std::int32_t count = counts.as<std::int32_t>()[i];
    if (count < 0 || static_cast<std::size_t>(count) > left.size()) {
      refuse_file(path, "as many ids as are counted, found ", ids.elements());
    }
    const auto list = left.first(static_cast<std::size_t>(count));
    if (!std::ranges::is_sorted(list) || (count > 0 && list.front() < 0)) {
      refuse_file(path, "rising ids from 0 on in list ", i);
    }
    recorded.lists.emplace_back(list.begin(), list.end());
    left = left.subspan(list.size());
  }
  if (!left.empty()) {
    refuse_file(path, "no ids after those that are counted, found ", left.size());
  }
  return recorded;
}

void SelectionTrace::write(const std::filesystem::path& path) const {
  std::vector<std::int32_t> counts, ids;
  for (const std::vector<std::int32_t>& list : lists) {
    counts.push_back(static_cast<std::int32_t>(list.size()));
    ids.insert(ids.end(), list.begin(), list.end());
  }
  const std::vector<std::int32_t> shape = {static_cast<std::int32_t>(query_heads),
                                           static_cast<std::int32_t>(kv_heads),
                                           static_cast<std::int32_t>(context)};
  formats::write_safetensors(path,
                             {{"counts", int32_tensor(counts, {layers, steps, num_lists()})},
                              {"ids", int32_tensor(ids, {static_cast<std::int64_t>(ids.size())})},
                              {"shape", int32_tensor(shape, {3})}});
}

}  // namespace kvtier::services
