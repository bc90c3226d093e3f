#include "hashing/scalar_code.h"

#include "hashing/planes.h"
#include "hashing/sketch.h"
#include "support/backend_fixture.h"
#include "support/oracle.h"
#include "support/priority_oracle.h"

#include <cmath>
#include <limits>
#include <numbers>
#include <random>

namespace kvtier::hashing {
namespace {

constexpr int kKvHeads = 2;
// Nearer than this to a boundary of the quantiser, in units of a standard deviation, a coordinate
// in fp32 may get the code beside it.
constexpr double kMargin = 1e-3;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Packed rows `[tokens, kv_heads, 2 * head_dim]`.
struct Rows {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  int head_dim = 64;
  std::vector<std::uint16_t> bits;

  Rows(DType type, std::int64_t count, int dim, std::uint64_t seed)
      : dtype(type), tokens(count), head_dim(dim), bits(index(count * kKvHeads * 2 * dim)) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal;
    for (std::uint16_t& b : bits) b = stored(normal(engine));
  }
  [[nodiscard]] std::uint16_t stored(double value) const {
    return dtype == DType::kBFloat16 ? oracle::to_bf16(value) : oracle::to_fp16(value);
  }
  [[nodiscard]] std::size_t at(std::int64_t token, int head) const {
    return index((token * kKvHeads + head) * 2 * head_dim);
  }
  void fill_key(std::int64_t token, int head, double value) {
    for (int x = 0; x < head_dim; ++x) bits[at(token, head) + index(x)] = stored(value);
  }
  /// The key at part 0, the value at part 1.
  [[nodiscard]] std::vector<double> part(std::int64_t token, int head, int which) const {
    std::vector<double> result;
    for (int x = 0; x < head_dim; ++x) {
      const std::uint16_t b = bits[at(token, head) + index(which * head_dim + x)];
      result.push_back(dtype == DType::kBFloat16 ? oracle::from_bf16(b) : oracle::from_fp16(b));
    }
    return result;
  }
};

double norm_of(const std::vector<double>& x) {
  double sum = 0.0;
  for (const double a : x) sum += a * a;
  return std::sqrt(sum);
}

/// A token as read back: a code for each coordinate.
struct Found {
  std::vector<int> codes;
  bool padding_is_zero = true;
  std::uint16_t factor = 0;
  std::uint16_t value_norm = 0;

  friend bool operator==(const Found&, const Found&) = default;
};

class ScalarCodeTest : public testing::BackendTest {
 protected:
  /// Sketches rows in pieces of the given sizes, and reads all of them, `[kv_heads][tokens]`.
  std::vector<std::vector<Found>> sketch(const Planes& planes, const Rows& rows,
                                         const std::vector<std::int64_t>& pieces) {
    const SketchGeometry geometry{kKvHeads, planes.config().num_planes};
    const std::int64_t blocks = (rows.tokens + kBlockTokens - 1) / kBlockTokens;
    const auto block_bytes = geometry.block_bytes();
    const transfer::Buffer memory = allocate<std::byte>(index(blocks * block_bytes));
    std::vector<std::byte*> table;
    for (std::int64_t b = 0; b < blocks; ++b) table.push_back(memory.data() + b * block_bytes);
    const transfer::Buffer device_table = upload(table);
    const transfer::Buffer packed = upload(rows.bits);
    const transfer::KvGeometry kv{
        .kv_heads = kKvHeads, .head_dim = rows.head_dim, .page_tokens = 64, .dtype = rows.dtype};
    std::int64_t length = 0;
    for (const std::int64_t piece : pieces) {
      const std::vector<transfer::SequenceCounters> counters{
          {.length = length, .capacity = rows.tokens}};
      const transfer::Buffer device_counters = upload(counters);
      SketchBatch batch;
      batch.push({.blocks = device_table.as<std::byte*>(),
                  .counters = device_counters.as<transfer::SequenceCounters>(),
                  .tokens = static_cast<std::int32_t>(piece),
                  .packed_offset = length});
      sketch_keys(*stream_, planes.view(), kv, geometry, batch, packed.data());
      stream_->synchronize();
      length += piece;
    }
    EXPECT_EQ(length, rows.tokens);

    const auto host = download<std::byte>(memory.data(), index(blocks * block_bytes));
    std::vector<std::vector<Found>> found(kKvHeads);
    for (int head = 0; head < kKvHeads; ++head) {
      for (std::int64_t t = 0; t < rows.tokens; ++t) {
        found[index(head)].push_back(read(geometry, host.data() + t / kBlockTokens * block_bytes,
                                          head, static_cast<int>(t % kBlockTokens), rows.head_dim));
      }
    }
    return found;
  }

