#pragma once

#include "services/server/service_error.h"
#include "services/server/tenants.h"

#include <atomic>
#include <cstdint>

namespace kvtier::services {

/// The right to have `bytes` in flight, of the server and of a tenant, until it is destroyed. The
/// reply is counted as large as the request.
class Grant {
 public:
  /// Throws RESOURCE_EXHAUSTED at once when they do not fit.
  Grant(std::atomic<std::int64_t>& inflight, std::int64_t limit, Tenant& tenant, std::int64_t bytes)
      : inflight_(inflight), tenant_(tenant), bytes_(2 * bytes) {
    if (inflight_.fetch_add(bytes_) + bytes_ > limit) {
      inflight_ -= bytes_;
      throw ServiceError::overloaded("OVERLOADED", "too many bytes are in flight");
    }
    if (!tenant_.take_inflight(bytes_)) {
      inflight_ -= bytes_;
      throw ServiceError::overloaded("TENANT_OVERLOADED",
                                     "too many bytes of the tenant are in flight");
    }
  }
  ~Grant() {
    tenant_.give_inflight(bytes_);
    inflight_ -= bytes_;
  }
  Grant(const Grant&) = delete;  // gives its bytes back once
  Grant& operator=(const Grant&) = delete;

 private:
  std::atomic<std::int64_t>& inflight_;
  Tenant& tenant_;
  const std::int64_t bytes_;
};

/// Memory of the server that sessions hold beside the pages of their engines. Thread-safe.
class SessionMemory {
 public:
  explicit SessionMemory(std::int64_t limit) : limit_(limit) {}

  /// Returns whether there is room for `bytes` more, and counts them if so.
  [[nodiscard]] bool take(std::int64_t bytes) noexcept {
    if (bytes <= limit_ && used_.fetch_add(bytes) <= limit_ - bytes) return true;
    if (bytes <= limit_) used_ -= bytes;
    return false;
  }
  void give(std::int64_t bytes) noexcept { used_ -= bytes; }
  [[nodiscard]] std::int64_t used() const noexcept { return used_; }
  [[nodiscard]] std::int64_t limit() const noexcept { return limit_; }

 private:
  const std::int64_t limit_;
  std::atomic<std::int64_t> used_{0};
};

/// Bytes that a reply may still grow by, shared by the items of a batch. Thread-safe.
class ReplyBudget {
 public:
  explicit ReplyBudget(std::int64_t bytes) : left_(bytes) {}

  /// Throws INVALID_ARGUMENT (REPLY_TOO_LARGE) when `bytes` do not fit.
  void take(std::int64_t bytes) {
    if (left_.fetch_sub(bytes) >= bytes) return;
    left_ += bytes;
    throw ServiceError(Code::kInvalidArgument, "REPLY_TOO_LARGE",
                       "the reply would pass the limit of a message: ask for less at once");
  }

 private:
  std::atomic<std::int64_t> left_;
};

}  // namespace kvtier::services
