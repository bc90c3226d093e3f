#include "services/metrics/server_metrics.h"
#include "tests/services/client/client_fixture.h"

#include <gmock/gmock.h>

#include <cstring>
#include <map>
#include <optional>

namespace kvtier::services::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

/// A client whose tensors lie in "device memory": host memory, which the server maps as it is, or
/// refuses.
class ClientDeviceMemoryTest : public ClientTest {
 protected:
  static constexpr std::size_t kBytes = 1 << 20;

  void SetUp() override {
    memory_.resize(kBytes);
    ClientTest::SetUp();
  }
  void start_server() override {
    ServerOptions options = this->options();
    options.data.listen = {parse_endpoint(socket() + ".data")};
    options.data.open_device_memory = [this](const DeviceMemoryHandle&, std::size_t) {
      if (refused_) throw Error(ErrorCode::kUnimplemented, "no GPU");
      return std::shared_ptr<std::byte>(memory_.data(), [this](std::byte*) { ++closed_; });
    };
    start(std::move(options));
  }
  SharedDeviceMemory share() {
    return client_->share({.data = memory_.data(),
                           .bytes = kBytes,
                           .handle = {},
                           .copy = [this](void* to, const void* from, std::size_t bytes) {
                             ++copies_;
                             std::memcpy(to, from, bytes);
                           }});
  }
  /// Puts values at an offset of the memory.
  template <typename T>
  TensorView place(const std::vector<T>& values, DType dtype, std::int64_t tokens, int heads,
                   std::size_t offset) {
    std::memcpy(memory_.data() + offset, values.data(), values.size() * sizeof(T));
    return {memory_.data() + offset, dtype, {tokens, heads, kHeadDim}, MemorySpace::kDevice};
  }
  /// Decodes a step whose tensors are all there, and compares it with one of host tensors.
  void expect_the_same_step(std::uint64_t seed) {
    const auto query = random_floats(kQueryHeads * kHeadDim, seed);
    const auto key = random_floats(kKvHeads * kHeadDim, seed + 1);
    const auto value = random_floats(kKvHeads * kHeadDim, seed + 2);
    AttendOutputs there;
    there.out = MutableTensorView(memory_.data() + (64 << 10), DType::kFloat32,
                                  {1, kQueryHeads, kHeadDim}, MemorySpace::kDevice);
    there.lse = MutableTensorView(memory_.data() + (96 << 10), DType::kFloat32, {1, kQueryHeads},
                                  MemorySpace::kDevice);
    remote_->decode(0,
                    {.query = place(query, DType::kFloat32, 1, kQueryHeads, 0),
                     .key = place(key, DType::kFloat32, 1, kKvHeads, 16 << 10),
                     .value = place(value, DType::kFloat32, 1, kKvHeads, 32 << 10)},
                    there);

    std::vector<float> out(query.size());
    std::vector<float> lse(kQueryHeads);
    AttendOutputs outputs;
    outputs.out = MutableTensorView(out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim});
    outputs.lse = MutableTensorView(lse.data(), DType::kFloat32, {1, kQueryHeads});
    local_->decode(0,
                   {.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads),
                    .key = tokens_view(key, DType::kFloat32, 1, kKvHeads),
                    .value = tokens_view(value, DType::kFloat32, 1, kKvHeads)},
                   outputs);
    EXPECT_THAT(floats_at(64 << 10, out.size()), ElementsAreArray(out));
    EXPECT_THAT(floats_at(96 << 10, lse.size()), ElementsAreArray(lse));
  }
  void append_from_there(std::uint64_t seed) {
    const auto keys = random_floats(100 * kKvHeads * kHeadDim, seed);
    const auto values = random_floats(keys.size(), seed + 1);
    remote_->append(0, place(keys, DType::kFloat32, 100, kKvHeads, 0),
                    place(values, DType::kFloat32, 100, kKvHeads, 256 << 10));
    local_->append(0, tokens_view(keys, DType::kFloat32, 100, kKvHeads),
                   tokens_view(values, DType::kFloat32, 100, kKvHeads));
  }
  [[nodiscard]] std::vector<float> floats_at(std::size_t offset, std::size_t count) const {
    std::vector<float> values(count);
    std::memcpy(values.data(), memory_.data() + offset, count * sizeof(float));
    return values;
  }

  std::vector<std::byte> memory_;
  bool refused_ = false;
  std::atomic<int> closed_{0};
  int copies_ = 0;
};

TEST_P(ClientDeviceMemoryTest, IsReadAndWrittenInPlace) {
  fill(150);
  {
    const SharedDeviceMemory shared = share();
    EXPECT_FALSE(shared.refusal());
    append_from_there(11);
    expect_the_same_step(1);
    expect_the_same_step(4);
    EXPECT_EQ(copies_, 0);
    EXPECT_EQ(closed_, 0);
    EXPECT_THAT(server_->metrics().text(),
                AllOf(HasSubstr("\nkvtier_shm_device_regions 1\n"),
                      HasSubstr("\nkvtier_shm_device_bytes " + std::to_string(kBytes) + "\n")));
  }
  EXPECT_EQ(closed_, 1) << "must be closed when the client may free it";
  const TensorView query(memory_.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim},
                         MemorySpace::kDevice);
  AttendOutputs outputs;
  outputs.out = MutableTensorView(memory_.data() + 4096, DType::kFloat32,
                                  {1, kQueryHeads, kHeadDim}, MemorySpace::kDevice);
  EXPECT_EQ(code_of([&] { remote_->attend(0, {.query = query}, outputs); }),
            ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("query: expected host memory"));
}

