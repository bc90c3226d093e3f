#pragma once

#include "kvtier/v1/attention.grpc.pb.h"

#include "services/client/connection.h"

#include <grpc/support/time.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include <memory>

namespace kvtier::services {

/// The steps of one session over one stream, each with a deadline of its own. Opened by the first
/// step, and anew after one that failed. Used by one thread at a time.
class DecodeStream {
 public:
  explicit DecodeStream(Connection& connection)
      : connection_(connection),
        stub_(v1::AttentionService::NewStub(connection.channel().shared_from_this())) {}
  ~DecodeStream() { close(); }
  DecodeStream(const DecodeStream&) = delete;  // owns a call
  DecodeStream& operator=(const DecodeStream&) = delete;

  /// Sends a request and waits for its reply.
  [[nodiscard]] grpc::Status exchange(const v1::DecodeRequest& request,
                                      v1::DecodeResponse& response);
  /// Ends the stream.
  void close();
  /// The stub of the service, for its other stream.
  [[nodiscard]] v1::AttentionService::Stub& stub() noexcept { return *stub_; }

 private:
  /// One call, with the queue on which its operations end.
  struct Active {
    Active() = default;
    ~Active() {
      queue.Shutdown();
      void* tag = nullptr;
      bool ok = false;
      while (queue.Next(&tag, &ok)) {
      }
    }
    Active(const Active&) = delete;  // operations hold its address
    Active& operator=(const Active&) = delete;

    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> call;
  };

  /// Waits for the one operation under way; cancels the call when `deadline` passes. Returns
  /// whether the operation succeeded.
  bool wait(gpr_timespec deadline);

  Connection& connection_;
  const std::unique_ptr<v1::AttentionService::Stub> stub_;
  std::unique_ptr<Active> active_;
  bool timed_out_ = false;
};

}  // namespace kvtier::services
