#pragma once

#include "services/pages/page_layout.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::services {

/// The memory of one tenant's pages, laid out as page_layout.h says: a sealed file of anonymous
/// memory. This object has the only mapping that writes; a process that gets `fd` can neither write
/// nor shrink nor grow it. Nothing of it is in a core dump. Calls about different pages may be made
/// at the same time.
class PageArena {
 public:
  /// `data_bytes` is a multiple of `kUnitBytes`. Takes address space; memory is taken by `populate`
  /// and by writing. Throws `ServiceError` OUT_OF_MEMORY.
  PageArena(std::uint64_t data_bytes, std::uint32_t server_epoch);
  ~PageArena();
  PageArena(const PageArena&) = delete;  // owns a mapping
  PageArena& operator=(const PageArena&) = delete;

  /// Stays this object's own: duplicate it, or send it to another process.
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] std::uint64_t file_bytes() const noexcept { return file_bytes_; }
  [[nodiscard]] std::uint64_t num_units() const noexcept { return num_units_; }

  /// Returns memory for a page's bytes, asserted to lie within the arena.
  [[nodiscard]] std::span<std::byte> page(std::uint32_t slot, std::uint64_t length) const noexcept;
  /// Takes memory for units and their headers. Returns false when there is none.
  [[nodiscard]] bool populate(std::uint64_t first_unit, std::uint64_t count) const noexcept;

  /// Lets readers see a page that has been written.
  void publish(std::uint32_t slot, std::uint32_t generation, std::uint64_t length,
               std::uint32_t crc) noexcept;
  /// Ends that: when this returns, the page may be written over.
  void retract(std::uint32_t slot, std::uint32_t generation) noexcept;
  /// Tells readers that the server lives.
  void beat(std::chrono::steady_clock::time_point now) noexcept;

 private:
  [[nodiscard]] PageHeader& header(std::uint32_t slot) const noexcept;

  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::uint64_t num_units_ = 0, file_bytes_ = 0;
};

}  // namespace kvtier::services
