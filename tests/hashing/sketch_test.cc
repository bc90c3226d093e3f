#include "hashing/sketch.h"

#include "support/backend_fixture.h"
#include "support/oracle.h"

#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <random>

namespace kvtier::hashing {

namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Packed rows `[tokens, kv_heads, 2 * head_dim]` as 16-bit values, and what they mean.
struct Rows {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  int kv_heads = 1;
  int head_dim = 128;
  std::vector<std::uint16_t> bits;

  [[nodiscard]] std::size_t at(std::int64_t token, int head) const {
    return index((token * kv_heads + head) * 2 * head_dim);
  }
  // Elements [begin, begin + head_dim) of a row: the key at 0, the value at head_dim.
  [[nodiscard]] std::vector<double> part(std::int64_t token, int head, int begin) const {
    std::vector<double> result;
    for (int x = 0; x < head_dim; ++x) {
      const std::uint16_t b = bits[at(token, head) + index(begin + x)];
      result.push_back(dtype == DType::kBFloat16 ? oracle::from_bf16(b) : oracle::from_fp16(b));
    }
    return result;
  }
  void set(std::int64_t token, int head, int x, double value) {
    bits[at(token, head) + index(x)] =
        dtype == DType::kBFloat16 ? oracle::to_bf16(value) : oracle::to_fp16(value);
  }
};

Rows random_rows(std::uint64_t seed, DType dtype, std::int64_t tokens, int kv_heads, int head_dim) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  Rows rows{dtype, tokens, kv_heads, head_dim, {}};
  rows.bits.resize(index(tokens * kv_heads * 2 * head_dim));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int head = 0; head < kv_heads; ++head) {
      for (int x = 0; x < 2 * head_dim; ++x) rows.set(t, head, x, normal(engine));
    }
  }
  return rows;
}

// One token as read back from its block.
struct Found {
  std::vector<std::uint8_t> bits;  // all bits of the chunks
  std::uint16_t key_norm = 0;
  std::uint16_t value_norm = 0;

  friend bool operator==(const Found&, const Found&) = default;
};

// A sequence's blocks in device memory.
struct Sequence {
  transfer::Buffer memory;
  transfer::Buffer table;
  transfer::Buffer counters;
  std::int64_t blocks = 0;
};

class SketchTest : public testing::BackendTest {
 protected:
  Sequence make_sequence(const SketchGeometry& geometry, std::int64_t capacity,
                         std::int64_t length = 0) {
    Sequence sequence;
    sequence.blocks = (capacity + kBlockTokens - 1) / kBlockTokens;
    sequence.memory = allocate<std::byte>(index(sequence.blocks * geometry.block_bytes()));
    std::vector<std::byte*> table;
    for (std::int64_t block = sequence.blocks - 1; block >= 0; --block) {
      table.push_back(sequence.memory.data() + block * geometry.block_bytes());
    }
    sequence.table = upload(table);
    const transfer::SequenceCounters counters{.length = length, .capacity = capacity};
    sequence.counters = upload(std::span<const transfer::SequenceCounters>(&counters, 1));
    return sequence;
  }

  static SketchItem item(const Sequence& sequence, std::int64_t tokens, std::int64_t offset) {
    return {.blocks = sequence.table.as<std::byte*>(),
            .counters = sequence.counters.as<transfer::SequenceCounters>(),
            .tokens = static_cast<std::int32_t>(tokens),
            .packed_offset = offset};
  }

  void set_length(const Sequence& sequence, std::int64_t length) {
    const transfer::CopyRun run{sequence.counters.data(), &length, sizeof(length)};
    stream_->copy({&run, 1});
    stream_->synchronize();
  }

