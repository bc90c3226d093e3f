#include "services/client/decode_stream.h"

#include "services/wire/grpc_time.h"

namespace kvtier::services {

bool DecodeStream::wait(gpr_timespec deadline) {
  void* tag = nullptr;
  bool ok = false;
  if (active_->queue.AsyncNext(&tag, &ok, deadline) == grpc::CompletionQueue::TIMEOUT) {
    timed_out_ = true;
    active_->context.TryCancel();
    active_->queue.Next(&tag, &ok);  // a cancelled operation ends at once
    return false;
  }
  return ok;
}

grpc::Status DecodeStream::exchange(const v1::DecodeRequest& request,
                                    v1::DecodeResponse& response) {
  const gpr_timespec deadline = grpc_deadline(connection_.options().timeout);
  timed_out_ = false;
  bool ok = true;
  if (active_ == nullptr) {
    active_ = std::make_unique<Active>();
    connection_.authorize(active_->context);
    active_->call = stub_->PrepareAsyncDecode(&active_->context, &active_->queue);
    active_->call->StartCall(this);
    ok = wait(deadline);
  }
  if (ok) {
    active_->call->Write(request, this);
    ok = wait(deadline);
  }
  if (ok) {
    active_->call->Read(&response, this);
    ok = wait(deadline);
  }
  if (ok) return grpc::Status::OK;

  grpc::Status status;
  active_->call->Finish(&status, this);
  const bool timed_out = timed_out_;
  wait(gpr_time_add(deadline, gpr_time_from_seconds(kCloseTime.count(), GPR_TIMESPAN)));
  active_.reset();
  if (timed_out) {
    return {grpc::StatusCode::DEADLINE_EXCEEDED, "the step took longer than the timeout"};
  }
  if (status.ok()) return {grpc::StatusCode::UNAVAILABLE, "the server ended the stream"};
  return status;
}

void DecodeStream::close() {
  if (active_ == nullptr) return;
  if (connection_.is_forked()) return static_cast<void>(active_.release());  // the other process's
  const gpr_timespec deadline = grpc_deadline(kCloseTime);
  grpc::Status status;
  active_->call->WritesDone(this);
  wait(deadline);
  active_->call->Finish(&status, this);
  wait(deadline);
  active_.reset();
}

}  // namespace kvtier::services
