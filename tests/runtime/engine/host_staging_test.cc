#include "runtime/engine/host_staging.h"

#include "support/fake_device.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtier::runtime {
namespace {

using testing::FakeDevice;

/// A fake device that passes for a GPU, so that host tensors are staged.
class ForeignDevice final : public transfer::Device {
 public:
  explicit ForeignDevice(FakeDevice& inner) : inner_(inner) {}
  [[nodiscard]] transfer::Buffer allocate(transfer::Space space, std::size_t bytes,
                                          const transfer::PinOptions& options) override {
    return inner_.allocate(space, bytes, options);
  }
  [[nodiscard]] std::unique_ptr<transfer::Stream> make_stream() override {
    return inner_.make_stream();
  }
  [[nodiscard]] std::unique_ptr<transfer::Stream> adopt(StreamRef external) override {
    return inner_.adopt(external);
  }
  [[nodiscard]] transfer::MemoryInfo memory() const override { return inner_.memory(); }
  [[nodiscard]] Backend backend() const noexcept override { return Backend::kCuda; }
  [[nodiscard]] std::string_view name() const noexcept override { return inner_.name(); }

 private:
  FakeDevice& inner_;
};

class HostStagingTest : public ::testing::Test {
 protected:
  FakeDevice fake_;
  ForeignDevice device_{fake_};
  std::unique_ptr<transfer::Stream> stream_ = device_.make_stream();
  HostStaging staging_{device_};
};

/// Elements 0, 1, 2 ... of a strided `[4, 2, 3]` tensor: tokens 10 apart, heads 4 apart.
struct Strided {
  std::vector<float> values = std::vector<float>(40);
  Strided() { std::iota(values.begin(), values.end(), 0.0F); }
  [[nodiscard]] MutableTensorView view() {
    MutableTensorView view(values.data(), DType::kFloat32, {4, 2, 3});
    view.strides = {10, 4, 1};
    return view;
  }
};

TEST_F(HostStagingTest, MakesSlicesOfHostTensorsDense) {
  Strided tensor;
  const HostStaging::Slice slice = staging_.input(*stream_, tensor.view(), 1, 2);
  fake_.run_all();

  EXPECT_EQ(slice.token_stride, 6);
  EXPECT_EQ(slice.head_stride, 3);
  const auto* data = static_cast<const float*>(slice.data);
  const std::vector<float> expected = {10, 11, 12, 14, 15, 16, 20, 21, 22, 24, 25, 26};
  EXPECT_EQ(std::vector<float>(data, data + 12), expected);
  staging_.finish(*stream_);
}

TEST_F(HostStagingTest, WritesOutputsBackAndNothingElse) {
  Strided tensor;
  const std::vector<float> before = tensor.values;
  const HostStaging::Slice slice = staging_.output(tensor.view(), 2, 1);
  auto* data = static_cast<float*>(slice.data);
  for (int i = 0; i < 6; ++i) data[i] = -1.0F - static_cast<float>(i);
  EXPECT_EQ(tensor.values, before);

  staging_.finish(*stream_);

  std::vector<float> expected = before;
  const std::vector<std::size_t> places = {20, 21, 22, 24, 25, 26};
  for (std::size_t i = 0; i < 6; ++i) expected[places[i]] = -1.0F - static_cast<float>(i);
  EXPECT_EQ(tensor.values, expected);
}

TEST_F(HostStagingTest, DeviceTensorsAreUsedInPlace) {
  Strided tensor;
  MutableTensorView view = tensor.view();
  view.space = MemorySpace::kDevice;
  const HostStaging::Slice in = staging_.input(*stream_, view, 1, 2);
  const HostStaging::Slice out = staging_.output(view, 3, 1);

  EXPECT_EQ(in.data, tensor.values.data() + 10);
  EXPECT_EQ(out.data, tensor.values.data() + 30);
  EXPECT_EQ(in.token_stride, 10);
  EXPECT_EQ(in.head_stride, 4);
  EXPECT_EQ(fake_.pending(*stream_), 0U);
  EXPECT_EQ(fake_.live_bytes(), 0U);
}

TEST_F(HostStagingTest, BuffersAreKeptAndGrow) {
  Strided tensor;
  const auto stage_once = [&] {
    (void)staging_.input(*stream_, tensor.view(), 0, 4);
    (void)staging_.output(tensor.view(), 0, 4);
    staging_.finish(*stream_);
    return fake_.live_bytes();
  };
  const std::size_t bytes = stage_once();
  EXPECT_GT(bytes, 0U);
  EXPECT_EQ(stage_once(), bytes);
}

/// As a batch of many sequences has: what comes later moves nothing that came before.
TEST_F(HostStagingTest, HoldsAnyNumberOfTensors) {
  constexpr std::size_t kCount = 300;
  std::vector<Strided> tensors(kCount);
  std::vector<float*> slices;
  for (Strided& tensor : tensors) {
    (void)staging_.input(*stream_, tensor.view(), 0, 1);
    slices.push_back(static_cast<float*>(staging_.output(tensor.view(), 3, 1).data));
  }
  for (std::size_t i = 0; i < kCount; ++i) slices[i][0] = -1.0F - static_cast<float>(i);
  staging_.finish(*stream_);
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(tensors[i].values[30], -1.0F - static_cast<float>(i)) << i;
  }
}

TEST_F(HostStagingTest, ABlockWhosePinnedMemoryWasRefusedIsAllocatedAgain) {
  Strided tensor;
  fake_.fail_allocation(2);
  EXPECT_ANY_THROW((void)staging_.input(*stream_, tensor.view(), 0, 4));
  staging_.discard();
  EXPECT_EQ(fake_.live_bytes(), 0U);

  const HostStaging::Slice slice = staging_.input(*stream_, tensor.view(), 3, 1);
  staging_.finish(*stream_);
  const auto* data = static_cast<const float*>(slice.data);
  EXPECT_EQ(std::vector<float>(data, data + 6), (std::vector<float>{30, 31, 32, 34, 35, 36}));
}

/// A call that ends by an error half-way leaves its tensors to the caller, who may free them.
TEST_F(HostStagingTest, AnAbandonedCallIsForgotten) {
  auto gone = std::make_unique<Strided>();
  (void)staging_.input(*stream_, gone->view(), 0, 1);
  (void)staging_.output(gone->view(), 0, 1);
  fake_.fail_allocation(1);
  EXPECT_ANY_THROW((void)staging_.output(gone->view(), 1, 1));
  const std::vector<float> before = gone->values;

  staging_.discard();
  Strided next;
  const HostStaging::Slice slice = staging_.output(next.view(), 0, 1);
  fake_.run_all();  // a kernel would write after the copies enqueued so far
  static_cast<float*>(slice.data)[0] = 77.0F;
  staging_.finish(*stream_);

  EXPECT_EQ(next.values[0], 77.0F);
  EXPECT_EQ(gone->values, before);
}

}  // namespace
}  // namespace kvtier::runtime
