#pragma once

#include "kvtier/client.h"
#include "kvtier/v1/page.pb.h"
#include "kvtier/v1/transfer.pb.h"

#include "services/client/connection.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvtier::services {

/// A lease, and the streams of TransferService on it. Thread-safe, as its connection is.
class LeasedPages {
 public:
  /// `connection` must outlive this.
  LeasedPages(Connection& connection, const v1::OpenLeaseResponse& opened)
      : connection_(connection), lease_(opened.lease()), limits_(opened.limits()) {}

  [[nodiscard]] const std::string& name() const noexcept { return lease_.name(); }
  [[nodiscard]] std::int64_t page_bytes() const noexcept { return lease_.page_bytes(); }
  [[nodiscard]] std::size_t batch_pages() const noexcept {
    return static_cast<std::size_t>(limits_.max_batch_pages());
  }

  /// Writes the pages that have a handle.
  [[nodiscard]] v1::WritePagesResponse write(std::span<const RemotePages::Put> pages,
                                             std::span<const std::string> handles);
  /// Reads pages to their places and compares their checksums; fills `results`. Those that differ
  /// are read once more, compared by the server too, which does not serve a damaged page again.
  /// `stale_reads` of them were stale in shared memory.
  void read(std::span<const RemotePages::Get> pages, std::span<RemotePages::Result> results,
            std::size_t stale_reads);

 private:
  enum class VerifiedBy : bool { kClient, kBoth };

  void read(std::span<const RemotePages::Get> pages, std::span<RemotePages::Result> results,
            VerifiedBy verified_by, std::size_t stale_reads = 0);

  Connection& connection_;
  const v1::PageLease lease_;
  const v1::PageLimits limits_;
};

/// Returns what an item's status says.
[[nodiscard]] RemotePages::Result result_of(const v1::ItemStatus& status);

}  // namespace kvtier::services