  static Found read(const SketchGeometry& geometry, const std::byte* block, int head, int token,
                    int head_dim) {
    Found found;
    found.codes.assign(index(head_dim), 0);
    for (int i = 0; i < geometry.chunks() * kChunkBits; ++i) {
      std::uint32_t word = 0;
      std::memcpy(&word,
                  block + geometry.chunk_offset(head, i / kChunkBits, token) +
                      std::ptrdiff_t{4} * (i % kChunkBits / 32),
                  4);
      const int bit = static_cast<int>(word >> (31 - i % 32)) & 1;
      if (i >= geometry.num_planes) {
        found.padding_is_zero = found.padding_is_zero && bit == 0;
      } else {
        int& code = found.codes[index(i % head_dim)];
        code = 2 * code + bit;  // the most significant plane comes first
      }
    }
    std::memcpy(&found.factor, block + geometry.key_norm_offset(head, token), 2);
    std::memcpy(&found.value_norm, block + geometry.value_norm_offset(head, token), 2);
    return found;
  }

  /// Compares one finite token with the oracle; returns how many coordinates were too near a
  /// boundary to be compared.
  static int expect_token(const oracle::Planes& rotation, const Rows& rows, std::int64_t token,
                          int head, int bits, const Found& found) {
    const std::vector<double> key = rows.part(token, head, 0);
    const std::vector<double> y = oracle::rotated(rotation, key);
    int skipped = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const oracle::ScalarCode expected = oracle::quantise(y[i], bits);
      if (expected.margin <= kMargin) {
        ++skipped;
        EXPECT_NEAR(found.codes[i], expected.code, 1) << "coordinate " << i;
      } else {
        EXPECT_EQ(found.codes[i], expected.code)
            << "token " << token << ", head " << head << ", coordinate " << i;
      }
    }
    EXPECT_TRUE(found.padding_is_zero);
    const double factor = oracle::code_factor(y, found.codes, bits, norm_of(key));
    EXPECT_NEAR(found.factor, oracle::to_fp16(factor), 1) << "token " << token;
    EXPECT_NEAR(found.value_norm, oracle::to_fp16(norm_of(rows.part(token, head, 1))), 1);
    return skipped;
  }

  std::unique_ptr<Planes> make_planes(int head_dim, int bits) {
    return std::make_unique<Planes>(*device_,
                                    SketchConfig{.kind = PlaneKind::kOrthogonal,
                                                 .num_planes = bits * head_dim,
                                                 .seed = 5,
                                                 .code = SketchCode::kScalar},
                                    head_dim);
  }
  static oracle::Planes rotation_of(const Planes& planes, int head_dim) {
    return oracle::planes_from_bf16(planes.host_bits(), head_dim, true);
  }
};
KVTIER_INSTANTIATE_BACKENDS(ScalarCodeTest);

TEST_P(ScalarCodeTest, CodesAndFactorsAreTheOraclesForEveryShape) {
  std::uint64_t seed = 0;
  for (const int head_dim : {64, 96, 128, 256}) {
    for (int bits = 1; bits <= kMaxCodeBits && bits * head_dim <= 1024; ++bits) {
      const auto planes = make_planes(head_dim, bits);
      const oracle::Planes rotation = rotation_of(*planes, head_dim);
      ASSERT_EQ(rotation.num_planes, head_dim);
      // Every size once for each bit width, each dtype.
      const std::vector<std::int64_t> sizes{1, 95, 96, 97, 300};
      const std::int64_t tokens = sizes[index(static_cast<std::int64_t>(seed % sizes.size()))];
      const DType dtype = seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << ", bits " << bits
                                        << ", tokens " << tokens << ", " << dtype_name(dtype));
      const Rows rows(dtype, tokens, head_dim, ++seed);
      const auto found = sketch(*planes, rows, {tokens});
      int skipped = 0;
      for (int head = 0; head < kKvHeads; ++head) {
        for (std::int64_t t = 0; t < tokens; ++t) {
          skipped += expect_token(rotation, rows, t, head, bits, found[index(head)][index(t)]);
        }
      }
      // About 2 kMargin for each boundary, at most .4 of a density: under an eighth of all.
      EXPECT_LE(skipped, tokens * kKvHeads * head_dim / 8 + 8);
    }
  }
}

