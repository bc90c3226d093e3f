#include "services/server/grpc_pages.h"

#include "kvtier/v1/page.grpc.pb.h"
#include "kvtier/v1/transfer.grpc.pb.h"

#include "services/page_cache/page_transfer.h"
#include "services/server/grpc_answer.h"

#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace kvtier::services {
namespace {

using grpc::ByteBuffer;
using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

/// What a message may have beside the bytes of pages.
constexpr std::size_t kOverheadBytes = 64 << 10;

class PageService final : public v1::PageService::CallbackService {
 public:
  PageService(ServiceCore& core, StreamRegistry& registry) : core_(core), registry_(registry) {}

  ServerUnaryReactor* OpenLease(CallbackServerContext* context, const v1::OpenLeaseRequest* request,
                                v1::OpenLeaseResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.open_lease(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* CloseLease(CallbackServerContext* context,
                                 const v1::CloseLeaseRequest* request,
                                 v1::CloseLeaseResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.close_lease(call, *request, std::move(done));
    });
  }
  ServerUnaryReactor* LookupPrefix(CallbackServerContext* context,
                                   const v1::LookupPrefixRequest* request,
                                   v1::LookupPrefixResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.lookup_prefix(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchLookupPages(CallbackServerContext* context,
                                       const v1::BatchLookupPagesRequest* request,
                                       v1::BatchLookupPagesResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_lookup_pages(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchReservePages(CallbackServerContext* context,
                                        const v1::BatchReservePagesRequest* request,
                                        v1::BatchReservePagesResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_reserve_pages(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchCommitPages(CallbackServerContext* context,
                                       const v1::BatchCommitPagesRequest* request,
                                       v1::BatchCommitPagesResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_commit_pages(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchAbortPages(CallbackServerContext* context,
                                      const v1::BatchAbortPagesRequest* request,
                                      v1::BatchAbortPagesResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_abort_pages(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchDeletePages(CallbackServerContext* context,
                                       const v1::BatchDeletePagesRequest* request,
                                       v1::BatchDeletePagesResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_delete_pages(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchPinPages(CallbackServerContext* context,
                                    const v1::BatchPinPagesRequest* request,
                                    v1::BatchPinPagesResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_pin_pages(call, *request, *response, std::move(done));
    });
  }
  ServerUnaryReactor* BatchUnpinPages(CallbackServerContext* context,
                                      const v1::BatchUnpinPagesRequest* request,
                                      v1::BatchUnpinPagesResponse* response) override {
    return unary(core_, registry_, *context, response, [=, this](const Call& call, Done done) {
      core_.batch_unpin_pages(call, *request, *response, std::move(done));
    });
  }

 private:
  ServiceCore& core_;
  StreamRegistry& registry_;
};

std::vector<grpc::Slice> slices_of(const ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  const grpc::Status status = message.Dump(&slices);
  if (!status.ok()) throw ServiceError::invalid("message", "bytes", "none that can be read");
  return slices;
}

/// Valid as long as `slices`.
ByteRuns runs_of(const std::vector<grpc::Slice>& slices) {
  ByteRuns runs;
  for (const grpc::Slice& slice : slices) {
    runs.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
  }
  return runs;
}

template <typename Message>
Message parse(const ByteBuffer& bytes) {
  std::string text;
  for (const grpc::Slice& slice : slices_of(bytes)) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  Message message;
  if (!message.ParseFromString(text)) {
    throw ServiceError::invalid("message", "a " + message.GetTypeName(), "something else");
  }
  return message;
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

using RawTransferService = v1::TransferService::WithRawCallbackMethod_ReadPages<
    v1::TransferService::WithRawCallbackMethod_WritePages<v1::TransferService::Service>>;

class TransferService final : public RawTransferService {
 public:
  TransferService(ServiceCore& core, StreamRegistry& registry) : core_(core), registry_(registry) {}

  grpc::ServerWriteReactor<ByteBuffer>* ReadPages(CallbackServerContext* context,
                                                  const ByteBuffer* request) override {
    using Reactor = grpc::ServerWriteReactor<ByteBuffer>;
    return stream<Reactor>(core_, *context, [&](const Call& call) -> Reactor* {
      const auto message = parse<v1::ReadPagesRequest>(*request);
      if (message.handles_size() > kMaxBatchPages) {
        throw ServiceError::invalid("handles", "at most " + std::to_string(kMaxBatchPages),
                                    std::to_string(message.handles_size()));
      }
      static_cast<void>(core_.lease(call, message.lease()));
      auto grant = core_.admit(*call.tenant, static_cast<std::size_t>(kMaxTransferBytes));
      core_.pages().transfers().reread(
          std::min(message.stale_reads(), static_cast<std::uint32_t>(message.handles_size())));
      auto reader = std::make_shared<PageReader>(core_.pages(), *call.tenant, message);
      return new ProducingStream<ByteBuffer>(
          registry_, *context, [reader, grant = std::move(grant)](ByteBuffer& response) {
            const std::vector<ReadPiece> pieces =
                reader->next(static_cast<std::size_t>(kMaxTransferBytes));
            if (!pieces.empty()) response = buffer_of(pieces);
            return !pieces.empty();
          });
    });
  }

  grpc::ServerReadReactor<ByteBuffer>* WritePages(CallbackServerContext* context,
                                                  ByteBuffer* response) override {
    using Reactor = grpc::ServerReadReactor<ByteBuffer>;
    return stream<Reactor>(core_, *context, [&](const Call& call) -> Reactor* {
      auto writer = std::make_shared<PageWriter>(core_.pages());
      return new CollectingStream<ByteBuffer>(
          registry_, *context,
          [this, call, writer, lease = std::string()](const ByteBuffer& bytes,
                                                      const Done& done) mutable {
            std::optional<ServiceError> failure;
            try {
              write(call, bytes, *writer, lease);
            } catch (...) {
              failure = to_service_error(std::current_exception());
            }
            done(failure ? &*failure : nullptr);
          },
          [writer, response] { *response = buffer_of(writer->finish()); });
    });
  }

 private:
  void write(const Call& call, const ByteBuffer& bytes, PageWriter& writer, std::string& lease) {
    if (bytes.Length() > static_cast<std::size_t>(kMaxTransferBytes) + kOverheadBytes) {
      throw ServiceError::invalid("message",
                                  "at most " + std::to_string(kMaxTransferBytes) + " bytes",
                                  std::to_string(bytes.Length()));
    }
    const auto grant = core_.admit(*call.tenant, bytes.Length());
    const std::vector<grpc::Slice> slices = slices_of(bytes);
    const WriteMessage message = parse_write_message(runs_of(slices));
    if (lease.empty()) lease = message.lease;
    if (!message.lease.empty() && message.lease != lease) {
      throw ServiceError::invalid("lease", "the lease of the stream's first message", "another");
    }
    writer.write(*core_.lease(call, lease), message, kMaxBatchPages);
  }

  ServiceCore& core_;
  StreamRegistry& registry_;
};

}  // namespace

void add_page_services(ServiceCore& core, StreamRegistry& registry,
                       std::vector<std::unique_ptr<grpc::Service>>& services) {
  services.push_back(std::make_unique<PageService>(core, registry));
  services.push_back(std::make_unique<TransferService>(core, registry));
}

}  // namespace kvtier::services
