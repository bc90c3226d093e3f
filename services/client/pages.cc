#include "services/client/pages.h"

#include "services/grpc_time.h"
#include "services/wire/message_cursor.h"
#include "transfer/tiers/crc32c.h"

#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

namespace kvtier::services {
namespace {

using grpc::internal::RpcMethod;

constexpr std::size_t kHeadBytes = 256;  // of a chunk, at most
constexpr std::size_t kMaxText = 4096;
/// How long a reader asks again and again before it sleeps. A message comes through a Unix socket
/// in parts of 48 KiB, and one that sleeps is woken for each. ReadPages of 64-KiB and 2-MiB pages
/// on 2 cores of an EPYC: 2.8 and 3.3 GB/s for .61 and .55 s of CPU a GB; without it 2.3 and 2.9
/// for .70 and .52; 1 ms changes nothing.
constexpr std::chrono::microseconds kSleepAfter{200};

/// Large enough to be mapped whatever glibc has learnt, and no larger than what it learns from.
constexpr std::size_t kTeachingBytes = std::size_t{31} << 20;

/// gRPC receives into buffers of up to 4 MiB, which glibc gives back to the system with each
/// message, and takes anew, page fault by page fault, with the next. From a mapped block that is
/// freed it learns to keep as much, and up to twice that at the end of its heap; thresholds that
/// the process has set by mallopt or by its environment stay as they are. ReadPages of 64-KiB pages
/// on 2 cores of an EPYC: the client takes .21 s of CPU a GB, .27 without it.
void keep_received_memory() {
  static const bool taught = [] {
    void* volatile block = std::malloc(kTeachingBytes);  // volatile: the pair may not be left out
    std::free(block);
    return true;
  }();
  static_cast<void>(taught);
}

/// A chunk of a ReadPagesResponse; `data` lies in the message.
struct ReadChunk {
  std::uint64_t index = 0;
  std::uint64_t offset = 0;
  bool last = false;
  std::optional<v1::ItemStatus> status;
  std::optional<v1::Page> page;
  ByteRuns data;
};

template <typename Message>
Message message_in(MessageCursor& cursor) {
  Message message;
  if (!message.ParseFromString(cursor.text(kMaxText))) {
    throw Error(ErrorCode::kInternal, "pages: expected a message of the server, found none");
  }
  return message;
}

ReadChunk parse_chunk(const ByteRuns& bytes) {
  using Chunk = v1::ReadPagesResponse::Chunk;
  ReadChunk chunk;
  for (MessageCursor cursor(bytes); cursor.next();) {
    switch (cursor.field()) {
      case Chunk::kIndexFieldNumber:
        chunk.index = cursor.varint();
        break;
      case Chunk::kStatusFieldNumber:
        chunk.status = message_in<v1::ItemStatus>(cursor);
        break;
      case Chunk::kOffsetFieldNumber:
        chunk.offset = cursor.varint();
        break;
      case Chunk::kPageFieldNumber:
        chunk.page = message_in<v1::Page>(cursor);
        break;
      case Chunk::kLastFieldNumber:
        chunk.last = cursor.varint() != 0;
        break;
      case Chunk::kDataFieldNumber:
        chunk.data = cursor.bytes();
        break;
      default:
        cursor.skip();
    }
  }
  return chunk;
}

/// Puts the chunks of one call to their places.
class Arrivals {
 public:
  Arrivals(std::span<const RemotePages::Get> pages, std::span<RemotePages::Result> results)
      : pages_(pages), results_(results), crcs_(pages.size()), sums_(pages.size()) {
    for (RemotePages::Result& result : results_) {
      result = {.code = ErrorCode::kUnavailable, .reason = "NOT_ANSWERED"};
    }
  }

  void take(const grpc::ByteBuffer& message) {
    std::vector<grpc::Slice> slices;
    if (!message.Dump(&slices).ok()) return;
    ByteRuns runs;
    for (const grpc::Slice& slice : slices) {
      runs.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
    }
    for (MessageCursor cursor(runs); cursor.next();) {
      if (cursor.field() == v1::ReadPagesResponse::kChunksFieldNumber) {
        take(parse_chunk(cursor.bytes()));
      } else {
        cursor.skip();
      }
    }
  }

