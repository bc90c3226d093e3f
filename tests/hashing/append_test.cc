#include "hashing/append.h"

#include "support/oracle.h"
#include "transfer/kv/page_rows.h"
#include "transfer/kv/rows_fixture.h"

#include <memory>
#include <utility>

namespace kvtier::hashing {

namespace {

using transfer::HostTensor;
using transfer::KvGeometry;
using transfer::SequenceUnderTest;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// The planes of one sketch, on the device and for the oracle.
struct SketchUnderTest {
  std::unique_ptr<Planes> planes;
  oracle::Planes reference;
  SketchGeometry geometry;
};

// A sequence, its blocks per sketch, and the rows that were appended: [token][KV head].
struct Subject {
  SequenceUnderTest rows;
  std::vector<transfer::Buffer> memory;
  std::vector<transfer::Buffer> tables;
  std::int64_t blocks = 0;
  std::vector<std::vector<std::vector<std::uint16_t>>> appended;
};

struct Piece {
  Subject* subject;
  std::int32_t tokens;
};

// What is not finite in a tensor of an append.
struct Poison {
  int token;
  int head;
  bool in_values;
  double value;
};

class AppendRowsTest : public transfer::RowsTest {
 protected:
  bool pages_on_device_ = true;
  transfer::FrameFactors factors_;

  SketchUnderTest make_sketch(const KvGeometry& g, int num_planes, std::uint64_t seed = 3) {
    auto planes = std::make_unique<Planes>(
        *device_, SketchConfig{.num_planes = num_planes, .seed = seed}, g.head_dim);
    oracle::Planes reference = oracle::planes_from_bf16(planes->host_bits(), g.head_dim, false);
    return {std::move(planes), std::move(reference), {g.kv_heads, num_planes}};
  }

  Subject make_subject(const KvGeometry& g, const std::vector<SketchUnderTest>& sketches,
                       std::int64_t capacity) {
    Subject subject;
    subject.rows = make_sequence(g, capacity);
    subject.blocks = (capacity + kBlockTokens - 1) / kBlockTokens;
    for (const SketchUnderTest& sketch : sketches) {
      const std::int64_t bytes = sketch.geometry.block_bytes();
      subject.memory.push_back(allocate<std::byte>(index(subject.blocks * bytes)));
      std::vector<std::byte*> table;
      for (std::int64_t block = subject.blocks - 1; block >= 0; --block) {
        table.push_back(subject.memory.back().data() + block * bytes);
      }
      subject.tables.push_back(upload(table));
    }
    return subject;
  }

  // Appends random tokens to several sequences in one call, on the device and in the model.
  void append(const KvGeometry& g, const std::vector<SketchUnderTest>& sketches,
              const std::vector<Piece>& pieces, DType dtype, std::int64_t head_gap = 0,
              std::int64_t token_gap = 0, const std::vector<Poison>& poisons = {},
              transfer::StepFlags* flags = nullptr) {
    transfer::AppendBatch batch;
    std::vector<SketchTarget> targets;
    for (const SketchUnderTest& sketch : sketches) {
      targets.push_back(
          {.planes = sketch.planes->view(), .geometry = sketch.geometry, .blocks = {}});
    }
    std::int64_t total = 0;
    for (const Piece& piece : pieces) {
      HostTensor keys = transfer::random_tensor(random_, dtype, piece.tokens, g.kv_heads,
                                                g.head_dim, head_gap, token_gap);
      HostTensor values = transfer::random_tensor(random_, dtype, piece.tokens, g.kv_heads,
                                                  g.head_dim, token_gap, head_gap);
      for (const Poison& p : poisons) {
        (p.in_values ? values : keys).set(p.token, p.head, g.head_dim - 1, p.value);
      }
      inputs_.push_back(upload(keys.bytes));
      inputs_.push_back(upload(values.bytes));
      batch.push({.sequence = piece.subject->rows.view,
                  .keys = keys.view(inputs_[inputs_.size() - 2].data()),
                  .values = values.view(inputs_.back().data()),
                  .tokens = piece.tokens,
                  .packed_offset = total,
                  .flags = flags,
                  .layer = 5});
      for (std::size_t s = 0; s < targets.size(); ++s) {
        targets[s].blocks.push(piece.subject->tables[s].as<std::byte*>());
      }
      total += piece.tokens;
      const std::int64_t before = piece.subject->rows.expected.length;
      expect_append(g, piece.subject->rows, keys, values, piece.tokens);
      for (std::int64_t i = 0; i < piece.subject->rows.expected.length - before; ++i) {
        auto& token = piece.subject->appended.emplace_back();
        for (int head = 0; head < g.kv_heads; ++head) {
          token.push_back(expected_row(g, keys, values, i, head));
        }
      }
    }
    const auto row_elements = g.row_bytes() / 2 * g.kv_heads;
    inputs_.push_back(allocate<std::uint16_t>(index(row_elements * total)));
    std::byte* const rows = inputs_.back().data();
    inputs_.push_back(allocate<transfer::RowSquares>(index(g.kv_heads * total)));
    append_rows(*stream_, g, batch, targets, {rows, inputs_.back().as<transfer::RowSquares>()},
                pages_on_device_, factors_);
  }

