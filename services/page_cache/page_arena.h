#pragma once

#include "services/wire/page_layout.h"
#include "services/wire/shared_region.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace kvtier::services {

/// Makes memory for an arena of `data_bytes`, a multiple of `kUnitBytes`, which other processes can
/// read only. Throws `ServiceError` OUT_OF_MEMORY.
[[nodiscard]] std::shared_ptr<const SharedRegion> make_arena_memory(std::uint64_t data_bytes);

/// The memory of one tenant's pages, laid out as page_layout.h says. Calls about different pages
/// may be made at the same time.
class PageArena {
 public:
  /// In memory of `make_arena_memory`, whose pages stay where an arena was there before. Throws
  /// `ServiceError` OUT_OF_MEMORY.
  PageArena(std::shared_ptr<const SharedRegion> memory, std::uint64_t num_units,
            std::uint32_t server_epoch);

  [[nodiscard]] int fd() const noexcept { return memory_->descriptor(); }
  [[nodiscard]] std::uint64_t file_bytes() const noexcept { return memory_->bytes().size(); }
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
  /// Returns the header of a unit, as clients see it.
  [[nodiscard]] const PageHeader& header_of(std::uint32_t slot) const noexcept {
    return header(slot);
  }
  /// Returns whether headers of these units were ever written; reading others takes memory.
  [[nodiscard]] bool has_headers(std::uint64_t first_unit, std::uint64_t count) const noexcept;
  /// Returns whether these units and their headers have memory, all of them.
  [[nodiscard]] bool is_populated(std::uint64_t first_unit, std::uint64_t count) const noexcept;
  /// Shows readers that the server lives.
  void beat(std::chrono::steady_clock::time_point now) noexcept;

 private:
  [[nodiscard]] PageHeader& header(std::uint32_t slot) const noexcept;

  std::shared_ptr<const SharedRegion> memory_;
  std::byte* base_ = nullptr;
  std::uint64_t num_units_ = 0;
};

}  // namespace kvtier::services
