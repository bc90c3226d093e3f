#include "benchmarks/quality/page_cache.h"

#include "formats/safetensors.h"
#include "include/types/failure.h"
#include "runtime/paging/page_policy.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <unordered_set>

namespace kvtier::quality {
namespace {

template <typename... Parts>
[[noreturn]] void refuse_file(const std::filesystem::path& path, const Parts&... parts) {
  throw_error(ErrorCode::kDataLoss, path.string(), ": expected ", parts...);
}

}  // namespace

bool is_selection_trace(const std::filesystem::path& path) {
  const formats::SafeTensors file = formats::SafeTensors::open(path);
  return file.contains("counts") && file.contains("ids") && file.contains("shape");
}

services::SelectionTrace read_selection_trace(const std::filesystem::path& path) {
  const formats::SafeTensors file = formats::SafeTensors::open(path);
  const formats::Tensor& counts = file.at("counts", DType::kInt32, {-1, -1, -1});
  const formats::Tensor& ids = file.at("ids", DType::kInt32, {-1});
  const std::int32_t* const shape = file.at("shape", DType::kInt32, {3}).as<std::int32_t>();
  services::SelectionTrace recorded{.query_heads = shape[0],
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

std::vector<SelectedSteps> recorded_steps(const services::SelectionTrace& ids) {
  const std::int64_t num_lists = ids.num_lists();
  const std::int64_t group = num_lists / ids.kv_heads;
  std::vector<SelectedSteps> selected;
  for (std::int64_t layer = 0; layer < ids.layers; ++layer) {
    for (std::int64_t head = 0; head < ids.kv_heads; ++head) {
      SelectedSteps& steps = selected.emplace_back();
      for (std::int64_t step = 0; step < ids.steps; ++step) {
        std::vector<std::int32_t>& all = steps.emplace_back();
        for (std::int64_t i = 0; i < group; ++i) {
          const auto& list = ids.lists[static_cast<std::size_t>(
              (layer * ids.steps + step) * num_lists + head * group + i)];
          all.insert(all.end(), list.begin(), list.end());
        }
        std::ranges::sort(all);
        all.erase(std::unique(all.begin(), all.end()), all.end());
      }
    }
  }
  return selected;
}

std::vector<PageCall> page_calls(const std::vector<SelectedSteps>& selected, int kv_heads,
                                 int page_tokens) {
  std::int32_t last = 0;
  for (const SelectedSteps& steps : selected) {
    for (const auto& step : steps) {
      for (const std::int32_t token : step) last = std::max(last, token);
    }
  }
  const std::int32_t layer_pages = last / page_tokens + 1;
  const auto heads = static_cast<std::size_t>(kv_heads);
  std::vector<PageCall> calls;
  for (std::size_t step = 0; !selected.empty() && step < selected[0].size(); ++step) {
    for (std::size_t layer = 0; layer < selected.size() / heads; ++layer) {
      std::map<std::int32_t, std::uint32_t> rows;
      for (std::size_t head = 0; head < heads; ++head) {
        for (const std::int32_t token : selected[layer * heads + head][step]) {
          ++rows[static_cast<std::int32_t>(layer) * layer_pages + token / page_tokens];
        }
      }
      calls.emplace_back(rows.begin(), rows.end());
    }
  }
  return calls;
}

PageDemand page_demand(const std::vector<PageCall>& calls) {
  PageDemand demand;
  std::unordered_set<std::int32_t> pages;
  for (const PageCall& call : calls) {
    demand.needed += std::ssize(call);
    demand.most = std::max<std::int64_t>(demand.most, std::ssize(call));
    for (const auto& [page, rows] : call) pages.insert(page);
  }
  demand.pages = std::ssize(pages);
  return demand;
}

std::int64_t pool_hits(const std::vector<PageCall>& calls, std::int64_t num_frames) {
  using Id = runtime::PageOrder::Id;
  runtime::PageOrder order(static_cast<std::size_t>(num_frames));
  std::unordered_set<Id> here, needed;
  std::int64_t hits = 0;
  for (const PageCall& call : calls) {
    std::vector<Id> missing;
    needed.clear();
    for (const auto& [number, rows] : call) {
      const auto page = static_cast<Id>(number);
      order.use(page, rows);
      needed.insert(page);
      if (!here.contains(page)) missing.push_back(page);
    }
    hits += std::ssize(call) - std::ssize(missing);
    const std::int64_t over = std::ssize(here) + std::ssize(missing) - num_frames;
    if (over > 0) {
      for (const Id page : order.choose(static_cast<std::size_t>(over),
                                        [&](Id id) { return !needed.contains(id); })) {
        order.leave(page);
        here.erase(page);
      }
    }
    for (const Id page : missing) {
      order.enter(page);
      here.insert(page);
    }
  }
  return hits;
}

std::int64_t belady_hits(const std::vector<PageCall>& calls, std::int64_t num_frames) {
  SelectedSteps steps;
  for (const PageCall& call : calls) {
    std::vector<std::int32_t>& pages = steps.emplace_back();
    for (const auto& [page, rows] : call) pages.push_back(page);
  }
  return belady_hits(steps, static_cast<int>(num_frames));
}

}  // namespace kvtier::quality