 private:
  void take(const ReadChunk& chunk) {
    const std::size_t i = chunk.index;
    if (i >= pages_.size()) return;
    if (chunk.status && chunk.status->code() != 0) {
      results_[i] = result_of(*chunk.status);
      return;
    }
    if (chunk.page) crcs_[i] = chunk.page->crc32c();
    const std::span<std::byte> to = pages_[i].to;
    std::size_t at = chunk.offset;
    for (const auto& run : chunk.data) {
      if (at > to.size() || run.size() > to.size() - at) {
        results_[i] = {.code = ErrorCode::kInvalidArgument, .reason = "PAGE_TOO_LARGE"};
        return;
      }
      sums_[i] = crc32c_copy(to.subspan(at, run.size()), run, sums_[i]);
      at += run.size();
    }
    if (!chunk.last || results_[i].reason == "PAGE_TOO_LARGE") return;
    if (at == to.size() && sums_[i] == crcs_[i]) {
      results_[i] = {.crc32c = crcs_[i]};
    } else {
      results_[i] = {.code = ErrorCode::kDataLoss, .reason = "CHECKSUM_FAILED"};
    }
  }

  std::span<const RemotePages::Get> pages_;
  std::span<RemotePages::Result> results_;
  std::vector<std::uint32_t> crcs_, sums_;
};

/// The messages of one ReadPages call, read by one thread.
class MessageStream {
 public:
  MessageStream(grpc::Channel& channel, grpc::ClientContext& context,
                const v1::ReadPagesRequest& request)
      : method_("/kvtier.v1.TransferService/ReadPages", RpcMethod::SERVER_STREAMING),
        stream_(grpc::internal::ClientAsyncReaderFactory<grpc::ByteBuffer>::Create(
            &channel, &queue_, method_, &context, request, true, this)) {
    open_ = await();
  }

  /// Returns false at the end.
  [[nodiscard]] bool read(grpc::ByteBuffer& message) {
    if (!open_) return false;
    stream_->Read(&message, this);
    return open_ = await();
  }
  [[nodiscard]] grpc::Status finish() {
    grpc::Status status;
    stream_->Finish(&status, this);
    static_cast<void>(await());
    return status;
  }

 private:
  /// Waits for the only operation under way; returns whether it succeeded.
  bool await() {
    void* tag = nullptr;
    bool succeeded = false;
    const auto sleep_at = std::chrono::steady_clock::now() + kSleepAfter;
    do {
      const gpr_timespec now = gpr_time_0(GPR_CLOCK_MONOTONIC);
      if (queue_.AsyncNext(&tag, &succeeded, now) == grpc::CompletionQueue::GOT_EVENT) {
        return succeeded;
      }
      std::this_thread::yield();  // to the server, where it has no other core
    } while (std::chrono::steady_clock::now() < sleep_at);
    return queue_.Next(&tag, &succeeded) && succeeded;
  }

