#include "llama/compute.h"

#include "kvtier/error.h"

#include "llama/simd_loops.h"
#include "tests/llama/test_compute.h"
#include "tests/support/backend_fixture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kvtier::llama {
namespace {

std::vector<float> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

TEST(SimdLoops, SoftmaxBlocksGiveTheSoftmaxOfTheWhole) {
  for (const std::int64_t split : {0, 1, 15, 16, 17, 40}) {
    std::vector<float> row = random_values(40, 3);
    for (float& x : row) x *= 20.0F;
    const std::vector<float> logits = row;
    SoftmaxState state{-std::numeric_limits<float>::infinity(), 0.0F};

    softmax_block(row.data(), split, split, state);
    const float factor = softmax_block(row.data() + split, 40 - split, 40 - split, state);

    double max = -1e30;
    double sum = 0.0;
    for (const float x : logits) max = std::max(max, static_cast<double>(x));
    for (const float x : logits) sum += std::exp(x - max);
    for (std::size_t i = 0; i < 40; ++i) {
      const double scale = static_cast<std::int64_t>(i) < split ? double{factor} : 1.0;
      // 2 ulp of the exponential, and the rounding of x - max (|x - max| <= 100).
      EXPECT_NEAR(row[i] * scale / state.sum, std::exp(logits[i] - max) / sum, 1e-5) << split;
    }
  }
}

TEST(SimdLoops, SoftmaxBlockZeroesWhatIsMasked) {
  std::vector<float> row{1.0F, 2.0F, 300.0F, 400.0F};
  SoftmaxState state{-std::numeric_limits<float>::infinity(), 0.0F};

  EXPECT_EQ(softmax_block(row.data(), 0, 0, state), 1.0F);
  EXPECT_EQ(state.sum, 0.0F);
  softmax_block(row.data(), 2, 4, state);

  EXPECT_EQ(row[2], 0.0F);
  EXPECT_EQ(row[3], 0.0F);
  EXPECT_FLOAT_EQ(state.max, 2.0F);
  EXPECT_FLOAT_EQ(state.sum, 1.0F + std::exp(-1.0F));
}

TEST(SimdLoops, SiluIsExactToFloatOverTheWholeRange) {
  std::vector<float> gate;
  for (float x = -120.0F; x <= 120.0F; x += 0.37F) gate.push_back(x);
  const std::vector<float> input = gate;
  const std::vector<float> up(gate.size(), 2.0F);

  silu_times(gate.data(), up.data(), static_cast<std::int64_t>(gate.size()));

  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double x = input[i];
    const double expected = 2.0 * x / (1.0 + std::exp(-x));
    EXPECT_NEAR(gate[i], expected, 1e-6 * std::abs(expected) + 1e-30) << x;
  }
}

/// Runs on OpenBLAS and on cuBLAS, whose folder the variable KVTIER_CUDA_LIBS names.
class ComputeTest : public testing::BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (IsSkipped()) return;
    try {
      compute_ = testing::make_test_compute(GetParam(), 3);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound) throw;
      GTEST_SKIP() << error.what();
    }
  }

  Buffer upload(const std::vector<float>& values) {
    Buffer buffer = compute_->allocate(values.size() * sizeof(float));
    compute_->upload(buffer.floats(), values.data(), values.size() * sizeof(float));
    return buffer;
  }
  std::vector<float> download(const Buffer& buffer, std::size_t count) {
    std::vector<float> values(count);
    compute_->download(values.data(), buffer.floats(), count * sizeof(float));
    return values;
  }

  std::unique_ptr<Compute> compute_;
};

TEST_P(ComputeTest, MultipliesAtSizesAroundItsTiles) {
  for (const std::int64_t rows : {1, 3, 127, 128, 129}) {
    for (const std::int64_t columns : {1, 255, 256, 257}) {
      const std::int64_t depth = 130;  // 129 x 257 x 130 is above the limit of serial work.
      const std::vector<float> x = random_values(rows * depth, 1);
      const std::vector<float> w = random_values(columns * depth, 2);
      const std::vector<float> b = random_values(columns, 3);
      const auto count = static_cast<std::size_t>(rows * columns);
      const Buffer result = upload(std::vector<float>(count, -77.0F));

      compute_->linear(upload(x).floats(), rows, {upload(w), columns, depth}, upload(b),
                       result.floats());

      const std::vector<float> out = download(result, count);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < columns; ++c) {
          double expected = b[static_cast<std::size_t>(c)];
          for (std::int64_t i = 0; i < depth; ++i) {
            expected += double{x[static_cast<std::size_t>(r * depth + i)]} *
                        w[static_cast<std::size_t>(c * depth + i)];
          }
          // 130 products of order 1, each rounded: 130 * 2^-24 * a few.
          ASSERT_NEAR(out[static_cast<std::size_t>(r * columns + c)], expected, 1e-4)
              << rows << " x " << columns << " at " << r << ", " << c;
        }
      }
    }
  }
}

