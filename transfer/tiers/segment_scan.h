#pragma once

#include "transfer/tiers/segment.h"

#include <memory>
#include <span>
#include <vector>

namespace kvtier::tiers {

/// The pages of each segment, in the order of their records, later ones counting. Sets its `end`
/// and `durable_end`. Reads the headers, and the pages of records that may have been written while
/// the machine stopped; those that are not whole are overwritten as dead and left out. A header
/// that is not whole is skipped, up to the next one. Marks a segment doubtful when the disk fails.
/// Runs on several threads.
[[nodiscard]] std::vector<std::vector<RecordHeader>> scan_segments(
    std::span<const std::shared_ptr<Segment>> segments);

}  // namespace kvtier::tiers
