#pragma once

#include "kvtier/v1/transfer.pb.h"

#include "services/page_cache/page_store.h"
#include "services/wire/message_pieces.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// What TransferService does, without its transport.
namespace kvtier::services {

/// One chunk of a WritePagesRequest; `data` lies in the message.
struct WriteChunk {
  v1::WritePagesRequest::Chunk fields;  ///< Without the data.
  ByteRuns data;
};

struct WriteMessage {
  std::string lease;
  std::vector<WriteChunk> chunks;
};

/// Writes what the store knows of a page into its message.
void fill_page(const PageInfo& from, v1::Page& to);
/// Says of the pages in `items` whether they are durable by now.
void set_durable(TenantPages& pages, google::protobuf::RepeatedPtrField<v1::PageResult>& items);

/// Reads a WritePagesRequest without copying its data. Throws `kInvalidArgument` where it is none,
/// and `ServiceError` for numbers below 0 and names that are too long.
[[nodiscard]] WriteMessage parse_write_message(const ByteRuns& message);

/// One WritePages call. Used by one thread at a time.
class PageWriter {
 public:
  explicit PageWriter(PageStore& store)
      : transfer_(store.transfers(), TransferPlane::kGrpc, TransferDirection::kWrite) {}

  /// Writes the chunks of a message. What goes wrong with a page is kept for its result; throws
  /// INVALID_ARGUMENT for indices out of order and more pages than `max_pages`.
  void write(PageLease& lease, const WriteMessage& message, int max_pages);
  /// Calls `act` when what was written is settled, as `TenantPages::when_settled`.
  void when_settled(std::function<void()> act) const;
  /// Returns the results of all pages: those that have no last chunk are PAGE_INCOMPLETE.
  /// `when_settled` comes before.
  [[nodiscard]] v1::WritePagesResponse finish();

 private:
  void write_chunk(PageLease& lease, const WriteChunk& chunk);
  void end_incomplete();

  Transfer transfer_;
  v1::WritePagesResponse response_;
  TenantPages* pages_ = nullptr;  ///< Of the lease; null: nothing was written.
  std::string handle_;            ///< Of the last page.
  bool ended_ = false;            ///< Committed or failed.
};

/// A piece of a ReadPagesResponse: `head`, then `data`, which `page` keeps in place.
struct ReadPiece {
  std::string head;
  std::span<const std::byte> data{};
  std::shared_ptr<const PinnedPage> page;
};

/// One ReadPages call. Used by one thread at a time.
class PageReader {
 public:
  PageReader(PageStore& store, const Tenant& tenant, const v1::ReadPagesRequest& request)
      : store_(store),
        transfer_(store.transfers(), TransferPlane::kGrpc, TransferDirection::kRead),
        tenant_(tenant),
        handles_(request.handles().begin(), request.handles().end()),
        verify_(request.client_verifies() ? Verify::kNo : Verify::kYes) {}

  /// Returns the next message of at most `max_bytes`, a little more for heads, or nothing at the
  /// end.
  [[nodiscard]] std::vector<ReadPiece> next(std::size_t max_bytes);

 private:
  [[nodiscard]] ReadPiece next_piece(std::size_t max_bytes);

  PageStore& store_;
  Transfer transfer_;
  const Tenant& tenant_;
  const std::vector<std::string> handles_;
  const Verify verify_;
  std::size_t index_ = 0;
  std::size_t offset_ = 0;
  std::shared_ptr<const PinnedPage> page_;  ///< Being read.
};

}  // namespace kvtier::services
