#pragma once

#include "services/base/service_error.h"
#include "services/wire/message_pieces.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <string>
#include <vector>

namespace kvtier::services {

/// Throws `ServiceError` for bytes that cannot be read.
[[nodiscard]] inline std::vector<grpc::Slice> slices_of(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  const grpc::Status status = message.Dump(&slices);
  if (!status.ok()) throw ServiceError::invalid("message", "bytes", "none that can be read");
  return slices;
}

/// Valid as long as `slices`.
[[nodiscard]] inline ByteRuns runs_of(const std::vector<grpc::Slice>& slices) {
  ByteRuns runs;
  for (const grpc::Slice& slice : slices) {
    runs.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
  }
  return runs;
}

/// How a request has been read.
struct ReadRequest {
  std::size_t bytes = 0;  ///< As it came.
  bool is_valid = false;  ///< Otherwise the message is empty.
};

/// A request as gRPC reads it, before anyone has looked who calls: one that is none, or that has
/// more than `kMaxFields`, is not made, so that memory is not taken for nothing.
template <typename Message>
struct CheckedMessage : ReadRequest {
  Message message;

  void Clear() { message.Clear(); }
};

/// What is answered for a `CheckedMessage` that is not valid.
[[nodiscard]] inline ServiceError invalid_message() {
  return ServiceError::invalid(
      "message", "one of the method's type with at most " + std::to_string(kMaxFields) + " fields",
      "another");
}

}  // namespace kvtier::services

template <typename Message>
class grpc::SerializationTraits<kvtier::services::CheckedMessage<Message>> {
 public:
  static Status Deserialize(ByteBuffer* buffer,
                            kvtier::services::CheckedMessage<Message>* request) {
    using namespace kvtier::services;
    request->bytes = buffer->Length();
    const auto failure = failure_of([&] {
      const std::vector<grpc::Slice> slices = slices_of(*buffer);
      request->is_valid = has_few_fields(runs_of(slices), *Message::descriptor()) &&
                          SerializationTraits<Message>::Deserialize(buffer, &request->message).ok();
    });
    if (failure) request->is_valid = false;
    if (!request->is_valid) request->message.Clear();
    buffer->Clear();
    return Status::OK;
  }
};