TEST_P(ScalarCodeTest, TakesEverySizeInEitherDtype) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const auto planes = make_planes(64, 4);
    const oracle::Planes rotation = rotation_of(*planes, 64);
    for (const std::int64_t tokens : {1, 95, 96, 97, 300}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << dtype_name(dtype));
      const Rows rows(dtype, tokens, 64, static_cast<std::uint64_t>(tokens));
      const auto found = sketch(*planes, rows, {tokens});
      for (int head = 0; head < kKvHeads; ++head) {
        for (std::int64_t t = 0; t < tokens; ++t) {
          expect_token(rotation, rows, t, head, 4, found[index(head)][index(t)]);
        }
      }
    }
  }
}

TEST_P(ScalarCodeTest, AppendsInPiecesGiveNearlyTheSameSketches) {
  const auto planes = make_planes(128, 3);
  const oracle::Planes rotation = rotation_of(*planes, 128);
  const Rows rows(DType::kBFloat16, 300, 128, 3);
  const auto whole = sketch(*planes, rows, {300});
  const auto pieces = sketch(*planes, rows, {1, 94, 1, 1, 3, 200});
  for (std::size_t head = 0; head < kKvHeads; ++head) {
    for (std::size_t t = 0; t < 300; ++t) {
      const auto token = static_cast<std::int64_t>(t);
      const std::vector<double> y =
          oracle::rotated(rotation, rows.part(token, static_cast<int>(head), 0));
      for (std::size_t i = 0; i < y.size(); ++i) {
        if (oracle::quantise(y[i], 3).margin <= kMargin) continue;
        ASSERT_EQ(whole[head][t].codes[i], pieces[head][t].codes[i]) << t << ", " << i;
      }
      EXPECT_NEAR(whole[head][t].factor, pieces[head][t].factor, 2) << t;
      EXPECT_NEAR(whole[head][t].value_norm, pieces[head][t].value_norm, 1) << t;
    }
  }
}

TEST_P(ScalarCodeTest, TheFirstPlaneIsTheSignOfTheRotation) {
  const Rows rows(DType::kBFloat16, 97, 64, 9);
  const auto signs = sketch(*make_planes(64, 1), rows, {97});
  const auto fine = make_planes(64, 4);
  const oracle::Planes rotation = rotation_of(*fine, 64);
  const auto codes = sketch(*fine, rows, {97});
  for (int head = 0; head < kKvHeads; ++head) {
    for (std::int64_t t = 0; t < 97; ++t) {
      const std::vector<double> y = oracle::rotated(rotation, rows.part(t, head, 0));
      for (std::size_t i = 0; i < y.size(); ++i) {
        if (std::fabs(y[i]) <= kMargin) continue;
        const int first = codes[index(head)][index(t)].codes[i] >> 3;
        ASSERT_EQ(first, y[i] > 0.0 ? 1 : 0);
        ASSERT_EQ(first, signs[index(head)][index(t)].codes[i]);
      }
    }
  }
}

TEST_P(ScalarCodeTest, TheEstimateOfAKeyWithItselfIsItsSquare) {
  for (const int bits : {1, 2, 4, 8}) {
    const auto planes = make_planes(64, bits);
    const oracle::Planes rotation = rotation_of(*planes, 64);
    const Rows rows(DType::kBFloat16, 95, 64, static_cast<std::uint64_t>(bits));
    const auto found = sketch(*planes, rows, {95});
    for (std::int64_t t = 0; t < 95; ++t) {
      const std::vector<double> key = rows.part(t, 1, 0);
      const Found& token = found[1][index(t)];
      oracle::Sketch sketched;
      for (int plane = 0; plane < bits; ++plane) {
        for (const int code : token.codes) {
          sketched.bits.push_back(static_cast<std::uint8_t>((code >> (bits - 1 - plane)) & 1));
        }
      }
      sketched.key_norm = oracle::from_fp16(token.factor);
      sketched.value_norm = 1.0;
      const oracle::ScoreSpec spec{.estimator = Estimator::kNormAware,
                                   .weighting = ValueWeighting::kNone,
                                   .num_planes = bits * 64,
                                   .code_bits = bits,
                                   .query_bits = 0,
                                   .softmax_scale = 1.0};
      const double estimate = oracle::scores(spec, rotation, key, {&sketched, 1}).values[0];
      const double square = norm_of(key) * norm_of(key);
      EXPECT_NEAR(estimate / square, 1.0, 0x1p-10) << bits << " bits, token " << t;
    }
  }
}

