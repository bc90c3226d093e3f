#include "services/server/session_table.h"

#include "services/server/service_error.h"

#include <limits>

namespace kvtier::services {
namespace {

constexpr std::string_view kPrefix = "sessions/";

}  // namespace

SessionEntry::~SessionEntry() { close(); }

void SessionEntry::close() noexcept {
  if (closed_) return;
  closed_ = true;
  session.reset();
  last_step = {};
  memory.give(memory_bytes);
  tenant.refund_kv(charged_bytes);
  tenant.refund_session();
  memory_bytes = 0;
  charged_bytes = 0;
}

void SessionEntry::remember(LastStep step) {
  const auto before = static_cast<std::int64_t>(last_step.reply.size());
  memory.give(before);
  memory_bytes -= before;
  last_step = std::move(step);
  const auto bytes = static_cast<std::int64_t>(last_step.reply.size());
  if (memory.take(bytes)) {
    memory_bytes += bytes;
  } else {
    last_step.reply = std::string();
  }
}

void SessionTable::insert(const std::shared_ptr<SessionEntry>& entry) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    // Room for all slots, so that none is lost when it is given back.
    if (free_.capacity() <= slots_.size()) free_.reserve(2 * (slots_.size() + 1));
    slots_.emplace_back();
    free_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
  }
  const std::uint32_t slot = free_.back();
  entry->name = std::string(kPrefix) + codec_.encode({.tenant = entry->tenant.index(),
                                                      .slot = slot,
                                                      .generation = slots_[slot].generation});
  slots_[slot].entry = entry;
  free_.pop_back();
  ++size_;
}

DecodedHandle SessionTable::decode(const std::string& name) const {
  if (!std::string_view(name).starts_with(kPrefix)) return {};
  return codec_.decode(std::string_view(name).substr(kPrefix.size()));
}

std::uint32_t SessionTable::slot_of(const Tenant& tenant, const DecodedHandle& handle) const {
  if (handle.state == HandleState::kOtherEpoch) {
    throw ServiceError(Code::kAborted, "SERVER_EPOCH",
                       "the server has started anew since this name was made");
  }
  if (handle.state != HandleState::kValid || handle.fields.tenant != tenant.index() ||
      handle.fields.slot >= slots_.size()) {
    throw ServiceError::not_found();
  }
  const Slot& slot = slots_[handle.fields.slot];
  if (slot.entry == nullptr || slot.generation != handle.fields.generation) {
    if (slot.expired_generation == handle.fields.generation + 1 &&
        slot.expired_tenant == tenant.index()) {
      throw ServiceError(Code::kFailedPrecondition, "LEASE_EXPIRED",
                         "the session ended with its lease");
    }
    throw ServiceError::not_found();
  }
  return handle.fields.slot;
}

std::shared_ptr<SessionEntry> SessionTable::vacate(std::uint32_t index) {
  Slot& slot = slots_[index];
  std::shared_ptr<SessionEntry> entry = std::move(slot.entry);
  slot.entry = nullptr;
  --size_;
  // A slot whose generations are used up is never used again.
  if (slot.generation < std::numeric_limits<std::uint32_t>::max() - 1) {
    ++slot.generation;
    free_.push_back(index);
  }
  return entry;
}

std::shared_ptr<SessionEntry> SessionTable::find(const Tenant& tenant,
                                                 const std::string& name) const {
  const DecodedHandle handle = decode(name);
  const std::lock_guard lock(mutex_);
  return slots_[slot_of(tenant, handle)].entry;
}

std::shared_ptr<SessionEntry> SessionTable::remove(const Tenant& tenant, const std::string& name) {
  const DecodedHandle handle = decode(name);
  const std::lock_guard lock(mutex_);
  return vacate(slot_of(tenant, handle));
}

std::vector<std::shared_ptr<SessionEntry>> SessionTable::remove_expired(TimePoint now) {
  std::vector<std::shared_ptr<SessionEntry>> expired;
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

std::vector<std::shared_ptr<SessionEntry>> SessionTable::remove_all() {
  std::vector<std::shared_ptr<SessionEntry>> all;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].entry != nullptr) all.push_back(vacate(i));
  }
  return all;
}

std::vector<std::shared_ptr<SessionEntry>> SessionTable::at_work_since(TimePoint then) const {
  std::vector<std::shared_ptr<SessionEntry>> found;
  const std::lock_guard lock(mutex_);
  for (const Slot& slot : slots_) {
    const TimePoint::rep began = slot.entry == nullptr ? 0 : slot.entry->work_began.load();
    if (began != 0 && began < then.time_since_epoch().count()) found.push_back(slot.entry);
  }
  return found;
}

std::pair<std::vector<std::string>, std::optional<std::uint32_t>> SessionTable::list(
    const Tenant& tenant, std::uint32_t first_slot, std::size_t count) const {
  std::vector<std::string> names;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = first_slot; i < slots_.size(); ++i) {
    const auto& entry = slots_[i].entry;
    if (entry == nullptr || &entry->tenant != &tenant) continue;
    if (names.size() == count) return {std::move(names), i};
    names.push_back(entry->name);
  }
  return {std::move(names), std::nullopt};
}

std::size_t SessionTable::size() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

}  // namespace kvtier::services
