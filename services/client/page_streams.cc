#include "services/client/page_streams.h"

#include "services/wire/grpc_time.h"
#include "services/wire/message_pieces.h"
#include "transfer/tiers/crc32c.h"

#include <grpcpp/completion_queue.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

namespace kvtier::services {
namespace {

using grpc::internal::RpcMethod;

/// Fewer bytes are not worth a stream of their own, which is a call more: by two streams 4, 8 and
/// 16 MiB take 10, 4 and 2 % more time where client and server have one core of an EPYC for both.
constexpr std::size_t kLeastPart = std::size_t{4} << 20;

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
    v1::ReadPagesResponse rest;
    read_message(runs, v1::ReadPagesResponse::kChunksFieldNumber, rest,
                 [this](const ByteRuns& bytes) {
                   v1::ReadPagesResponse::Chunk chunk;
                   ByteRuns data;
                   read_message(bytes, v1::ReadPagesResponse::Chunk::kDataFieldNumber, chunk,
                                [&data](const ByteRuns& found) { data = found; });
                   take(chunk, data);
                 });
  }

 private:
  /// `data` lies in the message.
  void take(const v1::ReadPagesResponse::Chunk& chunk, const ByteRuns& data) {
    const auto i = static_cast<std::size_t>(chunk.index());
    if (i >= pages_.size()) return;
    if (chunk.status().code() != 0) {
      results_[i] = result_of(chunk.status());
      return;
    }
    if (chunk.has_page()) crcs_[i] = chunk.page().crc32c();
    const std::span<std::byte> to = pages_[i].to;
    auto at = static_cast<std::size_t>(chunk.offset());
    for (const auto& run : data) {
      if (at > to.size() || run.size() > to.size() - at) {
        results_[i] = {.code = ErrorCode::kInvalidArgument, .reason = "PAGE_TOO_LARGE"};
        return;
      }
      sums_[i] = crc32c_copy(to.subspan(at, run.size()), run, sums_[i]);
      at += run.size();
    }
    if (!chunk.last() || results_[i].reason == "PAGE_TOO_LARGE") return;
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

/// What is read by one stream.
struct Part {
  std::span<const RemotePages::Get> pages;
  std::span<RemotePages::Result> results;
  grpc::Channel* channel = nullptr;
  std::size_t stale_reads = 0;  ///< Those that this part reports.
};

/// A ReadPages call, whose only operation under way has this for its tag.
class PageStream {
 public:
  PageStream(Connection& connection, gpr_timespec deadline, const PagesToRead& read,
             const Part& part, grpc::CompletionQueue& queue)
      : method_(rpc_path<v1::ReadPagesRequest>().c_str(), RpcMethod::SERVER_STREAMING),
        arrivals_(part.pages, part.results) {
    context_.set_deadline(deadline);
    connection.authorize(context_);
    v1::ReadPagesRequest request;
    request.set_lease(read.lease);
    for (const RemotePages::Get& page : part.pages) request.add_handles(page.handle);
    request.set_client_verifies(!read.server_compares);
    request.set_stale_reads(static_cast<std::uint32_t>(part.stale_reads));
    stream_.reset(grpc::internal::ClientAsyncReaderFactory<grpc::ByteBuffer>::Create(
        part.channel, &queue, method_, &context_, request, false, nullptr));
  }
  PageStream(const PageStream&) = delete;  // gRPC has its address
  PageStream& operator=(const PageStream&) = delete;

  void start() { stream_->StartCall(this); }
  /// Goes on after the operation under way. Returns false when it was the last.
  [[nodiscard]] bool go_on(bool succeeded) {
    if (finishing_) return false;
    if (succeeded) {
      const bool arrived = opened_ && !error_;
      if (arrived) arrived_.Swap(&message_);
      opened_ = true;
      stream_->Read(&message_, this);
      if (arrived) take();
    } else {
      finishing_ = true;
      stream_->Finish(&status_, this);
    }
    return true;
  }
  void cancel() { context_.TryCancel(); }

  /// Both after the last operation.
  [[nodiscard]] const grpc::Status& status() const noexcept { return status_; }
  [[nodiscard]] const std::exception_ptr& error() const noexcept { return error_; }

 private:
  void take() {
    try {
      arrivals_.take(arrived_);
      arrived_.Clear();
    } catch (...) {
      error_ = std::current_exception();
      cancel();
    }
  }

  const RpcMethod method_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientAsyncReader<grpc::ByteBuffer>> stream_;
  Arrivals arrivals_;
  grpc::ByteBuffer message_, arrived_;
  grpc::Status status_;
  std::exception_ptr error_;
  bool opened_ = false, finishing_ = false;
};

/// Waits for an operation of any stream; returns whether it succeeded.
bool await(grpc::CompletionQueue& queue, void** tag) {
  bool succeeded = false;
  const auto sleep_at = std::chrono::steady_clock::now() + kSleepAfter;
  do {
    const gpr_timespec now = gpr_time_0(GPR_CLOCK_MONOTONIC);
    if (queue.AsyncNext(tag, &succeeded, now) == grpc::CompletionQueue::GOT_EVENT) {
      return succeeded;
    }
    std::this_thread::yield();  // to the server, where it has no other core
  } while (std::chrono::steady_clock::now() < sleep_at);
  return queue.Next(tag, &succeeded) && succeeded;
}

/// Whether a part may do better alone: a server cancels the streams of clients that read slowly.
bool is_refused(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ||
         status.error_code() == grpc::StatusCode::UNAVAILABLE ||
         status.error_code() == grpc::StatusCode::CANCELLED;
}

std::size_t bytes_of(std::span<const RemotePages::Get> pages) {
  std::size_t bytes = 0;
  for (const RemotePages::Get& page : pages) bytes += page.to.size();
  return bytes;
}

/// How many streams a read is worth.
std::size_t most_streams(const Connection& connection, const PagesToRead& read) {
  auto most = static_cast<std::size_t>(connection.options().page_streams);
  if (most == 0) most = std::thread::hardware_concurrency() > 1 ? 2 : 1;
  most = std::min(most, read.pages.size());
  return std::clamp<std::size_t>(bytes_of(read.pages) / kLeastPart, 1,
                                 std::max<std::size_t>(most, 1));
}

/// Divides pages into up to `count` runs of about as many bytes, none empty but of no pages at all.
std::vector<Part> divide(std::span<const RemotePages::Get> pages,
                         std::span<RemotePages::Result> results, std::size_t count) {
  std::vector<Part> parts;
  std::size_t left = bytes_of(pages);
  for (; count > 1 && pages.size() > 1; --count) {
    std::size_t size = 1;
    std::size_t bytes = pages.front().to.size();
    while (size + 1 < pages.size() && bytes < left / count) bytes += pages[size++].to.size();
    parts.push_back({pages.first(size), results.first(size)});
    pages = pages.subspan(size);
    results = results.subspan(size);
    left -= bytes;
  }
  parts.push_back({pages, results});
  return parts;
}

/// Runs a stream for each part; fills `statuses` with how each has ended. Returns the failure that
/// has ended the others, and OK when there was none.
grpc::Status run_streams(Connection& connection, gpr_timespec deadline, const PagesToRead& read,
                         std::span<const Part> parts, std::vector<grpc::Status>& statuses) {
  grpc::CompletionQueue queue;
  std::vector<std::unique_ptr<PageStream>> streams;
  for (const Part& part : parts) {
    streams.push_back(std::make_unique<PageStream>(connection, deadline, read, part, queue));
  }
  // Once all are there: what is under way has to come to its end.
  for (const auto& stream : streams) stream->start();
  const PageStream* failed = nullptr;
  for (std::size_t left = streams.size(); left > 0;) {
    void* tag = nullptr;
    const bool succeeded = await(queue, &tag);
    PageStream& stream = *static_cast<PageStream*>(tag);
    if (stream.go_on(succeeded)) continue;
    --left;
    const bool may_end = stream.status().ok() || is_refused(stream.status());
    if (failed != nullptr || (may_end && !stream.error())) continue;
    failed = &stream;
    for (const auto& other : streams) other->cancel();
  }
  if (failed != nullptr && failed->error()) std::rethrow_exception(failed->error());
  statuses.clear();
  for (const auto& stream : streams) statuses.push_back(stream->status());
  return failed != nullptr ? failed->status() : grpc::Status::OK;
}

constexpr std::size_t kHeadBytes = 256;  // of a chunk, at most

/// A message with one chunk; `data` must live as long.
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

grpc::Status read_pages(Connection& connection, const PagesToRead& read,
                        std::span<RemotePages::Result> results) {
  keep_received_memory();
  const gpr_timespec deadline = grpc_deadline(connection.options().timeout);
  const std::vector<grpc::Channel*> channels = connection.channels(most_streams(connection, read));
  std::vector<Part> parts = divide(read.pages, results, channels.size());
  std::size_t stale_reads = read.stale_reads;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].channel = channels[i];
    parts[i].stale_reads = std::min(stale_reads, parts[i].pages.size());
    stale_reads -= parts[i].stale_reads;
  }
  std::vector<grpc::Status> statuses;
  const grpc::Status failure = run_streams(connection, deadline, read, parts, statuses);
  if (!failure.ok()) return failure;
  if (std::ranges::all_of(statuses, is_refused)) return statuses.front();
  const std::vector<grpc::Status> first_statuses = std::move(statuses);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (first_statuses[i].ok()) continue;
    parts[i].channel = channels.front();
    const grpc::Status status = run_streams(connection, deadline, read, {&parts[i], 1}, statuses);
    if (!status.ok()) return status;
    if (!statuses.front().ok()) return statuses.front();
  }
  return grpc::Status::OK;
}

RemotePages::Result result_of(const v1::ItemStatus& status) {
  RemotePages::Result result;
  if (status.code() == 0) return result;
  result.code = static_cast<ErrorCode>(status.code());
  result.reason = status.reason();
  return result;
}

v1::WritePagesResponse write_pages(Connection& connection, const v1::OpenLeaseResponse& lease,
                                   std::span<const RemotePages::Put> pages,
                                   std::span<const std::string> handles) {
  const std::size_t chunk_bytes =
      static_cast<std::size_t>(lease.limits().max_transfer_bytes()) - kHeadBytes;
  v1::WritePagesResponse response;
  connection.call_once([&](grpc::ClientContext& context) {
    const RpcMethod method(rpc_path<v1::WritePagesRequest>().c_str(), RpcMethod::CLIENT_STREAMING);
    const std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> stream(
        grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(&connection.channel(), method,
                                                                      &context, &response));
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
        open = stream->Write(
            write_message(offset == 0 && index == 0 ? lease.lease().name() : "", chunk, data));
      }
      ++index;
    }
    stream->WritesDone();
    return stream->Finish();
  });
  return response;
}

}  // namespace kvtier::services
