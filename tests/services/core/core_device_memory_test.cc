#include "services/base/from_message.h"
#include "tests/services/core/core_fixture.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Tensors in a region of the tenant. On the CPU backend device memory is host memory, so that it
/// can be looked at.
class CoreDeviceMemory : public CoreTest {
 protected:
  static constexpr std::int64_t kBytes = 1 << 20;
  static constexpr std::int64_t kOut = kBytes / 2;
  static constexpr std::int64_t kLse = kOut + 4096;

  void SetUp() override {
    ServiceCoreOptions options = small_options();
    options.tenants = two_tenants();
    make_core(std::move(options));
    memory_ = share(0, region_);
    ours_ = open();
    theirs_ = open();
    for (int layer = 0; layer < kLayers; ++layer) {
      const v1::AppendRequest request = append_request(layer, 200, 1);
      ASSERT_EQ(append(ours_, request).reason(), "OK");
      ASSERT_EQ(append(theirs_, request).reason(), "OK");
    }
  }
  std::byte* share(std::size_t index, std::string& name) {
    std::shared_ptr<std::byte> memory(new std::byte[kBytes](), std::default_delete<std::byte[]>());
    name = tenant(index).regions().add({memory, kBytes});
    return memory.get();
  }
  [[nodiscard]] v1::DeviceMemory place(std::int64_t offset) const {
    v1::DeviceMemory place;
    place.set_region(region_);
    place.set_offset(offset);
    return place;
  }
  /// Moves the bytes of a tensor to the region.
  void move(v1::Tensor& tensor, std::int64_t offset) {
    std::ranges::copy(std::as_bytes(std::span(tensor.data())), memory_ + offset);
    tensor.clear_data();
    *tensor.mutable_memory() = place(offset);
  }
  v1::DecodeRequest moved_step(const std::string& session, std::int64_t step) {
    v1::DecodeRequest request = decode_request(session, 0, step, 77);
    move(*request.mutable_query(), 0);
    move(*request.mutable_key(), 4096);
    move(*request.mutable_value(), 8192);
    *request.mutable_out_memory() = place(kOut);
    *request.mutable_lse_memory() = place(kLse);
    return request;
  }
  [[nodiscard]] std::string bytes_at(std::int64_t offset, std::size_t count) const {
    return {reinterpret_cast<const char*>(memory_ + offset), count};
  }
  std::string refusal(const v1::DecodeRequest& request) {
    v1::DecodeResponse response;
    const Ending ending = decode(request, response);
    return ending.reason() + ": " + (ending.error ? ending.error->what() : "");
  }

  std::string region_, ours_, theirs_;
  std::byte* memory_ = nullptr;
};

TEST_F(CoreDeviceMemory, DecodesTheBitsOfHostTensors) {
  v1::DecodeResponse moved;
  v1::DecodeResponse expected;
  ASSERT_EQ(decode(moved_step(ours_, 1), moved).reason(), "OK");
  ASSERT_EQ(decode(decode_request(theirs_, 0, 1, 77), expected).reason(), "OK");

  EXPECT_TRUE(moved.out().data().empty());
  EXPECT_EQ(moved.out().memory().offset(), kOut);
  EXPECT_THAT(moved.out().shape(), ElementsAre(1, kQueryHeads, kHeadDim));
  EXPECT_EQ(bytes_at(kOut, expected.out().data().size()), expected.out().data());
  EXPECT_EQ(bytes_at(kLse, expected.lse().data().size()), expected.lse().data());
  EXPECT_EQ(lengths(ours_), lengths(theirs_));
}

TEST_F(CoreDeviceMemory, AppendsSelectsAndAttends) {
  v1::AppendRequest chunk = append_request(1, 100, 5);
  ASSERT_EQ(append(theirs_, chunk).reason(), "OK");
  move(*chunk.mutable_key(), 0);
  move(*chunk.mutable_value(), 256 << 10);
  ASSERT_EQ(append(ours_, chunk).reason(), "OK");
  EXPECT_EQ(lengths(ours_), lengths(theirs_));

  v1::SelectRequest select;
  select.set_layer(1);
  *select.mutable_query() = random_tensor(2, kQueryHeads, 9);
  v1::AttendRequest attend;
  attend.set_layer(1);
  *attend.mutable_query() = select.query();
  v1::SelectResponse ids[2];
  v1::AttendResponse outs[2];
  for (int i = 0; i < 2; ++i) {
    const std::string& session = i == 0 ? theirs_ : ours_;
    select.set_session(session);
    attend.set_session(session);
    if (i == 1) {
      move(*select.mutable_query(), 0);
      *attend.mutable_query() = select.query();
      *attend.mutable_out_memory() = place(kOut);  // and the lse in the reply
    }
    Ending selected;
    Ending attended;
    core_->run(call(), select, ids[i], selected.listener());
    core_->run(call(), attend, outs[i], attended.listener());
    executor_.run_all();
    ASSERT_EQ(selected.reason() + attended.reason(), "OKOK");
  }
  EXPECT_EQ(ids[1].ids().data(), ids[0].ids().data());
  EXPECT_EQ(bytes_at(kOut, outs[0].out().data().size()), outs[0].out().data());
  EXPECT_EQ(outs[1].lse().data(), outs[0].lse().data());
}

