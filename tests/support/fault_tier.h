#pragma once

#include "kvtier/page_tier.h"

#include "transfer/tiers/crc32c.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace kvtier::testing {

/// A tier in memory that fails as a test says.
class FaultTier final : public PageTier {
 public:
  struct Faults {
    TierStatus put = TierStatus::kOk;      ///< What puts answer; nothing is stored unless kOk.
    TierStatus get = TierStatus::kOk;      ///< What gets answer, whatever is stored.
    bool flip = false;                     ///< Gets answer kOk with one bit changed.
    bool swap = false;                     ///< Gets answer kOk with the bytes of another page.
    bool tells_crc = false;                ///< Gets name the CRC-32C of what they answer.
    bool half = false;                     ///< Of each batch of puts the second half is kFull.
    std::uint64_t good_puts = UINT64_MAX;  ///< Pages taken from now on; kUnavailable after them.
  };

  explicit FaultTier(bool retains = true, std::size_t max_pages = SIZE_MAX)
      : retains_(retains), max_pages_(max_pages) {}

  void put(std::span<TierPut> pages, Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      TierPut& page = pages[i];
      page.status = faults_.put;
      if (faults_.half && i >= pages.size() / 2) page.status = TierStatus::kFull;
      if (page.status == TierStatus::kOk && faults_.good_puts-- == 0) {
        faults_.good_puts = 0;
        page.status = TierStatus::kUnavailable;
      }
      if (page.status == TierStatus::kOk && pages_.size() >= max_pages_) {
        page.status = TierStatus::kFull;
      }
      ++puts_;
      if (page.status == TierStatus::kOk) {
        pages_[page.key].assign(page.bytes.begin(), page.bytes.end());
      }
    }
  }
  void get(std::span<TierGet> pages, Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    for (TierGet& page : pages) {
      ++gets_;
      const auto found = pages_.find(page.key);
      page.status = found == pages_.end() ? TierStatus::kMiss : faults_.get;
      if (page.status != TierStatus::kOk) continue;
      const auto from = faults_.swap && pages_.size() > 1
                            ? (std::next(found) == pages_.end() ? pages_.begin() : std::next(found))
                            : found;
      std::copy(from->second.begin(), from->second.end(), page.bytes.begin());
      if (faults_.flip) page.bytes[gets_ * 37 % page.bytes.size()] ^= std::byte{0x10};
      if (faults_.tells_crc) page.crc = crc32c(page.bytes);
    }
  }
  void remove(std::span<const PageKey> keys, Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    for (const PageKey& key : keys) pages_.erase(key);
  }
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override { return 1U << 24U; }
  [[nodiscard]] bool retains() const noexcept override { return retains_; }
  [[nodiscard]] TierStats stats() const override { return {}; }
  [[nodiscard]] std::string describe() const override { return "fault tier"; }

  void set(const Faults& faults) {
    const std::lock_guard lock(mutex_);
    faults_ = faults;
  }
  /// Forgets every page.
  void forget() {
    const std::lock_guard lock(mutex_);
    pages_.clear();
  }
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return pages_.size();
  }
  [[nodiscard]] std::uint64_t puts() const {
    const std::lock_guard lock(mutex_);
    return puts_;
  }

 private:
  const bool retains_;
  const std::size_t max_pages_;
  mutable std::mutex mutex_;  // guards what follows
  Faults faults_;
  std::map<PageKey, std::vector<std::byte>> pages_;
  std::uint64_t puts_ = 0;
  std::uint64_t gets_ = 0;
};

}  // namespace kvtier::testing
