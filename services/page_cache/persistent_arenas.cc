#include "services/page_cache/persistent_arenas.h"

#include "services/base/secrets.h"
#include "services/base/service_error.h"
#include "services/page_cache/page_arena.h"

#include <new>
#include <sys/mman.h>

namespace kvtier::services {
namespace {

/// The digests begin here: one for each unit.
constexpr std::uint64_t kDigestsOffset = kUnitBytes;

}  // namespace

PersistentArena::PersistentArena(std::uint64_t data_bytes)
    : memory_(make_arena_memory(data_bytes)),
      private_bytes_(kDigestsOffset + data_bytes / kUnitBytes * sizeof(PageDigest)) {
  static_assert(sizeof(Book) <= kDigestsOffset);
  private_ = ::mmap(nullptr, private_bytes_, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (private_ == MAP_FAILED) {
    throw ServiceError::overloaded("OUT_OF_MEMORY", "the server has no memory for pages");
  }
  (void)::madvise(private_, private_bytes_, MADV_DONTDUMP);
  ::new (private_) Book{};
}

PersistentArena::~PersistentArena() { ::munmap(private_, private_bytes_); }

PageDigest& PersistentArena::digest(std::uint32_t slot) const noexcept {
  auto* digests = static_cast<std::byte*>(private_) + kDigestsOffset;
  return reinterpret_cast<PageDigest*>(digests)[slot];
}

PersistentArenas::PersistentArenas(std::size_t count, std::uint64_t data_bytes) {
  for (std::size_t i = 0; i < count; ++i) {
    arenas_.push_back(std::make_unique<PersistentArena>(data_bytes));
  }
}

const PersistentArena* PersistentArenas::claim(std::uint32_t tenant) const {
  const PersistentArena* unowned = nullptr;
  for (const auto& arena : arenas_) {
    const std::uint64_t owner = arena->book().owner;
    if (owner == std::uint64_t{tenant} + 1) return arena.get();
    if (owner == 0 && unowned == nullptr) unowned = arena.get();
  }
  if (unowned == nullptr) return nullptr;
  PersistentArena::Book& book = unowned->book();
  draw(std::as_writable_bytes(std::span(book.salt)), "pages");
  book.owner = std::uint64_t{tenant} + 1;
  return unowned;
}

}  // namespace kvtier::services
