#include "services/page_cache/transfer_counts.h"

#include <algorithm>

namespace kvtier::services {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

template <std::size_t N>
std::size_t bucket_of(double value, const std::array<double, N>& bounds) {
  return static_cast<std::size_t>(std::lower_bound(bounds.begin(), bounds.end(), value) -
                                  bounds.begin());
}

template <std::size_t N>
std::array<std::uint64_t, N> read(const std::array<std::atomic<std::uint64_t>, N>& from) {
  std::array<std::uint64_t, N> values{};
  for (std::size_t i = 0; i < N; ++i) values[i] = from[i].load(kRelaxed);
  return values;
}

}  // namespace

TransferSums TransferCounts::of(TransferPlane plane, TransferDirection direction) const noexcept {
  const Sums& from = sums_[index_of(plane, direction)];
  return {.by_seconds = read(from.by_seconds),
          .by_pages = read(from.by_pages),
          .seconds = static_cast<double>(from.nanoseconds.load(kRelaxed)) / 1e9,
          .pages = from.pages.load(kRelaxed),
          .bytes = from.bytes.load(kRelaxed)};
}

Transfer::~Transfer() {
  const std::chrono::nanoseconds time = counts_.now_() - began_;
  const double seconds = std::chrono::duration<double>(time).count();
  sums_.by_seconds[bucket_of(seconds, TransferSums::kSecondBounds)].fetch_add(1, kRelaxed);
  sums_.by_pages[bucket_of(static_cast<double>(pages_), TransferSums::kPageBounds)].fetch_add(
      1, kRelaxed);
  sums_.nanoseconds.fetch_add(static_cast<std::uint64_t>(time.count()), kRelaxed);
  sums_.pages.fetch_add(pages_, kRelaxed);
  sums_.bytes.fetch_add(bytes_, kRelaxed);
}

}  // namespace kvtier::services