  static void expect_place(const transfer::StepFlags& flags, std::int64_t token) {
    const auto place = transfer::NonfinitePlace::of(flags.first_nonfinite);
    EXPECT_EQ(place.token, token);
    EXPECT_EQ(place.layer, 5);
    EXPECT_FALSE(place.in_query);
  }

  // Compares rows, counters and the sketches of all tokens with the model.
  void expect_subject(const KvGeometry& g, const std::vector<SketchUnderTest>& sketches,
                      Subject& subject) {
    expect_state(subject.rows);
    for (std::size_t s = 0; s < sketches.size(); ++s) {
      SCOPED_TRACE("sketch " + std::to_string(s));
      const SketchUnderTest& sketch = sketches[s];
      const auto host = download<std::byte>(subject.memory[s].data(), subject.memory[s].bytes());
      std::int64_t skipped = 0;
      std::int64_t compared = 0;
      for (std::int64_t t = 0; t < subject.blocks * kBlockTokens; ++t) {
        const std::byte* block =
            host.data() + (subject.blocks - 1 - t / kBlockTokens) * sketch.geometry.block_bytes();
        for (int head = 0; head < g.kv_heads; ++head) {
          SCOPED_TRACE("token " + std::to_string(t) + ", head " + std::to_string(head));
          if (t >= std::ssize(subject.appended)) {
            expect_untouched(sketch, block, head, static_cast<int>(t % kBlockTokens));
            continue;
          }
          skipped += expect_sketch(g, sketch, block, head, static_cast<int>(t % kBlockTokens),
                                   subject.appended[index(t)][index(head)]);
          compared += sketch.geometry.num_planes;
        }
      }
      // At most 1.3 % of random projections are within the margin; see sketch_test.cc.
      EXPECT_LE(static_cast<double>(skipped), 0.04 * static_cast<double>(compared) + 3.0);
    }
  }

 private:
  static std::uint32_t word(const SketchUnderTest& sketch, const std::byte* block, int head, int at,
                            int w) {
    std::uint32_t bits = 0;
    std::memcpy(&bits,
                block + sketch.geometry.chunk_offset(head, w / 4, at) + std::ptrdiff_t{4} * (w % 4),
                4);
    return bits;
  }
  static std::pair<int, int> norms(const SketchUnderTest& sketch, const std::byte* block, int head,
                                   int at) {
    std::uint16_t key = 0;
    std::uint16_t value = 0;
    std::memcpy(&key, block + sketch.geometry.key_norm_offset(head, at), 2);
    std::memcpy(&value, block + sketch.geometry.value_norm_offset(head, at), 2);
    return {key, value};
  }

  static void expect_untouched(const SketchUnderTest& sketch, const std::byte* block, int head,
                               int at) {
    ASSERT_EQ(norms(sketch, block, head, at), std::pair(0xA5A5, 0xA5A5));
    for (int w = 0; w < sketch.geometry.chunks() * 4; ++w) {
      ASSERT_EQ(word(sketch, block, head, at, w), 0xA5A5A5A5U) << "word " << w;
    }
  }