  // As `transfer::pack_rows` writes them.
  static std::vector<transfer::RowSquares> squares_of(const Rows& rows) {
    const auto square = [](const std::vector<double>& part) {
      return std::inner_product(part.begin(), part.end(), part.begin(), 0.0);
    };
    std::vector<transfer::RowSquares> squares;
    for (std::int64_t i = 0; i < std::ssize(rows.bits) / (2 * rows.head_dim); ++i) {
      const std::vector<double> key =
          rows.part(i / rows.kv_heads, static_cast<int>(i % rows.kv_heads), 0);
      const std::vector<double> value =
          rows.part(i / rows.kv_heads, static_cast<int>(i % rows.kv_heads), rows.head_dim);
      const bool finite = std::isfinite(square(key)) && std::isfinite(square(value));
      const float nan = std::numeric_limits<float>::quiet_NaN();
      squares.push_back(finite ? transfer::RowSquares{static_cast<float>(square(key)),
                                                      static_cast<float>(square(value))}
                               : transfer::RowSquares{nan, nan});
    }
    return squares;
  }

  void sketch(const Planes& planes, const Rows& rows, const SketchBatch& batch,
              bool with_squares = false) {
    const transfer::KvGeometry kv{.kv_heads = rows.kv_heads,
                                  .head_dim = rows.head_dim,
                                  .page_tokens = 64,
                                  .dtype = rows.dtype};
    packed_.push_back(upload(rows.bits));
    const std::byte* const packed = packed_.back().data();
    const transfer::RowSquares* squares = nullptr;
    if (with_squares) {
      packed_.push_back(upload(squares_of(rows)));
      squares = packed_.back().as<transfer::RowSquares>();
    }
    sketch_keys(*stream_, planes.view(), kv, {rows.kv_heads, planes.view().num_planes}, batch,
                packed, squares);
  }

  // `[kv_heads][tokens]` of the first `tokens` tokens.
  std::vector<std::vector<Found>> read(const Sequence& sequence, const SketchGeometry& geometry,
                                       std::int64_t tokens) {
    const auto host = download<std::byte>(sequence.memory.data(),
                                          index(sequence.blocks * geometry.block_bytes()));
    std::vector<std::vector<Found>> found(index(geometry.kv_heads));
    for (int head = 0; head < geometry.kv_heads; ++head) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::byte* block =
            host.data() + (sequence.blocks - 1 - t / kBlockTokens) * geometry.block_bytes();
        const auto at = static_cast<int>(t % kBlockTokens);
        Found token;
        for (int i = 0; i < geometry.chunks() * kChunkBits; ++i) {
          std::uint32_t word = 0;
          std::memcpy(&word,
                      block + geometry.chunk_offset(head, i / kChunkBits, at) +
                          std::ptrdiff_t{4} * (i % kChunkBits / 32),
                      4);
          token.bits.push_back(static_cast<std::uint8_t>((word >> (31 - i % 32)) & 1));
        }
        std::memcpy(&token.key_norm, block + geometry.key_norm_offset(head, at), 2);
        std::memcpy(&token.value_norm, block + geometry.value_norm_offset(head, at), 2);
        found[index(head)].push_back(std::move(token));
      }
    }
    return found;
  }

  // Compares one token with the oracle; returns the bits too close to zero to be compared.
  static int expect_token(const oracle::Planes& planes, const Rows& rows, std::int64_t token,
                          int head, const Found& found) {
    const oracle::Sketch expected =
        oracle::sketch(planes, rows.part(token, head, 0), rows.part(token, head, rows.head_dim));
    int skipped = 0;
    for (std::size_t i = 0; i < found.bits.size(); ++i) {
      if (i >= expected.bits.size()) {
        EXPECT_EQ(found.bits[i], 0) << "bit " << i << " past the planes";
      } else if (expected.margins[i] <= oracle::kBitMargin) {
        ++skipped;
      } else {
        EXPECT_EQ(found.bits[i], expected.bits[i])
            << "token " << token << ", head " << head << ", bit " << i;
      }
    }
    // A norm in fp32 can be on the other side of a rounding boundary of fp16: one unit.
    EXPECT_NEAR(found.key_norm, oracle::to_fp16(expected.key_norm), 1);
    EXPECT_NEAR(found.value_norm, oracle::to_fp16(expected.value_norm), 1);
    return skipped;
  }

  void expect_sketch(const Planes& planes, const Rows& rows, bool with_squares = false) {
    const SketchGeometry geometry{rows.kv_heads, planes.view().num_planes};
    const Sequence sequence = make_sequence(geometry, rows.tokens);
    SketchBatch batch;
    batch.push(item(sequence, rows.tokens, 0));
    sketch(planes, rows, batch, with_squares);

    const auto found = read(sequence, geometry, rows.tokens);
    const oracle::Planes reference =
        oracle::planes_from_bf16(planes.host_bits(), rows.head_dim, false);
    std::int64_t skipped = 0;
    for (int head = 0; head < rows.kv_heads; ++head) {
      for (std::int64_t t = 0; t < rows.tokens; ++t) {
        skipped += expect_token(reference, rows, t, head, found[index(head)][index(t)]);
      }
    }
    // |w . k| / (||w|| ||k||) is nearly normal with variance 1 / d: at most 1.3 % are below 1e-3 at
    // d = 256; three times that, so that few bits do not fail by chance.
    EXPECT_LE(static_cast<double>(skipped),
              0.04 * static_cast<double>(rows.tokens * rows.kv_heads * geometry.num_planes) + 3.0);
  }

 private:
  std::vector<transfer::Buffer> packed_;
};

