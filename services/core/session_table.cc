#include "services/core/session_table.h"

namespace kvtier::services {
namespace {

ServiceError too_many_sessions() {
  return ServiceError::overloaded("TOO_MANY_SESSIONS", "the server holds all sessions it may");
}

}  // namespace

SessionEntry::~SessionEntry() { close(); }

void SessionEntry::close() noexcept {
  if (closed_) return;
  closed_ = true;
  session.reset();
  last_step = {};
  give_memory(memory_bytes);
  tenant.refund_kv(charged_bytes);
  tenant.refund_session();
  charged_bytes = 0;
}

void SessionEntry::remember(LastStep step) {
  const auto before = static_cast<std::int64_t>(last_step.reply.size());
  give_memory(before);
  last_step = std::move(step);
  const auto bytes = static_cast<std::int64_t>(last_step.reply.size());
  if (!take_memory(bytes)) last_step.reply = std::string();
}

bool SessionEntry::take_memory(std::int64_t bytes) noexcept {
  if (!tenant.take(Shared::kSessionMemory, bytes, memory.limit())) return false;
  if (!memory.take(bytes)) {
    tenant.give(Shared::kSessionMemory, bytes);
    return false;
  }
  memory_bytes += bytes;
  return true;
}

void SessionEntry::give_memory(std::int64_t bytes) noexcept {
  memory.give(bytes);
  tenant.give(Shared::kSessionMemory, bytes);
  memory_bytes -= bytes;
}

void SessionTable::check_room(std::size_t count, std::size_t most) const {
  if (size() + count > most) throw too_many_sessions();
}

void SessionTable::insert(const std::shared_ptr<SessionEntry>& entry, std::size_t most) {
  const std::lock_guard lock(mutex_);
  if (!add(entry, most)) throw too_many_sessions();
}

std::vector<std::shared_ptr<SessionEntry>> SessionTable::remove_all() {
  std::vector<std::shared_ptr<SessionEntry>> all;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < slots().size(); ++i) {
    if (slots()[i].entry != nullptr) all.push_back(vacate(i));
  }
  return all;
}

std::vector<std::shared_ptr<SessionEntry>> SessionTable::at_work_since(TimePoint then) const {
  std::vector<std::shared_ptr<SessionEntry>> found;
  const std::lock_guard lock(mutex_);
  for (const Slot& slot : slots()) {
    const TimePoint::rep began = slot.entry == nullptr ? 0 : slot.entry->work_began.load();
    if (began != 0 && began < then.time_since_epoch().count()) found.push_back(slot.entry);
  }
  return found;
}

std::pair<std::vector<std::string>, std::optional<std::uint32_t>> SessionTable::list(
    const Tenant& tenant, std::uint32_t first_slot, std::size_t count) const {
  std::vector<std::string> names;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = first_slot; i < slots().size(); ++i) {
    const auto& entry = slots()[i].entry;
    if (entry == nullptr || &entry->tenant != &tenant) continue;
    if (names.size() == count) return {std::move(names), i};
    names.push_back(entry->name);
  }
  return {std::move(names), std::nullopt};
}

}  // namespace kvtier::services
