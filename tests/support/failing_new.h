#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

/// Allocations that a test lets fail. Defines the operators of the whole program: only one of its
/// sources may include this.
namespace kvtier::testing {

inline constexpr std::int64_t kAllAllocations = -1;
/// Allocations of this thread that succeed before one fails; those after it succeed again.
inline thread_local std::int64_t allocations_left = kAllAllocations;

inline void* allocate_or_fail(std::size_t size) noexcept {
  if (allocations_left == 0) {
    allocations_left = kAllAllocations;
    return nullptr;
  }
  if (allocations_left > 0) --allocations_left;
  return std::malloc(size > 0 ? size : 1);
}

}  // namespace kvtier::testing

// All forms but those for alignments, so that what one allocates another may free. Not inlined:
// the compiler would see memory of `new` go to `free`.
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (void* const memory = kvtier::testing::allocate_or_fail(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](std::size_t size) { return operator new(size); }
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t& /*tag*/) noexcept {
  return kvtier::testing::allocate_or_fail(size);
}
[[gnu::noinline]] void* operator new[](std::size_t size, const std::nothrow_t& /*tag*/) noexcept {
  return kvtier::testing::allocate_or_fail(size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*size*/) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t /*size*/) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t& /*tag*/) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, const std::nothrow_t& /*tag*/) noexcept {
  std::free(memory);
}