TEST_P(ScalarCodeTest, ZeroKeysAndKeysThatAreNotFiniteDisturbNoOthers) {
  const auto planes = make_planes(96, 2);
  const oracle::Planes rotation = rotation_of(*planes, 96);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Rows rows(dtype, 97, 96, 21);
    rows.fill_key(3, 0, 0.0);
    rows.fill_key(4, 1, -0.0);
    rows.bits[rows.at(40, 0)] = rows.stored(std::numeric_limits<double>::infinity());
    rows.bits[rows.at(41, 1) + 5] = rows.stored(std::nan(""));
    rows.bits[rows.at(96, 0) + 96 + 7] = rows.stored(std::nan(""));  // a value
    const auto found = sketch(*planes, rows, {97});
    const auto broken = [](std::int64_t t, int head) {
      return (t == 40 && head == 0) || (t == 41 && head == 1) || (t == 96 && head == 0);
    };
    for (int head = 0; head < kKvHeads; ++head) {
      for (std::int64_t t = 0; t < 97; ++t) {
        const Found& token = found[index(head)][index(t)];
        if (broken(t, head)) {
          EXPECT_EQ(token.factor, kNonfiniteNorm) << t;
          EXPECT_EQ(token.value_norm, kNonfiniteNorm) << t;
        } else if ((t == 3 && head == 0) || (t == 4 && head == 1)) {
          EXPECT_EQ(token.factor, 1) << "the least norm";
        } else {
          expect_token(rotation, rows, t, head, 2, token);
        }
      }
    }
  }
}

/// Mean squared error of the uniform mid-rise quantiser of N(0, 1), by the midpoint rule.
double squared_error(int bits, double step) {
  const int half = (1 << bits) / 2;
  constexpr double kEnd = 9.0;
  constexpr int kParts = 1 << 16;
  double sum = 0.0;
  for (int i = 0; i < kParts; ++i) {
    const double y = -kEnd + (i + 0.5) * (2.0 * kEnd / kParts);
    const double level = std::min(std::max(std::floor(y / step), -1.0 * half), half - 1.0) + 0.5;
    sum += (y - level * step) * (y - level * step) * std::exp(-0.5 * y * y);
  }
  return sum * (2.0 * kEnd / kParts) / std::sqrt(2.0 * std::numbers::pi);
}

TEST(ScalarStepTest, IsTheOneOfLeastSquaredError) {
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    const auto step = static_cast<double>(scalar_step(bits));
    EXPECT_NEAR(step, oracle::quantiser_step(bits), 1e-6);
    const double error = squared_error(bits, step);
    EXPECT_LT(error, squared_error(bits, step * 1.01)) << bits;
    EXPECT_LT(error, squared_error(bits, step * 0.99)) << bits;
    EXPECT_NEAR(scalar_noise(bits) / (error / (1.0 - error)), 1.0, 0.01) << bits;
  }
}

TEST(ScalarStepTest, CodesAreMonotonousAndStopAtTheEnds) {
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    const auto last = (std::uint32_t{1} << bits) - 1;
    EXPECT_EQ(scalar_code(-1e30F, bits), 0U);
    EXPECT_EQ(scalar_code(1e30F, bits), last);
    EXPECT_EQ(scalar_code(0.0F, bits), (last + 1) / 2);
    EXPECT_EQ(scalar_code(-1e-6F, bits), last / 2);
    for (std::uint32_t code = 0; code <= last; ++code) {
      EXPECT_EQ(scalar_code(scalar_level(code, bits), bits), code) << bits;
    }
  }
}

}  // namespace
}  // namespace kvtier::hashing