TEST_F(CoreDeviceMemory, AnswersARepeatedStepByItsPlaces) {
  v1::DecodeRequest request = moved_step(ours_, 1);
  v1::DecodeResponse first;
  ASSERT_EQ(decode(request, first).reason(), "OK");
  const std::string written = bytes_at(kOut, 1024);

  v1::DecodeResponse again;
  EXPECT_EQ(decode(request, again).reason(), "OK");
  EXPECT_EQ(again.SerializeAsString(), first.SerializeAsString());
  EXPECT_EQ(bytes_at(kOut, 1024), written);
  v1::DecodeRequest other = request;
  other.mutable_out_memory()->set_offset(0);
  EXPECT_THAT(refusal(other), HasSubstr("STEP_CONFLICT"));
  request.clear_lse_memory();
  request.set_step(2);
  ASSERT_EQ(refusal(request), "OK: ");
  *request.mutable_lse_memory() = request.out_memory();  // the same place, of the other output
  request.clear_out_memory();
  EXPECT_THAT(refusal(request), HasSubstr("STEP_CONFLICT"));
  EXPECT_THAT(lengths(ours_), ElementsAre(202, 200));
}

TEST_F(CoreDeviceMemory, RefusesPlacesThatAreNotTheClients) {
  std::string foreign;
  (void)share(1, foreign);
  for (const std::string& name :
       {foreign, std::string("regions/x"), std::string(), region_ + "A"}) {
    v1::DecodeRequest request = moved_step(ours_, 1);
    request.mutable_value()->mutable_memory()->set_region(name);
    EXPECT_THAT(refusal(request), HasSubstr("NOT_FOUND")) << name;
    request = moved_step(ours_, 1);
    request.mutable_lse_memory()->set_region(name);
    EXPECT_THAT(refusal(request), HasSubstr("NOT_FOUND")) << name;
  }
  constexpr std::int64_t kQueryBytes = std::int64_t{kQueryHeads} * kHeadDim * 4;
  for (const std::int64_t offset : {std::int64_t{-16}, -kMax - 1, kMax, kMax - 15, std::int64_t{8},
                                    kBytes, kBytes - kQueryBytes + 16}) {
    v1::DecodeRequest request = moved_step(ours_, 1);
    request.mutable_query()->mutable_memory()->set_offset(offset);
    EXPECT_THAT(refusal(request), HasSubstr("query.memory.offset")) << offset;
    request = moved_step(ours_, 1);
    request.mutable_out_memory()->set_offset(offset);
    EXPECT_THAT(refusal(request), HasSubstr("out_memory.offset")) << offset;
  }
  v1::DecodeRequest huge = moved_step(ours_, 1);
  set_shape(*huge.mutable_key(), {kMax / 2, kKvHeads, kHeadDim});
  EXPECT_THAT(refusal(huge), HasSubstr("key.shape"));
  EXPECT_THAT(lengths(ours_), ElementsAre(200, 200));

  v1::DecodeRequest last = moved_step(ours_, 1);
  last.mutable_query()->mutable_memory()->set_offset(kBytes - kQueryBytes);
  EXPECT_EQ(refusal(last), "OK: ");
}

TEST_F(CoreDeviceMemory, TakesNoIdsThereAndNoBytesTwice) {
  v1::DecodeRequest both = moved_step(ours_, 1);
  both.mutable_query()->set_data("x");
  EXPECT_THAT(refusal(both), HasSubstr("query: expected data or memory"));
  v1::DecodeRequest ids = moved_step(ours_, 1);
  v1::Tensor& selected = *ids.mutable_selected();
  selected.set_dtype(v1::DATA_TYPE_INT32);
  set_shape(selected, {1, kKvHeads, 4});
  *selected.mutable_memory() = place(0);
  EXPECT_THAT(refusal(ids), HasSubstr("selected.data"));
  EXPECT_THAT(lengths(ours_), ElementsAre(200, 200));
}

TEST_F(CoreDeviceMemory, KeepsARegionAsLongAsACallUsesIt) {
  std::weak_ptr<const DeviceRegion> region = tenant().regions().find(region_);
  {
    UsedRegions used(tenant().regions());
    EXPECT_EQ(used.at(place(16), 16, "query"), memory_ + 16);
    tenant().regions().remove(region_);
    EXPECT_FALSE(region.expired());
  }
  EXPECT_TRUE(region.expired());
  EXPECT_EQ(tenant().regions().size(), 0U);
  EXPECT_EQ(tenant().regions().bytes(), 0U);
  EXPECT_THAT(refusal(decode_request(ours_, 0, 1, 3)), HasSubstr("OK"));
}

TEST_F(CoreDeviceMemory, BoundsTheRegionsOfATenant) {
  std::string name;
  for (std::size_t i = 1; i < DeviceRegions::kMaxRegions; ++i) (void)share(0, name);
  try {
    (void)share(0, name);
    ADD_FAILURE() << "one too many";
  } catch (const ServiceError& error) {
    EXPECT_EQ(error.reason(), "TOO_MANY_REGIONS");
  }
  (void)share(1, name);
}

}  // namespace
}  // namespace kvtier::services::testing
