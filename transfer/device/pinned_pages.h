#pragma once

#include "transfer/device/device.h"

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

/// Pinned memory, as far as it needs no GPU: which way is tried after which, and mapped memory that
/// is touched by several threads and pinned in chunks. Nothing is kept when any part fails.
namespace kvtier::transfer {

/// A chunk ends at a multiple of this address: a copy must not span two registrations.
inline constexpr std::size_t kPinChunk = 512 * MiB;

/// Who pins and unpins a chunk, for as long as any memory is pinned by it.
class Pinner {
 public:
  Pinner() = default;
  Pinner(const Pinner&) = delete;  // buffers point to it
  Pinner& operator=(const Pinner&) = delete;
  virtual ~Pinner() = default;

  /// Pins whole pages; returns false with the reason in `why_not`.
  [[nodiscard]] virtual bool pin(std::byte* data, std::size_t bytes, std::string& why_not) = 0;
  virtual void unpin(std::byte* data) noexcept = 0;
};

/// Why memory was not had.
struct PinRefusal {
  std::string why;
  bool no_memory = false;  ///< There is not enough of it: another way would not find more.
};

/// One way to obtain pinned memory; returns an empty buffer when it is refused.
struct PinMethod {
  std::string_view name;
  std::function<Buffer(PinRefusal& refusal)> obtain;
};

/// Returns `bytes` bytes by the first method that is not refused; logs each refusal that the next
/// method may make good. Throws `kResourceExhausted` with the sizes and every reason.
[[nodiscard]] Buffer first_pinned(std::span<const PinMethod> methods, std::size_t bytes,
                                  const std::function<void(LogLevel, std::string_view)>& log);

/// Maps `bytes` bytes, in huge pages where the kernel has some, on NUMA node `node` where there is
/// a choice (-1: anywhere), touches them with `options.threads` threads and pins each chunk once it
/// is touched, calling `options.progress`. Returns an empty buffer, with all given back, when that
/// is refused; what `options.progress` throws passes through, all given back as well.
[[nodiscard]] Buffer pinned_pages(Pinner& pinner, int node, std::size_t bytes,
                                  const PinOptions& options, PinRefusal& refusal);

/// Touches every page of memory with `threads` threads (0: all), or as many as the system has, and
/// calls `ready` with the bytes from the front that are touched, chunk by chunk, from the calling
/// thread. What `ready` throws passes through, with no thread left.
void touch_pages(std::byte* data, std::size_t bytes, int threads,
                 const std::function<void(std::size_t)>& ready);

/// Bytes from `address` to the end of its chunk.
[[nodiscard]] std::size_t bytes_to_chunk_end(const void* address) noexcept;

/// Memory of this machine.
[[nodiscard]] std::size_t physical_bytes() noexcept;

}  // namespace kvtier::transfer
