#pragma once

#include "kvtier/engine.h"

#include "services/base/admission.h"
#include "services/base/executor.h"
#include "services/base/handle_table.h"
#include "services/base/tenants.h"
#include "services/core/model_pool.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvtier::services {

/// The last decode step of a session.
struct LastStep {
  int layer = -1;
  std::int64_t step = 0;  ///< 0: none.
  std::string request_digest;
  std::string reply;  ///< Empty when there was no memory to keep it.
};

/// One session: its engine's session, its queue, and what its tenant is charged for it.
struct SessionEntry {
  /// The tenant is charged for a session already; `memory` must outlive the entry.
  SessionEntry(Tenant& tenant_in, SessionMemoryBudget& memory_in, std::shared_ptr<Model> model_in,
               Executor& executor, std::int64_t piece_work_in)
      : tenant(tenant_in),
        memory(memory_in),
        model(std::move(model_in)),
        strand(executor.make_strand(
            {.tenant = tenant.index(), .weight = tenant.weight(), .engine = model.get()})),
        piece_work(piece_work_in) {}
  ~SessionEntry();
  SessionEntry(const SessionEntry&) = delete;  // its charge is given back once
  SessionEntry& operator=(const SessionEntry&) = delete;

  Tenant& tenant;
  SessionMemoryBudget& memory;
  const std::shared_ptr<Model> model;
  const std::unique_ptr<Strand> strand;  ///< Its pieces run one at a time with those of the engine.
  const std::int64_t piece_work;         ///< As `ServiceCoreOptions::piece_work`.
  std::string name;
  RetrievalConfig retrieval;
  std::int64_t capacity_tokens = 0;
  bool has_fingerprint = false;  ///< May publish.
  std::atomic<TimePoint::rep> lease_end{0};
  std::atomic<int> queued{0};  ///< Work that is not done; the lease does not end meanwhile.
  std::atomic<int> calls{0};   ///< Calls among them, a batch as one.
  /// Of the piece that the engine's device works at; 0: none.
  std::atomic<TimePoint::rep> work_began{0};

  // Used by tasks of the strand only.
  std::optional<Session> session;  ///< Gone once the session is released.
  std::int64_t base_bytes = 0;     ///< What a session keeps beside keys and values.
  std::int64_t charged_bytes = 0;  ///< To the tenant: `base_bytes`, keys and values.
  std::int64_t memory_bytes = 0;   ///< Taken of `memory`: `base_bytes` and the last reply.
  LastStep last_step;

  /// Returns whether the server and the tenant have room for `bytes` more beside the pages, and
  /// takes it if so.
  [[nodiscard]] bool take_memory(std::int64_t bytes) noexcept;
  /// Remembers a step; its reply only if there is memory for it.
  void remember(LastStep step);

  /// Ends the session and gives back what it was charged.
  void close() noexcept;

 private:
  void give_memory(std::int64_t bytes) noexcept;

  bool closed_ = false;
};

/// Marks a session as one that a device works for.
class BusyMark {
 public:
  BusyMark(SessionEntry& entry, TimePoint now) : entry_(entry) {
    current = &entry;
    go_on(now);
  }
  ~BusyMark() {
    current = nullptr;
    entry_.work_began = 0;
  }
  BusyMark(const BusyMark&) = delete;  // one end for one beginning
  BusyMark& operator=(const BusyMark&) = delete;

  /// The work that this thread has marked waits for something else than the device.
  static void pause() noexcept {
    if (current != nullptr) current->work_began = 0;
  }
  static void go_on(TimePoint now) noexcept {
    if (current != nullptr) current->work_began = now.time_since_epoch().count();
  }

 private:
  inline static thread_local SessionEntry* current = nullptr;
  SessionEntry& entry_;
};

/// Which sessions there are. `close` of those taken out is left to the caller. Thread-safe.
class SessionTable : public HandleTable<SessionEntry> {
 public:
  SessionTable() : HandleTable("session", "sessions/", "the session ended with its lease") {}

  /// Throws RESOURCE_EXHAUSTED (TOO_MANY_SESSIONS) where `count` more would be more than `most`.
  void check_room(std::size_t count, std::size_t most) const;
  /// Names `entry` and adds it. Throws as `check_room`.
  void insert(const std::shared_ptr<SessionEntry>& entry, std::size_t most);
  [[nodiscard]] std::vector<std::shared_ptr<SessionEntry>> remove_all();
  /// Returns the sessions whose call has been worked on since before `then`.
  [[nodiscard]] std::vector<std::shared_ptr<SessionEntry>> at_work_since(TimePoint then) const;

  /// Returns up to `count` names of the tenant's sessions from slot `first_slot` on, and the slot
  /// to go on with, or nothing at the end.
  [[nodiscard]] std::pair<std::vector<std::string>, std::optional<std::uint32_t>> list(
      const Tenant& tenant, std::uint32_t first_slot, std::size_t count) const;
};

}  // namespace kvtier::services
