#pragma once

#include "services/page_cache/page_slots.h"
#include "services/wire/shared_region.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvtier::services {

/// Of which the digest of a place consists that is not to be used again.
inline constexpr unsigned char kQuarantinedDigest = 0xFF;

/// Memory of one tenant's pages that outlives the process which serves them: made before that
/// process is forked, it is the same memory in the next one. Beside what clients can map there is a
/// part for the server alone.
class PersistentArena {
 public:
  /// `data_bytes` as of `PageArena`. Throws `ServiceError` OUT_OF_MEMORY.
  explicit PersistentArena(std::uint64_t data_bytes);
  ~PersistentArena();
  PersistentArena(const PersistentArena&) = delete;  // owns a mapping
  PersistentArena& operator=(const PersistentArena&) = delete;

  [[nodiscard]] const std::shared_ptr<const SharedRegion>& memory() const noexcept {
    return memory_;
  }
  /// What the tenant's digests are salted with.
  [[nodiscard]] const std::array<unsigned char, 32>& salt() const noexcept { return book().salt; }
  /// What a page is called, to be written before the page is published. All zeros: nothing finds
  /// it; `kQuarantinedDigest` all along: its place is quarantined.
  [[nodiscard]] PageDigest& digest(std::uint32_t slot) const noexcept;

 private:
  friend class PersistentArenas;
  struct Book {
    std::atomic<std::uint64_t> owner;  ///< A tenant's index plus 1; 0: free.
    std::array<unsigned char, 32> salt;
  };
  [[nodiscard]] Book& book() const noexcept { return *static_cast<Book*>(private_); }

  std::shared_ptr<const SharedRegion> memory_;
  void* private_ = nullptr;
  std::uint64_t private_bytes_ = 0;
};

/// The arenas that a server may have, for as long as its supervisor lives. A process at a time uses
/// them.
class PersistentArenas {
 public:
  /// Takes address space for `count` arenas, and no memory. Throws as `PersistentArena`.
  PersistentArenas(std::size_t count, std::uint64_t data_bytes);

  /// Returns the arena of a tenant: the one that it had, else a free one, with a fresh
  /// salt; null when there is none. Throws `kUnavailable` without randomness. One caller at a time.
  [[nodiscard]] const PersistentArena* claim(std::uint32_t tenant) const;

 private:
  std::vector<std::unique_ptr<PersistentArena>> arenas_;
};

}  // namespace kvtier::services