TEST_P(ClientDeviceMemoryTest, GoesThroughHostMemoryWhereTheServerRefusesIt) {
  refused_ = true;
  fill(150);
  const SharedDeviceMemory shared = share();
  ASSERT_TRUE(shared.refusal());
  EXPECT_EQ(shared.refusal()->reason(), "NO_DEVICE");
  append_from_there(11);
  expect_the_same_step(1);
  EXPECT_EQ(copies_, 2 + 3 + 2);
}

TEST_P(ClientDeviceMemoryTest, GoesThroughHostMemoryForWhatCannotBeNamed) {
  fill(150);
  const SharedDeviceMemory shared = share();
  // Ids, rows with gaps, and outputs that begin between multiples of 16 bytes.
  const auto values = random_floats(2 * kQueryHeads * kHeadDim, 5);
  TensorView query = place(values, DType::kFloat32, 1, kQueryHeads, 0);
  query.strides[1] = 2 * kHeadDim;
  std::vector<float> dense(kQueryHeads * kHeadDim);
  for (std::size_t i = 0; i < dense.size(); ++i) {
    dense[i] = values[i / kHeadDim * 2 * kHeadDim + i % kHeadDim];
  }
  AttendOutputs there;
  there.out = MutableTensorView(memory_.data() + 65540, DType::kFloat32, {1, kQueryHeads, kHeadDim},
                                MemorySpace::kDevice);
  remote_->attend(0, {.query = query}, there);
  std::vector<float> out(dense.size());
  AttendOutputs outputs;
  outputs.out = MutableTensorView(out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim});
  local_->attend(0, {.query = tokens_view(dense, DType::kFloat32, 1, kQueryHeads)}, outputs);
  EXPECT_THAT(floats_at(65540, out.size()), ElementsAreArray(out));
  EXPECT_EQ(copies_, kQueryHeads + 1);

  const std::vector<std::int32_t> ids{1, 2, 0, 3};
  std::memcpy(memory_.data(), ids.data(), ids.size() * 4);
  std::vector<std::uint16_t> rows(2 * 2 * kHeadDim);
  std::vector<std::uint16_t> more(rows.size());
  const auto view = [](std::vector<std::uint16_t>& to) {
    return MutableTensorView(to.data(), DType::kBFloat16, {kKvHeads, 2, kHeadDim});
  };
  remote_->fetch(0, TensorView(memory_.data(), DType::kInt32, {kKvHeads, 2}, MemorySpace::kDevice),
                 {.keys = view(rows), .values = view(more)});
  std::vector<std::uint16_t> expected(rows.size());
  std::vector<std::uint16_t> expected_more(rows.size());
  local_->fetch(0, TensorView(ids.data(), DType::kInt32, {kKvHeads, 2}),
                {.keys = view(expected), .values = view(expected_more)});
  EXPECT_THAT(rows, ElementsAreArray(expected));
  EXPECT_THAT(more, ElementsAreArray(expected_more));
}

TEST_P(ClientDeviceMemoryTest, BatchesMixBothKindsOfMemory) {
  fill(150);
  const SharedDeviceMemory shared = share();
  RemoteSession other = client_->open(session_config());
  const auto query = random_floats(kQueryHeads * kHeadDim, 1);
  const auto key = random_floats(kKvHeads * kHeadDim, 2);
  std::vector<DecodeItem> items(2);
  std::vector<float> out(query.size());
  items[0] = {.session = &other,
              .inputs = {.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads),
                         .key = tokens_view(key, DType::kFloat32, 1, kKvHeads),
                         .value = tokens_view(key, DType::kFloat32, 1, kKvHeads)}};
  items[0].outputs.out = MutableTensorView(out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim});
  RemoteSession third = client_->open(session_config());
  items[1] = {.session = &third,
              .inputs = {.query = place(query, DType::kFloat32, 1, kQueryHeads, 0),
                         .key = place(key, DType::kFloat32, 1, kKvHeads, 8192),
                         .value = place(key, DType::kFloat32, 1, kKvHeads, 16384)}};
  items[1].outputs.out = MutableTensorView(memory_.data() + 32768, DType::kFloat32,
                                           {1, kQueryHeads, kHeadDim}, MemorySpace::kDevice);
  for (const ItemResult& result : client_->batch_decode(items)) {
    EXPECT_TRUE(result.ok()) << result.error->what();
  }
  EXPECT_THAT(floats_at(32768, out.size()), ElementsAreArray(out));
  EXPECT_EQ(copies_, 0);
}

TEST_P(ClientDeviceMemoryTest, NeedsAFunctionThatCopies) {
  EXPECT_EQ(code_of([&] {
              (void)client_->share({.data = memory_.data(), .bytes = kBytes, .handle = {}});
            }),
            ErrorCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(, ClientDeviceMemoryTest, ::testing::Values("DataPlane"),
                         [](const auto& way) { return std::string(way.param); });

}  // namespace
}  // namespace kvtier::services::testing