/// Dense causal attention in double.
double attention_at(const PrefillAttention& in, std::int64_t token, int head, int element) {
  const int kv_head = head / (in.query_heads / in.kv_heads);
  const float* query = in.query + (token * in.query_heads + head) * in.head_dim;
  double sum = 0.0;
  double weighted = 0.0;
  for (std::int64_t key = 0; key <= in.first_position + token; ++key) {
    const std::int64_t row = (kv_head * in.capacity + key) * in.head_dim;
    double dot = 0.0;
    for (int i = 0; i < in.head_dim; ++i) dot += double{query[i]} * in.keys[row + i];
    const double weight = std::exp(dot * in.scale);
    sum += weight;
    weighted += weight * in.values[row + element];
  }
  return weighted / sum;
}

TEST_P(ComputeTest, AttendsAtSizesAroundItsBlocks) {
  struct Size {
    std::int64_t tokens, first;
  };
  for (const Size size : {Size{1, 0}, Size{63, 0}, Size{65, 0}, Size{1, 511}, Size{1, 512},
                          Size{130, 450}, Size{3, 1023}, Size{2, 4095}, Size{33, 8180}}) {
    SCOPED_TRACE(std::to_string(size.tokens) + " after " + std::to_string(size.first));
    const std::int64_t capacity = size.first + size.tokens + 5;
    const std::vector<float> query = random_values(size.tokens * 6 * 64, 1);
    const std::vector<float> keys = random_values(2 * capacity * 64, 2);
    const std::vector<float> values = random_values(2 * capacity * 64, 3);
    PrefillAttention in{.query = query.data(),
                        .keys = keys.data(),
                        .values = values.data(),
                        .out = nullptr,
                        .tokens = size.tokens,
                        .first_position = size.first,
                        .capacity = capacity,
                        .query_heads = 6,
                        .kv_heads = 2,
                        .head_dim = 64,
                        .scale = 0.125F};
    const PrefillAttention on_host = in;
    const Buffer q = upload(query), k = upload(keys), v = upload(values);
    const Buffer result = upload(std::vector<float>(query.size(), -77.0F));
    in.query = q.floats();
    in.keys = k.floats();
    in.values = v.floats();
    in.out = result.floats();

    compute_->attend(in);

    const std::vector<float> out = download(result, query.size());
    for (const std::int64_t token : {std::int64_t{0}, size.tokens / 2, size.tokens - 1}) {
      for (int head = 0; head < 6; ++head) {
        for (const int element : {0, 37, 63}) {
          const auto at = static_cast<std::size_t>((token * 6 + head) * 64 + element);
          // fp32 logits of order 1 over a few thousand keys.
          ASSERT_NEAR(out[at], attention_at(on_host, token, head, element), 1e-5) << head;
        }
      }
    }
  }
}

TEST_P(ComputeTest, AttentionDoesNotReadBeyondTheVisibleKeys) {
  const std::vector<float> query = random_values(2 * 64, 1);
  std::vector<float> keys = random_values(8 * 64, 2);
  std::vector<float> values = random_values(8 * 64, 3);
  std::fill(keys.begin() + 4 * 64, keys.end(), std::numeric_limits<float>::quiet_NaN());
  std::fill(values.begin() + 4 * 64, values.end(), std::numeric_limits<float>::quiet_NaN());
  const Buffer q = upload(query), k = upload(keys), v = upload(values);
  const Buffer result = upload(query);

  compute_->attend({.query = q.floats(),
                    .keys = k.floats(),
                    .values = v.floats(),
                    .out = result.floats(),
                    .tokens = 2,
                    .first_position = 2,
                    .capacity = 8,
                    .query_heads = 1,
                    .kv_heads = 1,
                    .head_dim = 64,
                    .scale = 0.125F});

  for (const float x : download(result, query.size())) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(ComputeTest, NormalisesRows) {
  const std::vector<float> x = random_values(3 * 300, 4);
  const std::vector<float> weight = random_values(300, 5);
  const Buffer rows = upload(x);

  compute_->rms_norm(rows.floats(), upload(weight), 3, 300, 1e-5F, rows.floats());

  const std::vector<float> out = download(rows, x.size());
  for (std::size_t row = 0; row < 3; ++row) {
    double squares = 0.0;
    for (std::size_t i = 0; i < 300; ++i) squares += std::pow(x[row * 300 + i], 2);
    for (std::size_t i = 0; i < 300; ++i) {
      const double expected = x[row * 300 + i] / std::sqrt(squares / 300 + 1e-5) * weight[i];
      ASSERT_NEAR(out[row * 300 + i], expected, 1e-5) << row << ", " << i;
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(ComputeTest);

}  // namespace
}  // namespace kvtier::llama
