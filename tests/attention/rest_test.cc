#include "attention/rest.h"

#include "support/backend_fixture.h"
#include "support/oracle.h"

#include <cmath>
#include <random>
#include <vector>

namespace kvtier::attention {
namespace {

constexpr int kKvHeads = 2;
constexpr int kHeads = 6;
constexpr int kRows = 3;  // the second of which stays as it is
constexpr std::size_t kHeadStride = 7;

class AddRestTest : public testing::BackendTest {
 protected:
  static std::vector<float> normal(std::uint64_t seed, std::size_t count) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& x : values) x = distribution(engine);
    return values;
  }

  void expect_counted(DType dtype, int head_dim, bool with_lse) {
    const auto d = static_cast<std::size_t>(head_dim);
    const std::size_t stride = d + kHeadStride;
    const std::size_t count = kRows * kHeads * stride;
    std::vector<float> out = normal(1, count);
    for (float& x : out) x = static_cast<float>(oracle::round_to(dtype, static_cast<double>(x)));
    const std::vector<float> value = normal(2, kRows * kKvHeads * stride);
    const std::vector<float> lse = normal(3, kRows * kHeads);
    std::vector<float> missed;
    std::mt19937_64 engine(4);
    std::uniform_real_distribution<float> share(0.0F, 0.99F);
    for (int i = 0; i < kRows * kHeads; ++i) missed.push_back(i % 4 == 0 ? 0.0F : share(engine));

    std::vector<std::uint16_t> bits;
    for (const float x : out) {
      bits.push_back(dtype == DType::kFloat16 ? oracle::to_fp16(x) : oracle::to_bf16(x));
    }
    const bool narrow = dtype != DType::kFloat32;
    const transfer::Buffer outs = narrow ? upload(bits) : upload(out);
    const transfer::Buffer values = upload(value);
    const transfer::Buffer lses = upload(lse);
    const transfer::Buffer shares = upload(missed);
    RestBatch batch;
    for (std::size_t row = 0; row < kRows; ++row) {
      RestItem item{.out = outs.data() + row * kHeads * stride * dtype_bytes(dtype),
                    .dtype = dtype,
                    .head_stride = static_cast<std::int64_t>(stride)};
      if (with_lse) item.lse = lses.as<float>() + row * kHeads;
      item.lse_stride = 1;
      item.missed = shares.as<float>() + row * kHeads;
      item.missed_stride = 1;
      if (row != 1) item.value = values.as<float>() + row * kKvHeads * stride;
      item.value_stride = static_cast<std::int64_t>(stride);
      batch.push(item);
    }
    add_rest(*stream_, {.kv_heads = kKvHeads, .query_heads = kHeads, .head_dim = head_dim}, batch);

    std::vector<float> found;
    if (narrow) {
      for (const std::uint16_t each : download<std::uint16_t>(outs.data(), count)) {
        found.push_back(static_cast<float>(dtype == DType::kFloat16 ? oracle::from_fp16(each)
                                                                    : oracle::from_bf16(each)));
      }
    } else {
      found = download<float>(outs.data(), count);
    }
    const std::vector<float> found_lse = download<float>(lses.data(), lse.size());
    const double tolerance = !narrow ? 1e-6 : dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
    for (std::size_t head = 0; head < kRows * kHeads; ++head) {
      const std::size_t row = head / kHeads;
      const std::size_t kv_head = head % kHeads / (kHeads / kKvHeads);
      const double m = row == 1 ? 0.0 : static_cast<double>(missed[head]);
      EXPECT_NEAR(static_cast<double>(found_lse[head]),
                  static_cast<double>(lse[head]) - (with_lse ? std::log(1.0 - m) : 0.0), 1e-5);
      for (std::size_t x = 0; x < stride; ++x) {
        const float before = out[head * stride + x];
        const float after = found[head * stride + x];
        if (x >= d || m == 0.0) {
          ASSERT_EQ(after, before) << "head " << head << " element " << x;
          continue;
        }
        const double expected =
            (1.0 - m) * static_cast<double>(before) +
            m * static_cast<double>(value[(row * kKvHeads + kv_head) * stride + x]);
        ASSERT_NEAR(static_cast<double>(after), expected, tolerance * (1.0 + std::abs(expected)))
            << "head " << head << " element " << x;
      }
    }
  }
};
KVTIER_INSTANTIATE_BACKENDS(AddRestTest);

TEST_P(AddRestTest, CountsWhatWasLeftOutWithItsShare) {
  for (const int head_dim : {64, 128, 256}) {
    for (const bool with_lse : {false, true}) expect_counted(DType::kFloat32, head_dim, with_lse);
  }
}

TEST_P(AddRestTest, WritesEveryDType) {
  expect_counted(DType::kFloat16, 128, true);
  expect_counted(DType::kBFloat16, 128, true);
}

}  // namespace
}  // namespace kvtier::attention
