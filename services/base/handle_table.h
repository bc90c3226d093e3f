#pragma once

#include "services/base/handle.h"
#include "services/base/service_error.h"
#include "services/base/tenants.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtier::services {

using TimePoint = std::chrono::steady_clock::time_point;

/// What clients hold under leases, by handle. Handles carry a generation, so that one never names
/// the next entry in its slot. An entry has a `tenant`, a `name`, a `lease_end`, and `queued`, the
/// work that keeps its lease from ending. Thread-safe.
template <typename Entry>
class HandleTable {
 public:
  /// Names are `prefix` and a handle of `kind`; `expired` is said of those whose lease has ended.
  HandleTable(std::string_view kind, std::string_view prefix, std::string expired)
      : codec_(kind), prefix_(prefix), expired_(std::move(expired)) {}

  /// Returns the tenant's own entry. Throws NOT_FOUND for names that are unknown, foreign, forged
  /// or removed, FAILED_PRECONDITION (LEASE_EXPIRED), ABORTED (SERVER_EPOCH) for a handle of an
  /// earlier start.
  [[nodiscard]] std::shared_ptr<Entry> find(const Tenant& tenant, const std::string& name) const {
    const DecodedHandle handle = decode(name);
    const std::lock_guard lock(mutex_);
    return slots_[slot_of(tenant, handle)].entry;
  }
  /// As `find`, and takes the entry out.
  [[nodiscard]] std::shared_ptr<Entry> remove(const Tenant& tenant, const std::string& name) {
    const DecodedHandle handle = decode(name);
    const std::lock_guard lock(mutex_);
    return vacate(slot_of(tenant, handle));
  }
  /// Takes out the entries whose lease ended before `now` and that have nothing queued.
  [[nodiscard]] std::vector<std::shared_ptr<Entry>> remove_expired(TimePoint now) {
    std::vector<std::shared_ptr<Entry>> expired;
    const std::lock_guard lock(mutex_);
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (slot.entry == nullptr || slot.entry->queued > 0) continue;
      if (slot.entry->lease_end > now.time_since_epoch().count()) continue;
      slot.expired_generation = slot.generation + 1;
      slot.expired_tenant = slot.entry->tenant.index();
      expired.push_back(vacate(i));
    }
    return expired;
  }
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return size_;
  }
  [[nodiscard]] std::uint32_t epoch() const noexcept { return codec_.epoch(); }

 protected:
  struct Slot {
    std::uint32_t generation = 0;
    std::uint32_t expired_generation = 0;  ///< Last that ended with its lease, plus 1.
    std::uint32_t expired_tenant = 0;
    std::shared_ptr<Entry> entry;
  };

  // All of these with `mutex_` held.

  /// Names `entry` and adds it, unless there are `most`. Returns whether it did.
  [[nodiscard]] bool add(const std::shared_ptr<Entry>& entry, std::size_t most) {
    if (size_ >= most) return false;
    if (free_.empty()) {
      // Room for all slots, so that none is lost when it is given back.
      if (free_.capacity() <= slots_.size()) free_.reserve(2 * (slots_.size() + 1));
      slots_.emplace_back();
      free_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
    }
    const std::uint32_t slot = free_.back();
    entry->name = prefix_ + codec_.encode({.tenant = entry->tenant.index(),
                                           .slot = slot,
                                           .generation = slots_[slot].generation});
    slots_[slot].entry = entry;
    free_.pop_back();
    ++size_;
    return true;
  }
  [[nodiscard]] std::shared_ptr<Entry> vacate(std::uint32_t index) {
    Slot& slot = slots_[index];
    std::shared_ptr<Entry> entry = std::exchange(slot.entry, nullptr);
    --size_;
    // A slot whose generations are used up is never used again.
    if (slot.generation < std::numeric_limits<std::uint32_t>::max() - 1) {
      ++slot.generation;
      free_.push_back(index);
    }
    return entry;
  }
  [[nodiscard]] const std::vector<Slot>& slots() const noexcept { return slots_; }

  mutable std::mutex mutex_;  ///< Guards all below.

 private:
  [[nodiscard]] DecodedHandle decode(std::string_view name) const {
    if (!name.starts_with(prefix_)) return {};
    return codec_.decode(name.substr(prefix_.size()));
  }
  [[nodiscard]] std::uint32_t slot_of(const Tenant& tenant, const DecodedHandle& handle) const {
    if (handle.state == HandleState::kOtherEpoch) {
      throw ServiceError(Code::kAborted, "SERVER_EPOCH",
                         "the server has started anew since this name was made");
    }
    const HandleFields& named = handle.fields;
    if (handle.state != HandleState::kValid || named.tenant != tenant.index() ||
        named.slot >= slots_.size()) {
      throw ServiceError::not_found();
    }
    const Slot& slot = slots_[named.slot];
    if (slot.entry != nullptr && slot.generation == named.generation) return named.slot;
    if (slot.expired_generation == named.generation + 1 && slot.expired_tenant == tenant.index()) {
      throw ServiceError(Code::kFailedPrecondition, "LEASE_EXPIRED", expired_);
    }
    throw ServiceError::not_found();
  }

  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::size_t size_ = 0;
  const HandleCodec codec_;
  const std::string prefix_;
  const std::string expired_;
};

}  // namespace kvtier::services
