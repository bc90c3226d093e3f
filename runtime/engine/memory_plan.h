#pragma once

#include "kvtier/config.h"

#include "attention/flash_decode.h"
#include "scoring/selector.h"
#include "transfer/kv/sequence.h"
#include "transfer/row_cache/row_cache.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// How large the parts of an engine and of a session are, from the configuration alone.
namespace kvtier::runtime {

[[nodiscard]] transfer::KvGeometry geometry_of(const Config& config);
/// The sketches that every session carries, the one of `retrieval` first.
[[nodiscard]] std::vector<SketchConfig> carried_sketches(const Config& config);
/// Layers that select by score, unless a call says otherwise.
[[nodiscard]] std::int64_t num_sparse_layers(const Config& config);
/// Bytes of all carried sketches of one token of one layer.
[[nodiscard]] std::size_t sketch_token_bytes(const Config& config);

/// Bytes of the checks of rows that CUDA keeps on the device, where they have room: one of each row
/// of the pages in host memory.
[[nodiscard]] std::size_t frame_check_bytes(const Config& config, Backend backend);

/// The workspace of one call.
struct WorkspacePlan {
  scoring::SelectorLimits selector;
  attention::FlashDecodeLimits flash;
  std::int64_t append_tokens = 0;  ///< Tokens packed at a time.
  std::int64_t selected_rows = 0;  ///< Most rows of a (query, KV head) by `Config::retrieval`.
  std::size_t packed_bytes = 0;
  std::size_t query_bytes = 0;
  std::size_t bytes = 0;  ///< Of all parts.
};
/// Plans one of at most half of `device_bytes`, with fewer queries at a time and fewer staged rows
/// where more do not fit. Throws `kResourceExhausted` where one query does not.
[[nodiscard]] WorkspacePlan plan_workspace(const Config& config, Backend backend);

/// Rows of a list up to which cached ones are attended in their slots, beside the gather, which
/// leaves attention half of the blocks. H200, 1,048,576 tokens, .8 found, against copying: 180 us
/// and 188 for 2,048 rows, 885 and 850 for 31,776.
inline constexpr std::int64_t kMostPlacedRows = 8192;
/// Returns whether cached rows are attended where they are.
[[nodiscard]] bool places_rows(const Config& config, Backend backend,
                               const WorkspacePlan& workspace);

/// Sizes of the pools on the device.
struct DevicePools {
  std::int64_t sketch_tokens = 0;  ///< In whole slabs, of one layer each.
  std::int64_t page_tokens = 0;    ///< With pages on the device.
  /// Of `sketch_tokens`, those that come before the row cache.
  std::int64_t first_tokens = 0;
  int row_cache_rows = 0;  ///< Per KV head of a session's layer; 0: no row cache.
  std::size_t row_cache_bytes = 0;
  std::size_t row_cache_budget = 0;  ///< Of `device_bytes`: for it, and what steps keep beside it.
  std::size_t factor_bytes = 0;      ///< Of `device_bytes`: copies of the factors of int8 rows.
};
/// Divides what `device_bytes` has beside `fixed` bytes: pages and sketches with pages on the
/// device; else sketches of the tokens of a layer that the pages hold, those in tiers included,
/// then the row cache unless `row_cache_bytes` says its size, then the factors of int8 rows in all
/// frames, which the row cache reads, then more sketches for sequences that leave slabs
/// part-filled.
[[nodiscard]] DevicePools plan_pools(const Config& config, Backend backend,
                                     const WorkspacePlan& workspace, std::size_t fixed);

/// "9.0 GiB"
[[nodiscard]] std::string show_bytes(std::size_t bytes);
/// "9216 MiB"
[[nodiscard]] std::string show_mebibytes(std::size_t bytes);

}  // namespace kvtier::runtime
