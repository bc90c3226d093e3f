#include "services/client/pages.h"

#include "services/client/page_streams.h"
#include "services/wire/message_cursor.h"
#include "transfer/tiers/crc32c.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <array>
#include <memory>

namespace kvtier::services {
namespace {

using grpc::internal::RpcMethod;

constexpr std::size_t kHeadBytes = 256;  // of a chunk, at most
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

v1::WritePagesResponse LeasedPages::write(std::span<const RemotePages::Put> pages,
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

void LeasedPages::read(std::span<const RemotePages::Get> pages,
                       std::span<RemotePages::Result> results, VerifiedBy verified_by,
                       std::size_t stale_reads) {
  const PagesToRead read{name(), pages, verified_by == VerifiedBy::kBoth, stale_reads};
  connection_.retry([&] { return read_pages(connection_, read, results); });
}

void LeasedPages::read(std::span<const RemotePages::Get> pages,
                       std::span<RemotePages::Result> results, std::size_t stale_reads) {
  read(pages, results, VerifiedBy::kClient, stale_reads);
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

}  // namespace kvtier::services