TEST_P(SketchTest, MatchesTheOracleForEveryHeadDimAndDtype) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int head_dim : {64, 96, 128, 256}) {
      SCOPED_TRACE(::testing::Message() << dtype_name(dtype) << ", head_dim " << head_dim);
      const Planes planes(*device_, {.kind = PlaneKind::kOrthogonal, .num_planes = 129, .seed = 2},
                          head_dim);
      expect_sketch(planes, random_rows(21, dtype, 77, 2, head_dim));
    }
  }
}

TEST_P(SketchTest, MatchesTheOracleForEveryNumberOfPlanes) {
  for (const int count : {1, 15, 16, 17, 31, 32, 33, 128, 129, 256, 600, 1024}) {
    SCOPED_TRACE(::testing::Message() << count << " planes");
    const Planes planes(*device_, {.num_planes = count, .seed = 4}, 128);
    expect_sketch(planes, random_rows(22, DType::kBFloat16, 33, 2, 128));
  }
}

TEST_P(SketchTest, MatchesTheOracleForEveryNumberOfTokens) {
  const Planes planes(*device_, {.num_planes = 60, .seed = 4}, 64);
  for (const std::int64_t tokens : {0, 1, 5, 6, 7, 95, 96, 97, 127, 128, 129, 257, 1023, 1025}) {
    SCOPED_TRACE(::testing::Message() << tokens << " tokens");
    expect_sketch(planes, random_rows(23, DType::kFloat16, tokens, 1, 64));
  }
}

// Long appends whose squares are known have a kernel of their own on some processors.
TEST_P(SketchTest, MatchesTheOracleForLongAppends) {
  struct Case {
    int head_dim, kv_heads, planes;
    std::int64_t tokens;
    bool squares = true;
  };
  for (const Case& c : {Case{128, 3, 130, 2101}, Case{64, 1, 1024, 2048}, Case{128, 1, 600, 2113},
                        Case{128, 1, 1023, 2050}, Case{64, 2, 31, 4097}, Case{96, 1, 64, 2101},
                        Case{128, 1, 64, 2101, false}}) {
    SCOPED_TRACE(::testing::Message() << "head_dim " << c.head_dim << ", " << c.kv_heads
                                      << " heads, " << c.planes << " planes, " << c.tokens);
    const Planes planes(*device_, {.num_planes = c.planes, .seed = 4}, c.head_dim);
    expect_sketch(planes, random_rows(33, DType::kBFloat16, c.tokens, c.kv_heads, c.head_dim),
                  c.squares);
  }
}

