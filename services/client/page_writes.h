#pragma once

#include "services/client/data_channel.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kvtier::services {

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
