#pragma once

#include "services/client/data_channel.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvtier::services {

/// A page to read, to memory of its size.
struct PageRead {
  std::string_view handle;
  std::span<std::byte> to;
  bool done = false;      ///< Set when `to` has the page as it was committed.
  std::uint32_t crc = 0;  ///< Set with it: what the server has as its CRC-32C.
  bool stale = false;     ///< Set when the page had left the place where the server said it was.
};

/// Reads pages out of the arena that `channel` has mapped; without one, none. The server is asked
/// where they are, a batch ahead of the copies. A page that is not done is missing, of another
/// size, has gone meanwhile or, with `verify`, fails its checksum: ask by another way why. Large
/// reads pass the cache by, which they would only empty. Throws `ClientError` when the channel
/// breaks; what is done stays.
void read_shared(DataChannel& channel, std::span<PageRead> pages, bool verify);

}  // namespace kvtier::services