TEST_P(SketchTest, LongAppendStartsAtTheLengthStopsAtTheCapacityAndMarksTokens) {
  constexpr std::int64_t kLength = 1001, kTokens = 2300, kCapacity = 3270;
  const Planes planes(*device_, {.num_planes = 200, .seed = 6}, 128);
  const SketchGeometry geometry{2, 200};
  Rows rows = random_rows(34, DType::kBFloat16, kTokens + 7, 2, 128);
  const double infinity = std::numeric_limits<double>::infinity();
  rows.set(7 + 66, 0, 127, infinity);                                    // in a key
  rows.set(7 + 2000, 1, 130, std::numeric_limits<double>::quiet_NaN());  // in a value
  rows.set(7 + 2001, 0, 3, 1e30);  // finite, its square is not
  for (int x = 0; x < 128; ++x) rows.set(7 + 70, 1, x, 0.0);
  const Sequence sequence = make_sequence(geometry, 4096, kLength);
  const transfer::SequenceCounters counters{.length = kLength, .capacity = kCapacity};
  const transfer::CopyRun run{sequence.counters.data(), &counters, sizeof(counters)};
  stream_->copy({&run, 1});
  SketchBatch batch;
  batch.push(item(sequence, kTokens, 7));
  sketch(planes, rows, batch, true);

  const auto found = read(sequence, geometry, kCapacity + 20);
  const oracle::Planes reference = oracle::planes_from_bf16(planes.host_bits(), 128, false);
  for (int head = 0; head < 2; ++head) {
    EXPECT_EQ(found[index(head)][kLength - 1].key_norm, 0xA5A5);
    for (std::int64_t t = kCapacity; t < kCapacity + 20; ++t) {
      EXPECT_EQ(found[index(head)][index(t)].key_norm, 0xA5A5) << t;
    }
    for (std::int64_t t = 0; t < kCapacity - kLength; ++t) {
      const Found& token = found[index(head)][index(kLength + t)];
      if ((t == 66 && head == 0) || (t == 2000 && head == 1)) {
        EXPECT_EQ(token.key_norm, kNonfiniteNorm) << t;
        EXPECT_EQ(token.value_norm, kNonfiniteNorm) << t;
        EXPECT_EQ(token.bits, std::vector<std::uint8_t>(token.bits.size(), 0)) << t;
      } else if (t == 70 && head == 1) {
        for (int i = 0; i < 200; ++i) EXPECT_EQ(token.bits[index(i)], 1) << i;  // 0 >= 0
      } else {
        expect_token(reference, rows, t + 7, head, token);
      }
    }
  }
}

TEST_P(SketchTest, AppendInPiecesEqualsAppendAtOnce) {
  const Planes planes(*device_, {.num_planes = 200, .seed = 6}, 96);
  const SketchGeometry geometry{3, 200};
  const Rows rows = random_rows(24, DType::kBFloat16, 1100, 3, 96);
  const Sequence once = make_sequence(geometry, 1100);
  const Sequence pieces = make_sequence(geometry, 1100);
  SketchBatch batch;
  batch.push(item(once, 1100, 0));
  sketch(planes, rows, batch);

  std::int64_t length = 0;
  for (const std::int64_t tokens : {1, 500, 522, 2, 75}) {  // the fourth crosses a block boundary
    set_length(pieces, length);
    SketchBatch piece;
    piece.push(item(pieces, tokens, length));
    sketch(planes, rows, piece);
    length += tokens;
  }

  ASSERT_EQ(length, 1100);
  EXPECT_EQ(read(pieces, geometry, 1100), read(once, geometry, 1100));
}

TEST_P(SketchTest, ItemsOfABatchGoToTheirOwnSequencesAndPositions) {
  const Planes planes(*device_, {.num_planes = 130, .seed = 6}, 64);
  const SketchGeometry geometry{2, 130};
  const Rows rows = random_rows(25, DType::kBFloat16, 60, 2, 64);
  const Sequence first = make_sequence(geometry, 2048, 1000);
  const Sequence second = make_sequence(geometry, 1024, 3);
  const Sequence idle = make_sequence(geometry, 1024, 0);
  SketchBatch batch;
  batch.push(item(second, 13, 47));
  batch.push(item(idle, 0, 0));
  batch.push(item(first, 47, 0));
  sketch(planes, rows, batch);

  const oracle::Planes reference = oracle::planes_from_bf16(planes.host_bits(), 64, false);
  const auto found_first = read(first, geometry, 1048);
  const auto found_second = read(second, geometry, 17);
  for (int head = 0; head < 2; ++head) {
    for (std::int64_t t = 0; t < 47; ++t) {
      expect_token(reference, rows, t, head, found_first[index(head)][index(1000 + t)]);
    }
    for (std::int64_t t = 0; t < 13; ++t) {
      expect_token(reference, rows, 47 + t, head, found_second[index(head)][index(3 + t)]);
    }
    // Neighbours keep the fill pattern of the fixture.
    for (const Found& token : {found_first[index(head)][999], found_first[index(head)][1047],
                               found_second[index(head)][2], found_second[index(head)][16]}) {
      EXPECT_EQ(token.key_norm, 0xA5A5);
      EXPECT_EQ(token.value_norm, 0xA5A5);
    }
  }
}