  // Returns the bits too close to zero to be compared.
  static int expect_sketch(const KvGeometry& g, const SketchUnderTest& sketch,
                           const std::byte* block, int head, int at,
                           const std::vector<std::uint16_t>& row) {
    std::vector<double> values;
    for (const std::uint16_t bits : row) {
      values.push_back(testing::reference_value(bits, g.dtype));
    }
    const auto dim = index(g.head_dim);
    const oracle::Sketch expected = oracle::sketch(sketch.reference, std::span(values).first(dim),
                                                   std::span(values).subspan(dim));
    const std::pair<int, int> found_norms = norms(sketch, block, head, at);
    if (expected.finite) {
      // A norm in fp32 can be on the other side of a rounding boundary of fp16: one unit.
      EXPECT_NEAR(found_norms.first, oracle::to_fp16(expected.key_norm), 1);
      EXPECT_NEAR(found_norms.second, oracle::to_fp16(expected.value_norm), 1);
    } else {
      EXPECT_EQ(found_norms, std::pair(int{kNonfiniteNorm}, int{kNonfiniteNorm}));
    }
    int skipped = 0;
    for (int i = 0; i < sketch.geometry.chunks() * kChunkBits; ++i) {
      const unsigned found = word(sketch, block, head, at, i / 32) >> (31 - i % 32) & 1U;
      if (!expected.finite || i >= sketch.geometry.num_planes) {
        EXPECT_EQ(found, 0U) << "bit " << i;
      } else if (expected.margins[index(i)] <= oracle::kBitMargin) {
        ++skipped;
      } else {
        EXPECT_EQ(found, expected.bits[index(i)]) << "bit " << i;
      }
    }
    return skipped;
  }

  std::vector<transfer::Buffer> inputs_;
};
KVTIER_INSTANTIATE_BACKENDS(AppendRowsTest);

std::vector<SketchUnderTest> one(SketchUnderTest sketch) {
  std::vector<SketchUnderTest> sketches;
  sketches.push_back(std::move(sketch));
  return sketches;
}

TEST_P(AppendRowsTest, TakesEveryDtypeAndHeadDim) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const DType storage : {DType::kBFloat16, DType::kFloat16}) {
      for (const DType input : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        const KvGeometry g = transfer::geometry(3, head_dim, 16, 4, 8, storage);
        SCOPED_TRACE(describe_geometry(g) + " from " + std::string(dtype_name(input)));
        const auto sketches = one(make_sketch(g, 129));
        Subject s = make_subject(g, sketches, 40);

        append(g, sketches, {{&s, 1}}, input);
        append(g, sketches, {{&s, 7}}, input);

        expect_subject(g, sketches, s);
      }
    }
  }
}

TEST_P(AppendRowsTest, TakesEveryNumberOfPlanes) {
  const KvGeometry g = transfer::geometry(2, 128, 16, 4, 8);
  for (const int planes : {1, 31, 32, 33, 128, 129, 256, 600, 1024}) {
    SCOPED_TRACE(std::to_string(planes) + " planes");
    const auto sketches = one(make_sketch(g, planes));
    Subject s = make_subject(g, sketches, 40);

    append(g, sketches, {{&s, 3}}, DType::kBFloat16);

    expect_subject(g, sketches, s);
  }
}

TEST_P(AppendRowsTest, TakesEveryNumberOfTokens) {
  const KvGeometry g = transfer::geometry(3, 64, 16, 4, 8);
  const auto sketches = one(make_sketch(g, 60));
  Subject s = make_subject(g, sketches, 2048);
  for (const int tokens : {1, 5, 6, 0, 16, 17, 64, 127, 128, 129, 300}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");

    append(g, sketches, {{&s, tokens}}, DType::kFloat32);

    expect_subject(g, sketches, s);
  }
}

TEST_P(AppendRowsTest, ReadsStridedInputs) {
  for (const auto& [head_gap, token_gap] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 8}, {8, 0}, {1, 0}, {3, 5}, {64, 1}}) {
    for (const DType input : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      SCOPED_TRACE("gaps " + std::to_string(head_gap) + " and " + std::to_string(token_gap) + ", " +
                   std::string(dtype_name(input)));
      const KvGeometry g = transfer::geometry(3, 128, 16, 4, 8);
      const auto sketches = one(make_sketch(g, 64));
      Subject s = make_subject(g, sketches, 32);

      append(g, sketches, {{&s, 9}}, input, head_gap, token_gap);

      expect_subject(g, sketches, s);
    }
  }
}