  grpc::CompletionQueue queue_;
  const RpcMethod method_;
  const std::unique_ptr<grpc::ClientAsyncReader<grpc::ByteBuffer>> stream_;
  bool open_ = false;
};

grpc::ByteBuffer write_message(const std::string& lease, v1::WritePagesRequest::Chunk chunk,
                               std::span<const std::byte> data) {
  std::string fields = chunk.SerializeAsString();
  if (!data.empty()) {
    append_bytes_head(fields, v1::WritePagesRequest::Chunk::kDataFieldNumber, data.size());
  }
  std::string head;
  append_bytes_head(head, v1::WritePagesRequest::kLeaseFieldNumber, lease.size());
  head += lease;
  append_bytes_head(head, v1::WritePagesRequest::kChunksFieldNumber, fields.size() + data.size());
  head += fields;
  const std::array<grpc::Slice, 2> slices{grpc::Slice(head), grpc::Slice(data.data(), data.size())};
  return {slices.data(), data.empty() ? 1U : 2U};
}

}  // namespace

RemotePages::Result result_of(const v1::ItemStatus& status) {
  RemotePages::Result result;
  if (status.code() == 0) return result;
  result.code = static_cast<ErrorCode>(status.code());
  result.reason = status.reason();
  return result;
}

v1::LookupPrefixResponse PageCalls::lookup(std::span<const std::string> hashes,
                                           std::span<const int> layers, bool pin) {
  v1::LookupPrefixRequest request;
  request.set_lease(name());
  for (const std::string& hash : hashes) request.add_hashes(hash);
  for (const int layer : layers) request.add_layers(layer);
  request.set_pin(pin);
  if (pin) request.set_request_id(make_request_id());
  v1::LookupPrefixResponse response;
  connection_.call([&](grpc::ClientContext& context) {
    return connection_.pages().LookupPrefix(&context, request, &response);
  });
  return response;
}

v1::BatchReservePagesResponse PageCalls::reserve(std::span<const RemotePages::Put> pages) {
  v1::BatchReservePagesRequest request;
  request.set_lease(name());
  request.set_request_id(make_request_id());
  for (const RemotePages::Put& page : pages) {
    v1::PageKey& key = *request.add_keys();
    key.set_hash(page.hash);
    key.set_layer(page.layer);
  }
  v1::BatchReservePagesResponse response;
  connection_.call([&](grpc::ClientContext& context) {
    return connection_.pages().BatchReservePages(&context, request, &response);
  });
  return response;
}

v1::WritePagesResponse PageCalls::write(std::span<const RemotePages::Put> pages,
                                        std::span<const std::string> handles) {
  const std::size_t chunk_bytes =
      static_cast<std::size_t>(limits_.max_transfer_bytes()) - kHeadBytes;
  v1::WritePagesResponse response;
  connection_.call_once([&](grpc::ClientContext& context) {
    const RpcMethod method("/kvtier.v1.TransferService/WritePages", RpcMethod::CLIENT_STREAMING);
    const std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> stream(
        grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(&connection_.channel(),
                                                                      method, &context, &response));
    int index = 0;
    bool open = true;
    for (std::size_t i = 0; i < pages.size() && open; ++i) {
      if (handles[i].empty()) continue;
      const std::span<const std::byte> bytes = pages[i].bytes;
      for (std::size_t offset = 0; offset < bytes.size() && open; offset += chunk_bytes) {
        const auto data = bytes.subspan(offset, std::min(chunk_bytes, bytes.size() - offset));
        v1::WritePagesRequest::Chunk chunk;
        chunk.set_index(index);
        if (offset == 0) chunk.set_handle(handles[i]);
        chunk.set_offset(static_cast<std::int64_t>(offset));
        chunk.set_last(offset + data.size() == bytes.size());
        if (chunk.last()) chunk.set_crc32c(crc32c(bytes));
        open = stream->Write(write_message(offset == 0 && index == 0 ? name() : "", chunk, data));
      }
      ++index;
    }
    stream->WritesDone();
    return stream->Finish();
  });
  return response;
}

grpc::Status PageCalls::read_once(grpc::ClientContext& context, const v1::ReadPagesRequest& request,
                                  std::span<const RemotePages::Get> pages,
                                  std::span<RemotePages::Result> results) {
  keep_received_memory();
  MessageStream stream(connection_.channel(), context, request);
  Arrivals arrivals(pages, results);
  grpc::ByteBuffer message;
  while (stream.read(message)) arrivals.take(message);
  return stream.finish();
}

void PageCalls::read(std::span<const RemotePages::Get> pages,
                     std::span<RemotePages::Result> results, VerifiedBy verified_by) {
  v1::ReadPagesRequest request;
  request.set_lease(name());
  for (const RemotePages::Get& page : pages) request.add_handles(page.handle);
  request.set_client_verifies(verified_by == VerifiedBy::kClient);
  connection_.call(
      [&](grpc::ClientContext& context) { return read_once(context, request, pages, results); });
}

void PageCalls::read(std::span<const RemotePages::Get> pages,
                     std::span<RemotePages::Result> results) {
  read(pages, results, VerifiedBy::kClient);
  std::vector<RemotePages::Get> differing;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (results[i].code != ErrorCode::kDataLoss) continue;
    differing.push_back(pages[i]);
    places.push_back(i);
  }
  if (differing.empty()) return;
  std::vector<RemotePages::Result> again(differing.size());
  read(differing, again, VerifiedBy::kBoth);
  for (std::size_t i = 0; i < places.size(); ++i) results[places[i]] = std::move(again[i]);
}

v1::BatchUnpinPagesResponse PageCalls::unpin(std::span<const std::string> handles) {
  v1::BatchUnpinPagesRequest request;
  request.set_lease(name());
  request.set_request_id(make_request_id());
  for (const std::string& handle : handles) request.add_handles(handle);
  v1::BatchUnpinPagesResponse response;
  connection_.call([&](grpc::ClientContext& context) {
    return connection_.pages().BatchUnpinPages(&context, request, &response);
  });
  return response;
}

v1::BatchDeletePagesResponse PageCalls::remove(std::span<const std::string> handles) {
  v1::BatchDeletePagesRequest request;
  request.set_lease(name());
  request.set_request_id(make_request_id());
  for (const std::string& handle : handles) request.add_handles(handle);
  v1::BatchDeletePagesResponse response;
  connection_.call([&](grpc::ClientContext& context) {
    return connection_.pages().BatchDeletePages(&context, request, &response);
  });
  return response;
}

void PageCalls::close() noexcept {
  grpc::ClientContext context;
  context.set_deadline(grpc_deadline(kCloseTime));
  connection_.authorize(context);
  v1::CloseLeaseRequest request;
  request.set_name(name());
  v1::CloseLeaseResponse response;
  // When this fails, the lease runs out.
  (void)connection_.pages().CloseLease(&context, request, &response);
}

}  // namespace kvtier::services
