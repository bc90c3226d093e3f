#include "services/evaluation/selection_trace.h"

#include "formats/safetensors.h"

#include <cstddef>
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

}  // namespace

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