TEST_P(AppendRowsTest, WrapsAroundTheRingAndStopsAtTheCapacity) {
  for (const auto& [sink, recent] : std::vector<std::pair<int, int>>{{5, 7}, {0, 1}, {3, 0}}) {
    const KvGeometry g = transfer::geometry(2, 64, 16, sink, recent);
    SCOPED_TRACE(describe_geometry(g));
    const auto sketches = one(make_sketch(g, 40));
    Subject s = make_subject(g, sketches, 50);

    // One after another, with nothing waiting in between.
    for (const int tokens : {1, 1, 1, 3, 6, 7, 8, 17, 1, 1}) {
      append(g, sketches, {{&s, tokens}}, DType::kFloat32);
    }
    expect_subject(g, sketches, s);
    append(g, sketches, {{&s, 10}}, DType::kFloat32);  // 4 fit
    append(g, sketches, {{&s, 1}}, DType::kFloat32);

    expect_subject(g, sketches, s);
    EXPECT_EQ(s.rows.expected.length, 50);
    EXPECT_EQ(s.rows.expected.overflow, 7);
  }
}

TEST_P(AppendRowsTest, CrossesASketchBlock) {
  const KvGeometry g = transfer::geometry(2, 64, 64, 4, 8);
  const auto sketches = one(make_sketch(g, 40));
  Subject s = make_subject(g, sketches, 1100);

  append(g, sketches, {{&s, 1020}}, DType::kBFloat16);
  append(g, sketches, {{&s, 3}}, DType::kBFloat16);
  append(g, sketches, {{&s, 20}}, DType::kBFloat16);

  expect_subject(g, sketches, s);
}

TEST_P(AppendRowsTest, WritesSeveralSketches) {
  const KvGeometry g = transfer::geometry(2, 96, 16, 4, 8);
  std::vector<SketchUnderTest> sketches;
  for (const int planes : {600, 64, 33}) sketches.push_back(make_sketch(g, planes, 7));
  Subject a = make_subject(g, sketches, 40);
  Subject b = make_subject(g, sketches, 4);

  append(g, sketches, {{&a, 1}, {&b, 3}}, DType::kFloat16);
  append(g, sketches, {{&b, 3}, {&a, 12}}, DType::kFloat16);

  expect_subject(g, sketches, a);
  expect_subject(g, sketches, b);
}

TEST_P(AppendRowsTest, TakesRaggedBatches) {
  for (const int kv_heads : {1, 8}) {
    const KvGeometry g = transfer::geometry(kv_heads, 64, 16, 2, 4);
    const auto sketches = one(make_sketch(g, 40));
    std::vector<Subject> subjects;
    std::vector<Piece> decode;
    std::vector<Piece> ragged;
    for (int i = 0; i < transfer::kMaxBatch; ++i) subjects.push_back(make_subject(g, sketches, 4));
    for (int i = 0; i < transfer::kMaxBatch; ++i) {
      decode.push_back({&subjects[index(i)], 1});
      ragged.push_back({&subjects[index(transfer::kMaxBatch - 1 - i)], i % 3});
    }

    append(g, sketches, decode, DType::kBFloat16);
    append(g, sketches, ragged, DType::kBFloat16);
    append(g, sketches, decode, DType::kBFloat16);

    for (Subject& s : subjects) expect_subject(g, sketches, s);
  }
}

TEST_P(AppendRowsTest, TakesPrompts) {
  struct Case {
    int head_dim;
    std::int64_t head_gap, token_gap;
    bool pages_on_device;
  };
  for (const Case& c : {Case{128, 8, 64, false}, Case{64, 0, 24, true}, Case{64, 4, 0, true}}) {
    const KvGeometry g = transfer::geometry(2, c.head_dim, 64, 70, 100);
    SCOPED_TRACE(describe_geometry(g) + ", gaps " + std::to_string(c.head_gap) + " and " +
                 std::to_string(c.token_gap));
    pages_on_device_ = c.pages_on_device;
    std::vector<SketchUnderTest> sketches;
    for (const int planes : {20, 33}) sketches.push_back(make_sketch(g, planes, 7));
    Subject a = make_subject(g, sketches, 5000);
    Subject b = make_subject(g, sketches, 2049);
    transfer::StepFlags* flags = make_flags();
    const double infinity = std::numeric_limits<double>::infinity();

    append(g, sketches, {{&a, 3}}, DType::kBFloat16, c.head_gap, c.token_gap);
    // Of both sequences, and a token of b that is dropped counts.
    append(g, sketches, {{&a, 2049}, {&b, 2051}}, DType::kBFloat16, c.head_gap, c.token_gap,
           {{5, 1, false, infinity}, {5, 1, true, infinity}, {2048, 0, true, -infinity}}, flags);

    expect_subject(g, sketches, a);
    expect_subject(g, sketches, b);
    EXPECT_EQ(flags->nonfinite_tokens, 4U);
    expect_place(*flags, 5);  // of b, which was empty
    EXPECT_EQ(b.rows.expected.overflow, 2);
  }
}

