#pragma once

#include "runtime/spill_fixture.h"
#include "support/fault_tier.h"

#include <cstddef>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::testing {

/// A tier that knows the frames whose pages it has been given, or has given back.
class WatchingTier final : public PageTier {
 public:
  void put(std::span<TierPut> pages, Deadline deadline) override {
    {
      const std::lock_guard lock(mutex_);
      for (const TierPut& page : pages) {
        frames_.emplace_back(const_cast<std::byte*>(page.bytes.data()), page.bytes.size());
      }
    }
    tier.put(pages, deadline);
  }
  void get(std::span<TierGet> pages, Deadline deadline) override {
    {
      const std::lock_guard lock(mutex_);
      for (const TierGet& page : pages) frames_.emplace_back(page.bytes);
    }
    tier.get(pages, deadline);
  }
  void remove(std::span<const PageKey> keys, Deadline deadline) override {
    tier.remove(keys, deadline);
  }
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override {
    return tier.max_page_bytes();
  }
  [[nodiscard]] bool retains() const noexcept override { return true; }
  [[nodiscard]] TierStats stats() const override { return {}; }
  [[nodiscard]] std::string describe() const override { return "watching tier"; }

  /// Returns the frames since it was asked last.
  std::vector<std::span<std::byte>> take_frames() {
    const std::lock_guard lock(mutex_);
    return std::exchange(frames_, {});
  }

  FaultTier tier;

 private:
  std::mutex mutex_;  // guards frames_
  std::vector<std::span<std::byte>> frames_;
};

/// Sends pages of a session to the engine's tier, for `tokens` tokens of each layer that another
/// one appends, and has them all back. Returns the frames that they have now.
inline std::vector<std::span<std::byte>> evicted_and_restored(Engine& engine, Session& session,
                                                              WatchingTier& tier,
                                                              std::int64_t tokens) {
  const ModelConfig& model = engine.config().model;
  {
    Session other = engine.open();
    // In one call and layer: its own pages cannot go for later ones.
    append_random(other, model, 0, model.layers * tokens, 8);
  }
  (void)tier.take_frames();
  for (int layer = 0; layer < model.layers; ++layer) (void)all_rows(session, model, layer);
  std::vector<std::span<std::byte>> frames = tier.take_frames();
  EXPECT_GT(frames.size(), 10U);
  return frames;
}

}  // namespace kvtier::testing
