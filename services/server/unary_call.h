#pragma once

#include "services/base/admission.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace kvtier::services {

class UnaryCall;

/// Unary calls that are answered and whose replies gRPC has not written yet. Thread-safe.
class UnwrittenReplies {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  void add(UnaryCall& call) {
    const std::lock_guard lock(mutex_);
    calls_.insert(&call);
  }
  void remove(UnaryCall& call) {
    const std::lock_guard lock(mutex_);
    calls_.erase(&call);
  }
  /// Cancels calls that were answered before `since`.
  void cancel(TimePoint since);

 private:
  std::mutex mutex_;  ///< Guards all below.
  std::unordered_set<UnaryCall*> calls_;
};

/// A unary call whose reservation lasts until gRPC has written the reply, or given it up. Deletes
/// itself when the call is over.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  using TimePoint = UnwrittenReplies::TimePoint;

  UnaryCall(UnwrittenReplies& replies, grpc::CallbackServerContext& context)
      : replies_(replies), context_(context) {}

  void hold(std::shared_ptr<InflightReservation> reservation) noexcept {
    reservation_ = std::move(reservation);
  }
  /// Answers with a reply of so many bytes.
  void answer(const grpc::Status& status, std::size_t bytes, TimePoint now) {
    // The message itself, and what gRPC makes of it.
    if (reservation_) reservation_->cover(2 * static_cast<std::int64_t>(bytes));
    answered_ = now;
    replies_.add(*this);
    Finish(status);
  }
  void OnDone() override {
    replies_.remove(*this);
    delete this;
  }

 private:
  friend class UnwrittenReplies;

  UnwrittenReplies& replies_;
  grpc::CallbackServerContext& context_;
  std::shared_ptr<InflightReservation> reservation_;
  TimePoint answered_{};
};

inline void UnwrittenReplies::cancel(TimePoint since) {
  const std::lock_guard lock(mutex_);
  for (UnaryCall* call : calls_) {
    if (call->answered_ < since) call->context_.TryCancel();  // its end comes on another thread
  }
}

}  // namespace kvtier::services
