#pragma once

#include "services/base/tenants.h"
#include "services/page_cache/page_store.h"
#include "services/wire/frame.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvtier::services {

class DataConnection;

/// A request for many pages, executed in parts, so that one client's does not keep a thread from
/// others and waits while its replies are not read.
class PageJob {
 public:
  virtual ~PageJob() = default;
  /// Does a part: some thousand look-ups, or a few MiB. Returns whether that was the last.
  [[nodiscard]] virtual bool step(DataConnection& connection) = 0;
};

/// What a job is to do, of what all jobs have.
struct PageRequest {
  PageStore& pages;
  const Tenant& tenant;
  const FrameHeader& header;
  std::shared_ptr<void> charge;  ///< Kept until all replies are written.
  bool shares_memory;            ///< With the client.
};

/// Answers kReadPages: where the pages are in the read arena, or with kInline their bytes, in as
/// many frames as it takes, all but the last with kMore. A page that cannot be read is answered
/// with the code of its error; one that has been evicted is NOT_FOUND.
[[nodiscard]] std::unique_ptr<PageJob> make_read_job(const PageRequest& request,
                                                     std::vector<PageDescriptor> descriptors);

/// Returns how many of the first of these pages are written in one step from a source of so many
/// bytes.
[[nodiscard]] std::size_t pages_of_step(std::span<const PageDescriptor> pages,
                                        std::uint64_t source_bytes);

/// Answers kWritePages: copies pages from `source` and commits them, each by itself. `keep` is held
/// as long. Throws as `PageStore::find`.
[[nodiscard]] std::unique_ptr<PageJob> make_write_job(const PageRequest& request, WriteBody body,
                                                      std::span<const std::byte> source,
                                                      std::shared_ptr<void> keep);

}  // namespace kvtier::services
