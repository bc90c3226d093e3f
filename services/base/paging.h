#pragma once

#include <cstdint>
#include <string>

namespace kvtier::services {

/// Returns the items of a page: `asked`, or 100 for 0. Throws INVALID_ARGUMENT outside 0 to 1000.
[[nodiscard]] int page_size_of(int asked);
/// Returns where a page starts: 0 for an empty token. Throws INVALID_ARGUMENT for one that the
/// server has not made.
[[nodiscard]] std::uint32_t page_start_of(const std::string& token);

}  // namespace kvtier::services
