#include "transfer/device/pinned_pages.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace kvtier::transfer {
namespace {

constexpr std::size_t kHugePage = 2 * MiB;
constexpr std::size_t kTouchPiece = 16 * MiB;

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t small_page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

void unpin_chunks(Pinner& pinner, std::byte* data, std::size_t bytes) noexcept {
  while (bytes != 0) {
    const std::size_t part = std::min(bytes, bytes_to_chunk_end(data));
    pinner.unpin(data);
    data += part;
    bytes -= part;
  }
}

void free_pages(void* pinner, std::byte* data, std::size_t bytes) noexcept {
  const std::size_t mapped = round_up(bytes, small_page());
  unpin_chunks(*static_cast<Pinner*>(pinner), data, mapped);
  munmap(data, mapped);
}

/// Maps whole pages, aligned to huge pages when there is one to fill. Returns nullptr when the
/// address space or the commit limit does not allow it.
std::byte* map_pages(std::size_t mapped) {
  const std::size_t slack = mapped >= kHugePage ? kHugePage : 0;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const base = mmap(nullptr, mapped + slack, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  auto* data = static_cast<std::byte*>(base);
  if (slack == 0) return data;
  const std::size_t head = round_up(reinterpret_cast<std::uintptr_t>(data), kHugePage) -
                           reinterpret_cast<std::uintptr_t>(data);
  if (head != 0) munmap(data, head);
  if (head != slack) munmap(data + head + mapped, slack - head);
  // Only a hint: pinning works on small pages too.
  static_cast<void>(madvise(data + head, mapped, MADV_HUGEPAGE));
  return data + head;
}

/// Asks for pages of one NUMA node. A hint: elsewhere they are slower, not wrong.
void prefer_node(std::byte* data, std::size_t bytes, int node) {
  unsigned long nodes = 0;
  if (node < 0 || node >= static_cast<int>(8 * sizeof(nodes))) return;
  nodes = 1UL << node;
  static_cast<void>(syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, &nodes, 8 * sizeof(nodes), 0U));
}

/// Touches [data, data + bytes) with several threads, front to back, while the caller pins what is
/// ready.
class FirstTouch {
 public:
  FirstTouch(std::byte* data, std::size_t bytes, int threads)
      : data_(data),
        bytes_(bytes),
        pieces_((bytes + kTouchPiece - 1) / kTouchPiece),
        ready_(pieces_) {
    const auto wanted = threads > 0 ? static_cast<unsigned>(threads)
                                    : std::max(1U, std::thread::hardware_concurrency());
    const std::size_t count = std::min<std::size_t>(wanted, pieces_);
    threads_.reserve(count);
    try {
      while (threads_.size() < count) threads_.emplace_back([this] { work(); });
    } catch (const std::exception&) {
      if (threads_.empty()) work();  // else those that there are do it
    }
  }
  FirstTouch(const FirstTouch&) = delete;  // threads point to it
  FirstTouch& operator=(const FirstTouch&) = delete;
  ~FirstTouch() {
    next_ = pieces_;
    for (std::thread& thread : threads_) thread.join();
  }

  /// Blocks until the first `bytes` bytes have been touched.
  void wait_for(std::size_t bytes) const {
    const std::size_t pieces = (bytes + kTouchPiece - 1) / kTouchPiece;
    for (std::size_t i = 0; i < pieces; ++i) ready_[i].wait(false);
  }

 private:
  void work() {
    const std::size_t page = small_page();
    for (std::size_t piece = next_++; piece < pieces_; piece = next_++) {
      const std::size_t end = std::min(bytes_, (piece + 1) * kTouchPiece);
      for (std::size_t i = piece * kTouchPiece; i < end; i += page) {
        *static_cast<volatile std::byte*>(data_ + i) = std::byte{0};
      }
      ready_[piece] = true;
      ready_[piece].notify_all();
    }
  }

  std::byte* data_;
  std::size_t bytes_;
  std::size_t pieces_;
  std::vector<std::atomic<bool>> ready_;
  std::atomic<std::size_t> next_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace

Buffer first_pinned(std::span<const PinMethod> methods, std::size_t bytes,
                    const std::function<void(LogLevel, std::string_view)>& log) {
  std::string reasons;
  for (std::size_t i = 0; i < methods.size(); ++i) {
    PinRefusal refusal;
    Buffer memory = methods[i].obtain(refusal);
    if (memory.data() != nullptr) return memory;
    reasons.append(reasons.empty() ? "" : "; ").append(methods[i].name).append(": ");
    reasons += refusal.why;
    if (refusal.no_memory || i + 1 == methods.size()) break;
    if (log) {
      log(LogLevel::kWarning, "pinned memory: " + std::string(methods[i].name) + " refused (" +
                                  refusal.why + "); trying " + std::string(methods[i + 1].name));
    }
  }
  throw_error(ErrorCode::kResourceExhausted, "pinned memory: wanted ", bytes, " bytes, found ",
              physical_bytes(), " of physical memory and a refusal: ", reasons);
}

Buffer pinned_pages(Pinner& pinner, int node, std::size_t bytes, const PinOptions& options,
                    PinRefusal& refusal) {
  const std::size_t mapped = bytes > physical_bytes() ? 0 : round_up(bytes, small_page());
  std::byte* const data = mapped == 0 ? nullptr : map_pages(mapped);
  if (data == nullptr) {
    refusal = {.why = "not all of it to be had", .no_memory = true};
    return {};
  }
  prefer_node(data, mapped, node);
  std::size_t pinned = 0;
  const auto give_back = [&] {
    unpin_chunks(pinner, data, pinned);
    munmap(data, mapped);
  };
  bool refused = false;
  try {
    touch_pages(data, mapped, options.threads, [&](std::size_t touched) {
      std::string why;
      const std::size_t part = touched - pinned;
      if (refused) return;
      if (!pinner.pin(data + pinned, part, why)) {
        refusal = {.why = "registering " + std::to_string(part) + " of them after " +
                          std::to_string(pinned) + " failed: " + why};
        refused = true;
        return;
      }
      pinned = touched;
      if (options.progress) options.progress(std::min(pinned, bytes), bytes);
    });
  } catch (...) {
    give_back();
    throw;
  }
  if (refused) {
    give_back();
    return {};
  }
  return {data, bytes, free_pages, &pinner};
}

void touch_pages(std::byte* data, std::size_t bytes, int threads,
                 const std::function<void(std::size_t)>& ready) {
  const FirstTouch touch(data, bytes, threads);
  for (std::size_t done = 0; done < bytes;) {
    done += std::min(bytes - done, bytes_to_chunk_end(data + done));
    touch.wait_for(done);
    ready(done);
  }
}

std::size_t bytes_to_chunk_end(const void* address) noexcept {
  return kPinChunk - reinterpret_cast<std::uintptr_t>(address) % kPinChunk;
}

std::size_t physical_bytes() noexcept {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * small_page();
}

}  // namespace kvtier::transfer