TEST_P(SketchTest, DropsTokensPastTheCapacity) {
  const Planes planes(*device_, {.num_planes = 64, .seed = 6}, 64);
  const SketchGeometry geometry{1, 64};
  const Rows rows = random_rows(26, DType::kBFloat16, 10, 1, 64);
  Sequence sequence = make_sequence(geometry, 1024, 90);
  const transfer::SequenceCounters counters{.length = 90, .capacity = 94};
  const transfer::CopyRun run{sequence.counters.data(), &counters, sizeof(counters)};
  stream_->copy({&run, 1});
  SketchBatch batch;
  batch.push(item(sequence, 10, 0));
  sketch(planes, rows, batch);

  const auto found = read(sequence, geometry, 100)[0];
  EXPECT_NE(found[93].key_norm, 0xA5A5);
  for (std::int64_t t = 94; t < 100; ++t) EXPECT_EQ(found[index(t)].key_norm, 0xA5A5) << t;
}

TEST_P(SketchTest, MarksTokensThatAreNotFiniteAndLeavesTheirNeighbours) {
  struct Poison {
    std::int64_t token;
    int head;
    int x;  // < head_dim: in the key
    double value;
  };
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<Poison> poisons = {
      {0, 0, 0, std::numeric_limits<double>::quiet_NaN()},
      {7, 1, 63, infinity},
      {8, 0, 64, -infinity},
      {40, 1, 127, std::numeric_limits<double>::quiet_NaN()},
  };
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const Planes planes(*device_, {.num_planes = 100, .seed = 6}, 64);
    const SketchGeometry geometry{2, 100};
    Rows rows = random_rows(27, dtype, 41, 2, 64);
    for (const Poison& p : poisons) rows.set(p.token, p.head, p.x, p.value);
    const Sequence sequence = make_sequence(geometry, 41);
    SketchBatch batch;
    batch.push(item(sequence, 41, 0));
    sketch(planes, rows, batch);

    const auto found = read(sequence, geometry, 41);
    const oracle::Planes reference = oracle::planes_from_bf16(planes.host_bits(), 64, false);
    for (int head = 0; head < 2; ++head) {
      for (std::int64_t t = 0; t < 41; ++t) {
        const Found& token = found[index(head)][index(t)];
        const bool poisoned = std::any_of(poisons.begin(), poisons.end(), [&](const Poison& p) {
          return p.token == t && p.head == head;
        });
        if (!poisoned) {
          expect_token(reference, rows, t, head, token);
          continue;
        }
        EXPECT_EQ(token.key_norm, kNonfiniteNorm) << "token " << t << ", head " << head;
        EXPECT_EQ(token.value_norm, kNonfiniteNorm) << "token " << t << ", head " << head;
        EXPECT_EQ(token.bits, std::vector<std::uint8_t>(token.bits.size(), 0));
      }
    }
  }
}

TEST_P(SketchTest, ClampsNormsOfVerySmallAndVeryLargeFiniteTokens) {
  const Planes planes(*device_, {.num_planes = 32, .seed = 6}, 64);
  const SketchGeometry geometry{1, 32};
  Rows rows = random_rows(28, DType::kBFloat16, 4, 1, 64);
  for (int x = 0; x < 128; ++x) {
    rows.set(0, 0, x, 0.0);
    rows.set(1, 0, x, 1e-30);
    rows.set(2, 0, x, 3e4);
    rows.set(3, 0, x, 3e38);  // the sum of squares is above the range of fp32
  }
  const Sequence sequence = make_sequence(geometry, 4);
  SketchBatch batch;
  batch.push(item(sequence, 4, 0));
  sketch(planes, rows, batch);

  const auto found = read(sequence, geometry, 4)[0];
  const std::uint16_t smallest = 0x0001;
  const std::uint16_t largest = 0x7BFF;
  for (const std::int64_t t : {0, 1, 2, 3}) {
    EXPECT_EQ(found[index(t)].key_norm, t < 2 ? smallest : largest) << t;
    EXPECT_EQ(found[index(t)].value_norm, t < 2 ? smallest : largest) << t;
  }
  // A projection of exactly zero counts as positive.
  for (int i = 0; i < 32; ++i) EXPECT_EQ(found[0].bits[index(i)], 1) << i;
}

