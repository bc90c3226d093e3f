#pragma once

#include "services/client/data_channel.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
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

/// A page to write, whose handle a lease has reserved.
struct PageWrite {
  std::string_view handle;
  std::span<const std::byte> from;
  bool done = false;  ///< Set when the page is committed.
  /// Set instead when another client had committed a page of this key: that one is kept, and
  /// `handle` names nothing any more.
  bool existed = false;
  bool durable = false;   ///< The server's disk has it.
  std::uint32_t crc = 0;  ///< CRC-32C of `from`, once it was sent.
};

/// Writes pages by way of the staging region of `channel`; without one, none. The server takes one
/// half of the region while the other is filled. A page that is neither done nor existed does not
/// fit, or was refused: write it another way, whose error says why. Throws `ClientError` when the
/// channel breaks or the lease has ended; what is done stays, and what is not may be done.
void write_shared(DataChannel& channel, const std::string& lease, std::span<PageWrite> pages);

}  // namespace kvtier::services
