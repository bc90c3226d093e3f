#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

/// What another process sees of a tenant's arena: a file of anonymous memory that the server writes
/// and other processes can map for reading only. Numbers are little-endian. Of version 1:
///
///     0               ArenaHeader
///     4096            PageHeader[num_units]
///     data_offset     units of 4096 bytes, num_units of them
///
/// A page occupies whole units from the unit that is its slot; its header is the header of that
/// unit. A reply gives slot, generation and length of a page; the client reads the page between two
/// looks at the header, or under a pin.
namespace kvtier::services {

inline constexpr std::uint64_t kArenaMagic = 0x31'45'47'41'50'54'56'4B;  // "KVTPAGE1"
inline constexpr std::uint32_t kPageLayoutVersion = 1;
inline constexpr std::uint64_t kUnitBytes = 4096;

/// The first bytes of an arena.
struct ArenaHeader {
  std::uint64_t magic;
  std::uint32_t layout_version;
  std::uint32_t server_epoch;  ///< Of the handles of these pages.
  std::uint64_t num_units;
  std::uint64_t data_offset;  ///< Of unit 0.
  std::uint64_t file_bytes;
  /// Nanoseconds of CLOCK_MONOTONIC when the server last said that it lives.
  std::atomic<std::uint64_t> heartbeat;
};
static_assert(sizeof(ArenaHeader) <= kUnitBytes);

/// What is written of one page.
struct PageHeader {
  /// 2 * generation while the page of that generation can be read; odd, or 0, while there is none.
  std::atomic<std::uint64_t> version;
  std::uint64_t length;  ///< Bytes of the page.
  std::uint32_t crc32c;  ///< Of these bytes.
  std::uint32_t reserved[11];
};
static_assert(sizeof(PageHeader) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr std::uint64_t kPageHeadersOffset = kUnitBytes;

/// Returns where unit 0 of an arena of `num_units` units begins.
[[nodiscard]] constexpr std::uint64_t arena_data_offset(std::uint64_t num_units) noexcept {
  const std::uint64_t end = kPageHeadersOffset + num_units * sizeof(PageHeader);
  return (end + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
}
[[nodiscard]] constexpr std::uint64_t arena_file_bytes(std::uint64_t num_units) noexcept {
  return arena_data_offset(num_units) + num_units * kUnitBytes;
}
/// Returns how many units a page takes.
[[nodiscard]] constexpr std::uint64_t units_of(std::uint64_t length) noexcept {
  return (length + kUnitBytes - 1) / kUnitBytes;
}
/// Returns where the page of a slot begins in the file.
[[nodiscard]] constexpr std::uint64_t page_offset(std::uint64_t num_units,
                                                  std::uint32_t slot) noexcept {
  return arena_data_offset(num_units) + std::uint64_t{slot} * kUnitBytes;
}

/// A mapped arena, for reading. Does not own the mapping.
class ArenaView {
 public:
  /// Returns nothing unless `file` is a whole arena of this layout.
  [[nodiscard]] static std::optional<ArenaView> of(std::span<const std::byte> file) noexcept {
    if (file.size() < kUnitBytes) return std::nullopt;
    const ArenaView view(file.data());
    const ArenaHeader& header = view.header();
    if (header.magic != kArenaMagic || header.layout_version != kPageLayoutVersion ||
        header.num_units > file.size() / kUnitBytes ||
        header.data_offset != arena_data_offset(header.num_units) ||
        header.file_bytes != arena_file_bytes(header.num_units) ||
        header.file_bytes > file.size()) {
      return std::nullopt;
    }
    return view;
  }

  [[nodiscard]] const ArenaHeader& header() const noexcept {
    return *reinterpret_cast<const ArenaHeader*>(base_);
  }
  /// `slot` is below `num_units`, here and below.
  [[nodiscard]] const PageHeader& page_header(std::uint32_t slot) const noexcept {
    return reinterpret_cast<const PageHeader*>(base_ + kPageHeadersOffset)[slot];
  }
  [[nodiscard]] const std::byte* page(std::uint32_t slot) const noexcept {
    return base_ + page_offset(header().num_units, slot);
  }

  /// Returns whether the page of this generation can be read now.
  [[nodiscard]] bool is_readable(std::uint32_t slot, std::uint32_t generation) const noexcept {
    return page_header(slot).version.load(std::memory_order_acquire) ==
           2 * std::uint64_t{generation};
  }

  /// Later reads are made after earlier ones.
  static void order_reads() noexcept {
#if defined(__SANITIZE_THREAD__)
    asm volatile("" ::: "memory");  // knows no fences
#else
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
  }

 private:
  explicit ArenaView(const std::byte* base) : base_(base) {}

  const std::byte* base_;
};

}  // namespace kvtier::services
