#pragma once

#include "services/base/service_error.h"
#include "services/base/tenants.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace kvtier::services {

/// What one call, or one frame, makes the server hold: its request, what is made of it, and its
/// reply until the client has it. Counted with all others, of the server and of a tenant, until it
/// is destroyed. Thread-safe.
class InflightReservation {
 public:
  /// Throws as `take`.
  InflightReservation(std::atomic<std::int64_t>& inflight, std::int64_t limit, Tenant& tenant,
                      std::int64_t bytes)
      : inflight_(inflight), limit_(limit), tenant_(tenant) {
    take(bytes);
  }
  ~InflightReservation() { give(bytes_); }
  InflightReservation(const InflightReservation&) = delete;  // gives its bytes back once
  InflightReservation& operator=(const InflightReservation&) = delete;

  /// Called before memory is taken. Throws RESOURCE_EXHAUSTED, and counts nothing, when `bytes`
  /// more do not fit.
  void take(std::int64_t bytes) {
    const bool tenant_may = tenant_.take_inflight(bytes, limit_);
    if (tenant_may && add_below(inflight_, bytes, limit_)) {
      bytes_ += bytes;
      return;
    }
    if (tenant_may) tenant_.give_inflight(bytes);
    if (tenant_may || inflight_ > limit_ - bytes) {
      throw ServiceError::overloaded("OVERLOADED", "too many bytes are in flight");
    }
    throw ServiceError::overloaded("TENANT_OVERLOADED",
                                   "too many bytes of the tenant are in flight");
  }
  /// Counts what is held already, so that it is at least `bytes` in all.
  void cover(std::int64_t bytes) noexcept {
    const std::int64_t more = bytes - bytes_;
    if (more <= 0) return;
    inflight_ += more;
    tenant_.add_inflight(more);
    bytes_ += more;
  }
  /// At most what was taken.
  void give(std::int64_t bytes) noexcept {
    bytes_ -= bytes;
    tenant_.give_inflight(bytes);
    inflight_ -= bytes;
  }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  std::atomic<std::int64_t>& inflight_;
  const std::int64_t limit_;
  Tenant& tenant_;
  std::atomic<std::int64_t> bytes_{0};
};

/// Memory of the server that sessions hold beside the pages of their engines. Thread-safe.
class SessionMemoryBudget {
 public:
  explicit SessionMemoryBudget(std::int64_t limit) : limit_(limit) {}

  /// Returns whether there is room for `bytes` more, and counts them if so.
  [[nodiscard]] bool take(std::int64_t bytes) noexcept { return add_below(used_, bytes, limit_); }
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
  /// `reservation`, which may be null, is charged for the reply and for what the transport makes of
  /// it.
  explicit ReplyBudget(std::int64_t bytes,
                       std::shared_ptr<InflightReservation> reservation = nullptr)
      : limit_(bytes), reservation_(std::move(reservation)) {}

  /// Throws INVALID_ARGUMENT (REPLY_TOO_LARGE) when `bytes` do not fit, and RESOURCE_EXHAUSTED.
  void take(std::int64_t bytes) {
    if (!add_below(taken_, bytes, limit_)) {
      throw ServiceError(Code::kInvalidArgument, "REPLY_TOO_LARGE",
                         "the reply would pass the limit of a message: ask for less at once");
    }
    if (!reservation_) return;
    try {
      reservation_->take(2 * bytes);
    } catch (...) {
      taken_ -= bytes;
      throw;
    }
  }

 private:
  const std::int64_t limit_;
  std::atomic<std::int64_t> taken_{0};
  const std::shared_ptr<InflightReservation> reservation_;
};

}  // namespace kvtier::services
