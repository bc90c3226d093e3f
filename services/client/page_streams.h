#pragma once

#include "kvtier/client.h"
#include "kvtier/v1/page.pb.h"
#include "kvtier/v1/transfer.pb.h"

#include "services/client/connection.h"

#include <grpcpp/support/status.h>

#include <cstddef>
#include <span>
#include <string>

namespace kvtier::services {

/// A read of pages of one lease to their places.
struct PagesToRead {
  const std::string& lease;
  std::span<const RemotePages::Get> pages;
  bool server_compares = false;  ///< Checksums, beside the client, which always does.
  std::size_t stale_reads = 0;   ///< How many of them were stale in shared memory.
};

/// Reads pages and compares their checksums; `results` has an element for each. A large read is
/// divided among streams that run at a time, a connection each, as far as the client's options and
/// the connections that there are permit; the calling thread receives them all. A part that the
/// server, or its connection, cannot take is read once more when the others are through, over the
/// connection of all calls: what is admitted as one read is not refused because it comes as
/// several. Any other failure of a stream ends them all. They have one deadline, and have all ended
/// when this returns the status that one stream would have had. Throws `kInternal` for messages
/// that no server sends.
[[nodiscard]] grpc::Status read_pages(Connection& connection, const PagesToRead& read,
                                      std::span<RemotePages::Result> results);
/// Writes the pages that have a handle, over the connection of all calls.
[[nodiscard]] v1::WritePagesResponse write_pages(Connection& connection,
                                                 const v1::OpenLeaseResponse& lease,
                                                 std::span<const RemotePages::Put> pages,
                                                 std::span<const std::string> handles);
/// Returns what an item's status says.
[[nodiscard]] RemotePages::Result result_of(const v1::ItemStatus& status);

}  // namespace kvtier::services
