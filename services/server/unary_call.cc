#include "services/server/unary_call.h"

#include <grpcpp/server_context.h>

namespace kvtier::services {

void UnwrittenReplies::add(UnaryCall& call) {
  const std::lock_guard lock(mutex_);
  calls_.insert(&call);
}

void UnwrittenReplies::remove(UnaryCall& call) {
  const std::lock_guard lock(mutex_);
  calls_.erase(&call);
}

void UnwrittenReplies::cancel(TimePoint since) {
  const std::lock_guard lock(mutex_);
  for (UnaryCall* call : calls_) {
    if (call->answered_ < since) call->context_.TryCancel();  // its end comes on another thread
  }
}

}  // namespace kvtier::services
