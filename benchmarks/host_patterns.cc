#include "benchmarks/host_patterns.h"

#include <algorithm>
#include <stdexcept>

namespace kvtier::benchmarks {
namespace {

constexpr std::uint64_t kKi = 1 << 10;
constexpr std::uint64_t kMi = 1 << 20;
constexpr std::uint64_t kGi = 1 << 30;

// A permutation of [0, n) that is cheap to evaluate at any point: four Feistel rounds over the next
// even power of two, walked until the value falls inside.
class Permutation {
 public:
  Permutation(std::uint64_t n, std::uint64_t seed) : n_(n), seed_(seed) {
    while ((std::uint64_t{1} << (2 * half_bits_)) < n) ++half_bits_;
  }
  std::uint64_t operator()(std::uint64_t i) const {
    do {
      i = shuffle(i);
    } while (i >= n_);
    return i;
  }

 private:
  std::uint64_t shuffle(std::uint64_t i) const {
    const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
    std::uint64_t left = i >> half_bits_;
    std::uint64_t right = i & mask;
    for (std::uint64_t round = 0; round < 4; ++round) {
      std::uint64_t x = right + seed_ + (round << 40);
      x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15ULL;
      x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9ULL;
      const std::uint64_t next = left ^ ((x >> 32) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  std::uint64_t n_;
  std::uint64_t seed_;
  unsigned half_bits_ = 1;
};

std::string size_name(std::uint64_t bytes) {
  if (bytes >= kGi) return std::to_string(bytes / kGi) + " GiB";
  if (bytes >= kMi) return std::to_string(bytes / kMi) + " MiB";
  return std::to_string(bytes / kKi) + " KiB";
}

// Rows of a drawn slot; `round` counts how often all slots have been drawn.
void place(const Pattern& pattern, std::uint64_t slot, std::uint64_t round, std::uint32_t* out) {
  if (pattern.cluster != 0) {
    const std::uint64_t rows = pattern.cluster / kRowBytes;
    std::uint64_t x = (slot + 1 + (round << 32)) * 0x9E3779B97F4A7C15ULL;
    x ^= x >> 29;
    // One row in each half, so that they are never neighbours in a page of 4 KiB by choice alone.
    out[0] = static_cast<std::uint32_t>(slot * rows + x % (rows / 2));
    out[1] = static_cast<std::uint32_t>(slot * rows + rows / 2 + (x >> 32) % (rows / 2));
    return;
  }
  for (std::uint64_t r = 0; r < pattern.run; ++r) {
    out[r] = static_cast<std::uint32_t>(slot * pattern.run + r);
  }
}

}  // namespace

std::vector<Pattern> patterns(const std::string& name) {
  using Order = Pattern::Order;
  std::vector<Pattern> all;
  if (name == "random") {
    all = {{.name = "random"}};
  } else if (name == "same") {
    all = {{.name = "same", .same = true}};
  } else if (name == "sorted") {
    all = {{.name = "sorted", .order = Order::kAscending}};
  } else if (name == "layers") {
    for (const std::uint64_t bytes : {512 * kMi, kGi, 4 * kGi}) {
      const std::string layer = "layer of " + size_name(bytes);
      all.push_back({.name = layer + ", by head", .window = bytes, .order = Order::kPerHead});
      all.push_back({.name = layer + ", as drawn", .window = bytes});
      all.push_back({.name = layer + ", sorted", .window = bytes, .order = Order::kAscending});
    }
  } else if (name == "runs") {
    for (const std::uint64_t run : {2U, 3U, 4U, 8U, 32U, 128U}) {
      all.push_back({.name = "runs of " + std::to_string(run), .run = run});
    }
  } else if (name == "clusters") {
    for (const std::uint64_t bytes : {2 * kKi, 4 * kKi, 8 * kKi, 16 * kKi, 32 * kKi, 64 * kKi,
                                      128 * kKi, 256 * kKi, kMi, 2 * kMi, 4 * kMi}) {
      all.push_back({.name = "two in " + size_name(bytes), .run = 2, .cluster = bytes});
    }
  } else if (name == "windows") {
    for (const std::uint64_t bytes : {16 * kMi, 64 * kMi, 256 * kMi, kGi, 4 * kGi, 16 * kGi}) {
      all.push_back({.name = "within " + size_name(bytes), .window = bytes});
    }
  } else if (name == "places") {
    all = {{.name = "each 2 GiB", .window = 2 * kGi, .hold = 8}};
  } else {
    throw std::runtime_error(
        "--patterns: expected random, same, sorted, layers, runs, clusters, windows or places, "
        "found " +
        name);
  }
  return all;
}

std::vector<std::uint32_t> draw(const Pattern& pattern, std::uint64_t region_bytes, int calls,
                                int rows, std::uint64_t& cursor) {
  const std::uint64_t window =
      pattern.window == 0 ? region_bytes : std::min(pattern.window, region_bytes);
  const std::uint64_t windows = region_bytes / window;
  const std::uint64_t slot_bytes = pattern.cluster != 0 ? pattern.cluster : pattern.run * kRowBytes;
  const std::uint64_t slots = window / slot_bytes;
  const std::uint64_t per_call = static_cast<std::uint64_t>(rows) / pattern.run;
  const std::uint64_t sets = slots / per_call;  // calls until a window has been walked
  if (sets == 0) {
    throw std::runtime_error("expected a window of at least " + std::to_string(per_call) +
                             " slots, found " + std::to_string(slots));
  }
  const Permutation permutation(slots, 17);
  const std::uint64_t first = cursor;
  cursor += static_cast<std::uint64_t>(calls);
  std::vector<std::uint32_t> ids;
  ids.reserve(static_cast<std::size_t>(calls) * static_cast<std::size_t>(rows));
  for (int c = 0; c < calls; ++c) {
    const std::uint64_t call = pattern.same ? 0 : first + static_cast<std::uint64_t>(c);
    const std::uint64_t place_of = call / pattern.hold;
    const std::uint64_t base = place_of % windows * (window / slot_bytes);
    const std::uint64_t drawn = place_of / windows * pattern.hold + call % pattern.hold;
    const std::uint64_t set = drawn % sets;
    std::vector<std::uint32_t> one(per_call * pattern.run);
    for (std::uint64_t i = 0; i < per_call; ++i) {
      place(pattern, base + permutation(set * per_call + i), drawn / sets,
            one.data() + i * pattern.run);
    }
    one.resize(static_cast<std::size_t>(rows), one.front());
    // Pages of the pool are [8 heads, 64 tokens].
    const auto head = [](std::uint32_t id) { return id / 64 % 8; };
    if (pattern.order == Pattern::Order::kAscending) std::sort(one.begin(), one.end());
    if (pattern.order == Pattern::Order::kPerHead) {
      std::sort(one.begin(), one.end(), [&](std::uint32_t a, std::uint32_t b) {
        return head(a) != head(b) ? head(a) < head(b) : a < b;
      });
    }
    ids.insert(ids.end(), one.begin(), one.end());
  }
  return ids;
}

std::uint64_t distinct_pages(std::vector<std::uint32_t> ids, std::uint64_t page_bytes) {
  for (std::uint32_t& id : ids) id = static_cast<std::uint32_t>(id / (page_bytes / kRowBytes));
  std::sort(ids.begin(), ids.end());
  return static_cast<std::uint64_t>(std::unique(ids.begin(), ids.end()) - ids.begin());
}

}  // namespace kvtier::benchmarks