// Charikar: two vectors at angle t fall in one bucket of P planes with probability (1 - t / pi)^P.
TEST_P(SketchTest, BucketsCollideWithTheProbabilityOfTheirAngle) {
  constexpr int kHeadDim = 64;
  constexpr int kPlanes = 1024;
  for (const double cosine : {0.95, 0.8, 0.3}) {
    Rows rows = random_rows(29, DType::kFloat16, 2, 1, kHeadDim);
    for (int x = 0; x < kHeadDim; ++x) {
      rows.set(0, 0, x, x == 0 ? 1.0 : 0.0);
      rows.set(1, 0, x, x == 0 ? cosine : x == 1 ? std::sqrt(1.0 - cosine * cosine) : 0.0);
    }
    for (const int planes_per_table : {1, 4, 8}) {
      std::int64_t equal = 0;
      std::int64_t tables = 0;
      for (std::uint64_t seed = 0; seed < 24; ++seed) {
        const Planes planes(*device_, {.num_planes = kPlanes, .seed = seed}, kHeadDim);
        const SketchGeometry geometry{1, kPlanes};
        const Sequence sequence = make_sequence(geometry, 2);
        SketchBatch batch;
        batch.push(item(sequence, 2, 0));
        sketch(planes, rows, batch);
        const auto found = read(sequence, geometry, 2)[0];
        for (int i = 0; i + planes_per_table <= kPlanes; i += planes_per_table, ++tables) {
          equal +=
              std::equal(found[0].bits.begin() + i, found[0].bits.begin() + i + planes_per_table,
                         found[1].bits.begin() + i)
                  ? 1
                  : 0;
        }
      }
      const double expected =
          std::pow(1.0 - std::acos(cosine) / std::numbers::pi, planes_per_table);
      const double deviation = std::sqrt(expected * (1.0 - expected) / static_cast<double>(tables));
      EXPECT_NEAR(static_cast<double>(equal) / static_cast<double>(tables), expected,
                  4.0 * deviation)
          << "cosine " << cosine << ", P " << planes_per_table;
    }
  }
}

TEST(SketchGeometry, HasTwoChunksOfATokenSideBySide) {
  for (const int num_planes : {129, 200, 256}) {
    const SketchGeometry geometry{3, num_planes};
    for (const int head : {0, 2}) {
      const std::int64_t of_head = std::int64_t{head} * kBlockTokens * 32;
      EXPECT_EQ(geometry.chunk_offset(head, 0, 0), of_head) << num_planes;
      EXPECT_EQ(geometry.chunk_offset(head, 1, 0), of_head + 16) << num_planes;
      EXPECT_EQ(geometry.chunk_offset(head, 0, 7), of_head + 7 * 32) << num_planes;
      EXPECT_EQ(geometry.chunk_offset(head, 1, 1023), of_head + 1023 * 32 + 16) << num_planes;
    }
  }
}

TEST(SketchGeometry, HasOtherNumbersOfChunksOneAfterAnother) {
  for (const int num_planes : {1, 128, 257, 384, 512, 600, 1024}) {
    const SketchGeometry geometry{3, num_planes};
    for (const int head : {0, 2}) {
      for (int chunk = 0; chunk < geometry.chunks(); ++chunk) {
        const std::int64_t plane = std::int64_t{head} * geometry.chunks() + chunk;
        for (const int token : {0, 1, 1023}) {
          EXPECT_EQ(geometry.chunk_offset(head, chunk, token), (plane * kBlockTokens + token) * 16)
              << num_planes << " planes, chunk " << chunk;
        }
      }
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(SketchTest);

}  // namespace

}  // namespace kvtier::hashing
