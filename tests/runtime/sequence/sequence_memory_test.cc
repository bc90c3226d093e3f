#include "runtime/sequence/sequence_memory.h"

#include "kvtier/error.h"

#include "support/fake_device.h"
#include "support/fault_tier.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace kvtier::runtime {
namespace {

/// Sequences of two layers over a pool with a tier, whose pages a test evicts one by one.
class SequenceMemoryTest : public ::testing::Test, private PagePool::Owner {
 protected:
  static constexpr std::int64_t kPages = 3;  ///< Of each layer of a sequence.
  static constexpr std::size_t kFrames = 32;

  SequenceMemoryTest() {
    PagePool::Owner& owner = *this;
    pools_.pages = std::make_unique<PagePool>(device_, page_bytes(), kFrames * page_bytes(),
                                              transfer::PinOptions{}, tiers_, owner);
  }
  ~SequenceMemoryTest() override {
    for (const auto& memory : {&a_, &other_}) {
      if (*memory) (*memory)->release(*stream_);
    }
    device_.run_all();
  }
  void SetUp() override {
    for (const auto& memory : {&a_, &other_}) {
      memory->emplace(pools_, kPages * pools_.kv.page_tokens);
      (*memory)->clear(*stream_);
      for (LayerState& layer : (*memory)->layers()) {
        ASSERT_TRUE(layer.pages.grow(*stream_, kPages));
      }
    }
    device_.run_all();
  }

  [[nodiscard]] std::size_t page_bytes() const {
    return static_cast<std::size_t>(pools_.kv.page_bytes());
  }
  void evict(Page& page) {
    pools_.pages->seal(page);
    ASSERT_EQ(pools_.pages->evict(*stream_, 1), 1U) << "no other page is sealed";
    ASSERT_EQ(PagePool::address(page), nullptr);
  }
  std::optional<ErrorCode> capture() {
    try {
      a_->capture();
    } catch (const Error& error) {
      return error.code();
    }
    return std::nullopt;
  }

 private:
  void wait_for_work(transfer::Stream& /*stream*/) override { device_.run_all(); }
  void run_unlocked(const std::function<void()>& work) override { work(); }

 protected:
  testing::FakeDevice device_;
  std::unique_ptr<transfer::Stream> stream_ = device_.make_stream();
  Pools pools_{
      .device = device_, .kv = {.kv_heads = 1, .head_dim = 64, .page_tokens = 16}, .layers = 2};
  PageTiers tiers_{
      {std::make_shared<testing::FaultTier>()}, page_bytes(), std::chrono::seconds(60), {}};
  std::optional<SequenceMemory> a_, other_;
};

TEST_F(SequenceMemoryTest, ACaptureGoesOnWhilePagesOfOthersAreEvicted) {
  PageTable& of_other = other_->layers()[0].pages;
  evict(of_other.page(0));
  EXPECT_EQ(capture(), std::nullopt);
  EXPECT_TRUE(a_->captured());

  evict(of_other.page(1));
  EXPECT_EQ(capture(), std::nullopt) << "the next call of the same capture";
}

TEST_F(SequenceMemoryTest, ACaptureNeedsItsOwnPagesWhereTheDeviceReadsThem) {
  Page& page = a_->layers()[1].pages.page(1);
  const std::byte* const before = PagePool::address(page);
  evict(page);
  EXPECT_EQ(capture(), ErrorCode::kFailedPrecondition);

  // Restored to another frame, by a sequence that shares it.
  Page* taken = nullptr;
  ASSERT_TRUE(pools_.pages->take_all({&taken, 1}));
  Page* const restored[] = {&page};
  ASSERT_TRUE(pools_.pages->ensure_resident(*stream_, restored));
  ASSERT_NE(PagePool::address(page), before);
  EXPECT_EQ(capture(), ErrorCode::kFailedPrecondition);
  EXPECT_FALSE(a_->captured());

  ASSERT_TRUE(a_->ensure_resident(*stream_));
  evict(other_->layers()[1].pages.page(2));
  EXPECT_EQ(capture(), std::nullopt);
  EXPECT_TRUE(a_->captured());
  pools_.pages->give_back({&taken, 1}, {});
}

}  // namespace
}  // namespace kvtier::runtime