// Appends of few tokens, of more, and of a prompt have a kernel each.
TEST_P(AppendRowsTest, WritesTheFactorsOfInt8RowsNearKernels) {
  if (GetParam() == Backend::kCpu) GTEST_SKIP() << "copies of factors are of CUDA alone";
  for (const int head_dim : {64, 128, 256}) {
    KvGeometry g = transfer::geometry(2, head_dim, 64, 4, 8);
    g.int8_pages = true;
    SCOPED_TRACE(describe_geometry(g));
    const auto sketches = one(make_sketch(g, 64));
    Subject s = make_subject(g, sketches, 3000);
    // Rows of 16 bits, which are not compared, take more room than those in the pages.
    s.rows.expected_pages.resize(3 * s.rows.expected_pages.size());
    const auto frames = index(s.rows.num_pages + 1);
    const std::size_t floats = transfer::frame_factor_bytes(g, frames) / sizeof(float);
    const transfer::Buffer memory = upload(std::vector<float>(floats, -1.0F));
    factors_ = {s.rows.pages.data(), memory.as<float>()};

    for (const int tokens : {1, 64, 300, 2050}) {
      append(g, sketches, {{&s, tokens}}, DType::kBFloat16);
    }

    const auto near = download<float>(memory.data(), floats);
    for (std::int64_t token = 0; token < s.rows.expected.length; ++token) {
      const std::size_t place = s.rows.page_order[index(token / g.page_tokens)];
      const std::byte* page = s.rows.pages.data() + place * index(g.page_bytes());
      for (int head = 0; head < g.kv_heads; ++head) {
        const float* scales = transfer::page_row<const float>(g, page, head, token).scales;
        const std::size_t at =
            2 * ((place * index(g.kv_heads) + index(head)) * index(g.page_tokens) +
                 index(token % g.page_tokens));
        ASSERT_GT(scales[0], 0.0F);
        ASSERT_EQ(near[at], scales[0]) << "token " << token << ", head " << head;
        ASSERT_EQ(near[at + 1], scales[1]) << "token " << token << ", head " << head;
      }
    }
  }
}

// A token of few, and of many, behind those that are there: appends have a kernel for each.
TEST_P(AppendRowsTest, NamesTheFirstTokenThatIsNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const int tokens : {3, 700}) {
    SCOPED_TRACE(tokens);
    const KvGeometry g = transfer::geometry(2, 64, 16, 2, 4);
    const auto sketches = one(make_sketch(g, 100));
    Subject s = make_subject(g, sketches, 2000);
    transfer::StepFlags* flags = make_flags();
    append(g, sketches, {{&s, 37}}, DType::kBFloat16);

    append(g, sketches, {{&s, tokens}}, DType::kBFloat16, 0, 0,
           {{tokens - 1, 0, true, infinity}, {1, 1, false, infinity}}, flags);
    append(g, sketches, {{&s, 1}}, DType::kBFloat16, 0, 0, {{0, 0, false, infinity}}, flags);

    expect_subject(g, sketches, s);
    EXPECT_EQ(flags->nonfinite_tokens, 3U);
    expect_place(*flags, 38);
  }
}

TEST_P(AppendRowsTest, MarksAndCountsTokensThatAreNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType storage : {DType::kBFloat16, DType::kFloat16}) {
    SCOPED_TRACE(dtype_name(storage));
    const KvGeometry g = transfer::geometry(3, 64, 16, 2, 4, storage);
    const auto sketches = one(make_sketch(g, 100));
    Subject s = make_subject(g, sketches, 20);
    transfer::StepFlags* flags = make_flags();

    // The pair (0, 1) counts once; the last is dropped, and counts.
    const std::vector<Poison> poisons = {{0, 1, false, infinity},
                                         {0, 1, true, infinity},
                                         {7, 2, true, -infinity},
                                         {12, 0, false, infinity},
                                         {21, 1, true, nan}};
    append(g, sketches, {{&s, 22}}, DType::kFloat32, 0, 0, poisons, flags);

    expect_subject(g, sketches, s);
    EXPECT_EQ(flags->nonfinite_tokens, 4U);
    expect_place(*flags, 0);
    EXPECT_EQ(flags->nonfinite_queries, 0U);
  }
}

}  // namespace

}  // namespace kvtier::hashing
