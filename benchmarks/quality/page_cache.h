#pragma once

#include "benchmarks/quality/row_cache.h"
#include "services/evaluation/selection_trace.h"

#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

/// Recorded token ids, and replays of selected ones against the page pool.
namespace kvtier::quality {

/// The pages that one call needs, rising, and the rows of each that it reads.
using PageCall = std::vector<std::pair<std::int32_t, std::uint32_t>>;

/// Returns whether a file has recorded ids. Throws as `SafeTensors::open`.
[[nodiscard]] bool is_selection_trace(const std::filesystem::path& path);

/// Reads recorded ids. Throws as `SafeTensors::open`, and `kDataLoss` when counts, ids and heads do
/// not go together.
[[nodiscard]] services::SelectionTrace read_selection_trace(const std::filesystem::path& path);

/// Returns recorded ids as `select_steps` returns those of a trace: of query heads the union over a
/// KV head's.
[[nodiscard]] std::vector<SelectedSteps> recorded_steps(const services::SelectionTrace& ids);

/// What the steps of a session need of pages of `page_tokens` tokens: a call for each layer of each
/// step, in that order. `selected`: `[layer * kv_heads + kv_head]`, a page has the rows of all KV
/// heads. Pages of different layers have different numbers.
[[nodiscard]] std::vector<PageCall> page_calls(const std::vector<SelectedSteps>& selected,
                                               int kv_heads, int page_tokens);

/// Number of pages that calls need, one needed by n calls counting n times; of different pages; and
/// the most of one call.
struct PageDemand {
  std::int64_t needed = 0;
  std::int64_t pages = 0;
  std::int64_t most = 0;
};
[[nodiscard]] PageDemand page_demand(const std::vector<PageCall>& calls);

/// Pages that calls find in `num_frames` frames, empty at first, at least as many as one call
/// needs. All pages of a call are there together, as the page pool has them.
[[nodiscard]] std::int64_t pool_hits(const std::vector<PageCall>& calls, std::int64_t num_frames);

/// Most pages that any choice finds: `belady_hits` of the calls' pages.
[[nodiscard]] std::int64_t belady_hits(const std::vector<PageCall>& calls, std::int64_t num_frames);

}  // namespace kvtier::quality
