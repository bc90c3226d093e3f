#include "kvtier/config.h"

#include "benchmarks/service/measure.h"
#include "benchmarks/tiers/benchmarks.h"
#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/file_ops.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace kvtier::bench {
namespace {

/// Copies every page to a frame of a small pool in a random order, as pages come back from host
/// memory, and optionally verifies each.
class Restore {
 public:
  Restore(std::size_t page_bytes, std::size_t bytes)
      : page_bytes_(page_bytes),
        pages_memory_(bytes),
        frames_memory_(64 * page_bytes),
        order_(bytes / page_bytes) {
    std::mt19937_64 random(1);
    for (std::size_t i = 0; i + 8 <= pages_.size(); i += 8) {
      const std::uint64_t word = random();
      std::memcpy(&pages_[i], &word, 8);
    }
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::shuffle(order_.begin(), order_.end(), random);
    for (std::size_t i = 0; i < order_.size(); ++i) {
      sums_.push_back(crc32c({&pages_[i * page_bytes], page_bytes}));
    }
  }

  void run(bool verify) {
    for (std::size_t i = 0; i < order_.size(); ++i) {
      std::byte* const frame = &frames_[i % 64 * page_bytes_];
      const std::byte* const page = &pages_[order_[i] * page_bytes_];
      if (!verify) {
        std::memcpy(frame, page, page_bytes_);
      } else if (crc32c_copy({frame, page_bytes_}, {page, page_bytes_}) != sums_[order_[i]]) {
        ++wrong_;
      }
    }
  }
  [[nodiscard]] std::size_t wrong() const { return wrong_; }

 private:
  std::size_t page_bytes_;
  tiers::AlignedBuffer pages_memory_, frames_memory_;  // as frames of a pool are
  std::span<std::byte> pages_ = pages_memory_.bytes(), frames_ = frames_memory_.bytes();
  std::vector<std::size_t> order_;
  std::vector<std::uint32_t> sums_;
  std::size_t wrong_ = 0;
};

}  // namespace

nlohmann::json checksum_rows(const TierSettings& settings) {
  nlohmann::json rows = nlohmann::json::array();
  const std::size_t bytes = std::min(settings.bytes, 512 * MiB);
  for (const std::size_t page_bytes : {64 * KiB, 256 * KiB}) {
    Restore restore(page_bytes, bytes);
    const Comparison both = compare(
        settings.rounds, [&] { restore.run(true); }, [&] { restore.run(false); });
    if (restore.wrong() > 0) throw std::runtime_error("a page has changed in memory");
    const double size = static_cast<double>(bytes) / 1e9;
    rows.push_back({{"what", "checksum_cost"},
                    {"page_bytes", page_bytes},
                    {"gbps", size / both.first},
                    {"baseline_gbps", size / both.second},
                    {"overhead", both.ratio - 1},
                    {"overhead_least", both.least - 1},
                    {"overhead_most", both.most - 1}});
  }
  return rows;
}

}  // namespace kvtier::bench
