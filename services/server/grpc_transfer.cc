#include "kvtier/v1/transfer.pb.h"

#include "services/page_cache/page_transfer.h"
#include "services/server/checked_message.h"
#include "services/server/grpc_answer.h"
#include "services/server/grpc_services.h"
#include "services/server/rpc_service.h"

#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::services {
namespace {

using grpc::ByteBuffer;
using grpc::CallbackServerContext;

/// What a message may have beside the bytes of pages.
constexpr std::size_t kOverheadBytes = 64 << 10;

v1::ReadPagesRequest parse(ByteBuffer bytes) {
  CheckedMessage<v1::ReadPagesRequest> request;
  static_cast<void>(grpc::SerializationTraits<decltype(request)>::Deserialize(&bytes, &request));
  if (!request.is_valid) throw invalid_message();
  return std::move(request.message);
}

ByteBuffer buffer_of(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

/// The bytes of pages stay where they are: their slices hold the pins.
ByteBuffer buffer_of(const std::vector<ReadPiece>& pieces) {
  std::vector<grpc::Slice> slices;
  for (const ReadPiece& piece : pieces) {
    slices.emplace_back(piece.head);
    if (piece.data.empty()) continue;
    using Pin = std::shared_ptr<const PinnedPage>;
    auto pin = std::make_unique<Pin>(piece.page);
    slices.emplace_back(
        const_cast<std::byte*>(piece.data.data()), piece.data.size(),
        [](void* held) { delete static_cast<Pin*>(held); }, pin.get());
    static_cast<void>(pin.release());
  }
  return {slices.data(), slices.size()};
}

grpc::ServerWriteReactor<ByteBuffer>* read_pages(ServiceCore& core, StreamRegistry& registry,
                                                 CallbackServerContext& context,
                                                 const ByteBuffer& request) {
  using Reactor = grpc::ServerWriteReactor<ByteBuffer>;
  return stream<v1::ReadPagesRequest, Reactor>(core, context, [&](const Call& call) -> Reactor* {
    const v1::ReadPagesRequest message = parse(request);
    check_at_most("handles", message.handles_size(), kMaxBatchPages);
    static_cast<void>(core.lease(call, message.lease()));
    auto reservation = core.admit(*call.tenant, static_cast<std::size_t>(kMaxTransferBytes));
    core.pages().transfers().reread(
        std::min(message.stale_reads(), static_cast<std::uint32_t>(message.handles_size())));
    auto reader = std::make_shared<PageReader>(core.pages(), *call.tenant, message);
    return new ProducingStream<ByteBuffer>(
        registry, context, [reader, reservation = std::move(reservation)](ByteBuffer& response) {
          const std::vector<ReadPiece> pieces =
              reader->next(static_cast<std::size_t>(kMaxTransferBytes));
          if (!pieces.empty()) response = buffer_of(pieces);
          return !pieces.empty();
        });
  });
}

/// Writes the pages of one message; `lease` is that of the stream's first.
void write(ServiceCore& core, const Call& call, const ByteBuffer& bytes, PageWriter& writer,
           std::string& lease) {
  if (bytes.Length() > static_cast<std::size_t>(kMaxTransferBytes) + kOverheadBytes) {
    check_at_most("message", bytes.Length(), kMaxTransferBytes, " bytes");
  }
  const auto reservation = core.admit(*call.tenant, bytes.Length());
  const std::vector<grpc::Slice> slices = slices_of(bytes);
  const ByteRuns runs = runs_of(slices);
  if (!has_few_fields(runs, *v1::WritePagesRequest::descriptor())) throw invalid_message();
  const WriteMessage message = parse_write_message(runs);
  if (lease.empty()) lease = message.lease;
  if (!message.lease.empty() && message.lease != lease) {
    throw ServiceError::invalid("lease", "the lease of the stream's first message", "another");
  }
  writer.write(*core.lease(call, lease), message, kMaxBatchPages);
}

grpc::ServerReadReactor<ByteBuffer>* write_pages(ServiceCore& core, StreamRegistry& registry,
                                                 CallbackServerContext& context,
                                                 ByteBuffer& response) {
  using Reactor = grpc::ServerReadReactor<ByteBuffer>;
  return stream<v1::WritePagesRequest, Reactor>(core, context, [&](const Call& call) -> Reactor* {
    auto writer = std::make_shared<PageWriter>(core.pages());
    return new CollectingStream<ByteBuffer>(
        registry, context,
        [&core, call, writer, lease = std::string()](const ByteBuffer& bytes,
                                                     const Done& done) mutable {
          core.answer_now(
              call, rpc_name<v1::WritePagesRequest>(),
              [&] { write(core, call, bytes, *writer, lease); }, done);
        },
        [writer, &response](Done done) {
          // The disk may take its time, for which this thread has others to serve.
          writer->when_settled([writer, &response, done = std::move(done)] {
            const auto failure = failure_of([&] { response = buffer_of(writer->finish()); });
            done(failure ? &*failure : nullptr);
          });
        });
  });
}

}  // namespace

void add_transfer_service(RpcService& services, ServiceCore& core, StreamRegistry& registry) {
  services.add_writing<v1::ReadPagesRequest, ByteBuffer, ByteBuffer>(
      [&](CallbackServerContext* context, const ByteBuffer* request) {
        return read_pages(core, registry, *context, *request);
      });
  services.add_reading<v1::WritePagesRequest, ByteBuffer, ByteBuffer>(
      [&](CallbackServerContext* context, ByteBuffer* response) {
        return write_pages(core, registry, *context, *response);
      });
}

}  // namespace kvtier::services
