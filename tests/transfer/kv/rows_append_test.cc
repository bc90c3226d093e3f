#include "tests/transfer/kv/rows_fixture.h"

#include <gtest/gtest.h>

#include <utility>

namespace kvtier::transfer {
namespace {

/// One item of an append before it is put on the device.
struct Piece {
  SequenceUnderTest* sequence;
  std::int32_t tokens;
};

class RowsAppendTest : public RowsTest {
 protected:
  /// Appends random tokens to several sequences in one batch, on the device and in the model.
  void append(const KvGeometry& g, const std::vector<Piece>& pieces, DType dtype,
              std::int64_t head_gap = 0, std::int64_t token_gap = 0) {
    AppendBatch batch;
    std::vector<Buffer> inputs;
    std::int64_t total = 1;  // the packed array starts with a row that nobody may touch
    for (const Piece& piece : pieces) {
      const HostTensor keys =
          random_tensor(random_, dtype, piece.tokens, g.kv_heads, g.head_dim, head_gap, token_gap);
      const HostTensor values =
          random_tensor(random_, dtype, piece.tokens, g.kv_heads, g.head_dim, token_gap, head_gap);
      inputs.push_back(upload(keys.bytes));
      inputs.push_back(upload(values.bytes));
      batch.push({.sequence = piece.sequence->view,
                  .keys = keys.view(inputs[inputs.size() - 2].data()),
                  .values = values.view(inputs.back().data()),
                  .tokens = piece.tokens,
                  .packed_offset = total});
      total += piece.tokens;
      expect_append(g, *piece.sequence, keys, values, piece.tokens);
    }
    const auto row_elements = static_cast<std::size_t>(g.row_bytes() / 2 * g.kv_heads);
    const Buffer packed = allocate<std::uint16_t>(row_elements * static_cast<std::size_t>(total));
    const Buffer squares = allocate<RowSquares>(static_cast<std::size_t>(g.kv_heads * total));
    pack_rows(*stream_, g, batch, packed.data(), squares.as<RowSquares>());
    store_rows(*stream_, g, batch, packed.data());
    append_done(*stream_, g, batch);
    const auto first = download<std::uint16_t>(packed.data(), row_elements);
    EXPECT_EQ(first, std::vector<std::uint16_t>(row_elements, kUnwritten));
    expect_squares(g, download<std::uint16_t>(packed.data(), packed.bytes() / 2),
                   download<RowSquares>(squares.data(), squares.bytes() / sizeof(RowSquares)));
  }

 private:
  /// Of all rows but those of the first token.
  static void expect_squares(const KvGeometry& g, const std::vector<std::uint16_t>& rows,
                             const std::vector<RowSquares>& squares) {
    constexpr double kTolerance = 256 * 0x1p-24;  // of as many sums in fp32
    const auto head_dim = static_cast<std::size_t>(g.head_dim);
    for (std::size_t row = static_cast<std::size_t>(g.kv_heads); row < squares.size(); ++row) {
      for (const bool is_value : {false, true}) {
        double expected = 0.0;
        for (std::size_t x = 0; x < head_dim; ++x) {
          const std::size_t at = (row * 2 + (is_value ? 1 : 0)) * head_dim + x;
          const double element = testing::reference_value(rows[at], g.dtype);
          expected += element * element;
        }
        const float found = is_value ? squares[row].value : squares[row].key;
        ASSERT_NEAR(found, expected, kTolerance * expected) << "row " << row;
      }
    }
  }
};
KVTIER_INSTANTIATE_BACKENDS(RowsAppendTest);

TEST_P(RowsAppendTest, StoresEveryDtypeAndHeadDim) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const DType storage : {DType::kBFloat16, DType::kFloat16}) {
      for (const DType input : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        const KvGeometry g = geometry(2, head_dim, 16, 4, 8, storage);
        SCOPED_TRACE(describe_geometry(g) + " from " + std::string(dtype_name(input)));
        SequenceUnderTest s = make_sequence(g, 40);

        append(g, {{&s, 21}}, input);

        expect_state(s);
      }
    }
  }
}

TEST_P(RowsAppendTest, ReadsStridedInputs) {
  for (const auto& [head_gap, token_gap] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 8}, {8, 0}, {1, 0}, {3, 5}, {64, 1}}) {
    for (const DType input : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      SCOPED_TRACE("gaps " + std::to_string(head_gap) + " and " + std::to_string(token_gap) + ", " +
                   std::string(dtype_name(input)));
      const KvGeometry g = geometry(3, 128, 16, 4, 8);
      SequenceUnderTest s = make_sequence(g, 32);

      append(g, {{&s, 9}}, input, head_gap, token_gap);

      expect_state(s);
    }
  }
}

TEST_P(RowsAppendTest, WrapsAroundTheRing) {
  for (const int recent : {1, 7, 16}) {
    for (const int page_tokens : {16, 64}) {
      const KvGeometry g = geometry(2, 64, page_tokens, 5, recent);
      SCOPED_TRACE(describe_geometry(g));
      SequenceUnderTest s = make_sequence(g, 200);

      // One by one, less than the ring, as long as it, longer, and several times as long.
      for (const int tokens :
           {1, 1, 1, 3, recent - 1, recent, recent + 1, 4 * recent + 3, 1, 0, 17}) {
        append(g, {{&s, tokens}}, DType::kFloat32);
        expect_state(s);
      }
    }
  }
}

TEST_P(RowsAppendTest, WorksWithoutSinkOrRing) {
  for (const auto& [sink, recent] : std::vector<std::pair<int, int>>{{0, 8}, {4, 0}, {0, 0}}) {
    const KvGeometry g = geometry(2, 64, 16, sink, recent);
    SCOPED_TRACE(describe_geometry(g));
    SequenceUnderTest s = make_sequence(g, 64);

    append(g, {{&s, 20}}, DType::kFloat32);
    append(g, {{&s, 3}}, DType::kFloat32);

    expect_state(s);
  }
}

TEST_P(RowsAppendTest, SinkLargerThanTheSequence) {
  const KvGeometry g = geometry(1, 64, 16, 50, 4);
  SequenceUnderTest s = make_sequence(g, 32);

  append(g, {{&s, 19}}, DType::kFloat32);

  expect_state(s);
}

TEST_P(RowsAppendTest, DropsTokensPastTheCapacity) {
  const KvGeometry g = geometry(2, 64, 16, 4, 8);
  SequenceUnderTest s = make_sequence(g, 24);

  append(g, {{&s, 20}}, DType::kFloat32);
  append(g, {{&s, 10}}, DType::kFloat32);  // 4 fit
  expect_state(s);
  EXPECT_EQ(s.expected.overflow, 6);
  append(g, {{&s, 1}}, DType::kFloat32);  // none fits
  append(g, {{&s, 40}}, DType::kFloat32);

  expect_state(s);
  EXPECT_EQ(s.expected.length, 24);
  EXPECT_EQ(s.expected.overflow, 47);
}

TEST_P(RowsAppendTest, TruncatesThenAppends) {
  const KvGeometry g = geometry(2, 64, 16, 4, 8);
  // To inside the ring, to its first token, below it, into the sink, to nothing.
  for (const std::int64_t length : {39, 33, 32, 20, 2, 0}) {
    SCOPED_TRACE("truncated to " + std::to_string(length));
    SequenceUnderTest s = make_sequence(g, 64);
    append(g, {{&s, 40}}, DType::kFloat32);

    set_length(*stream_, s.view.counters, length, 64);
    s.expected.length = length;
    s.expected.resident_begin = std::min<std::int64_t>(32, length);
    expect_counters(s);

    for (const int tokens : {1, 3, 8, 5}) {
      append(g, {{&s, tokens}}, DType::kFloat32);
      expect_state(s);
    }
  }
}

TEST_P(RowsAppendTest, ReservationKeepsTheRing) {
  const KvGeometry g = geometry(1, 64, 16, 0, 8);
  SequenceUnderTest s = make_sequence(g, 64);
  set_length(*stream_, s.view.counters, 0, 16);
  s.expected.capacity = 16;
  append(g, {{&s, 16}}, DType::kFloat32);

  set_length(*stream_, s.view.counters, 16, 48);
  s.expected.capacity = 48;
  append(g, {{&s, 20}}, DType::kFloat32);

  expect_state(s);
  EXPECT_EQ(s.expected.overflow, 0);
}

TEST_P(RowsAppendTest, TakesABatchOfSequences) {
  const KvGeometry g = geometry(2, 128, 32, 8, 16);
  SequenceUnderTest a = make_sequence(g, 100);
  SequenceUnderTest b = make_sequence(g, 70);
  SequenceUnderTest c = make_sequence(g, 10);
  SequenceUnderTest untouched = make_sequence(g, 10);

  append(g, {{&a, 33}, {&b, 0}, {&c, 12}}, DType::kBFloat16);
  append(g, {{&c, 1}, {&b, 65}, {&a, 1}}, DType::kFloat16);

  for (SequenceUnderTest* s : {&a, &b, &c, &untouched}) expect_state(*s);
}

TEST_P(RowsAppendTest, TakesAFullBatch) {
  const KvGeometry g = geometry(1, 64, 16, 2, 4);
  std::vector<SequenceUnderTest> sequences;
  for (int i = 0; i < 32; ++i) sequences.push_back(make_sequence(g, 40));
  std::vector<Piece> pieces;
  for (int i = 0; i < 32; ++i) pieces.push_back({&sequences[static_cast<std::size_t>(i)], i});

  append(g, pieces, DType::kFloat32);

  for (SequenceUnderTest& s : sequences) expect_state(s);
}

TEST_P(RowsAppendTest, StoresALongPrompt) {
  const KvGeometry g = geometry(8, 128, 64, 128, 128);
  SequenceUnderTest s = make_sequence(g, 1600);

  append(g, {{&s, 1500}}, DType::kFloat32);
  append(g, {{&s, 1}}, DType::kFloat32);

  expect_state(s);
}

TEST_P(RowsAppendTest, EmptyBatchChangesNothing) {
  const KvGeometry g = geometry(1, 64, 16, 2, 4);
  SequenceUnderTest s = make_sequence(g, 16);

  append(g, {}, DType::kFloat32);
  append(g, {{&s, 0}}, DType::kFloat32);

  expect_state(s);
}

struct Poison {
  int token;
  int head;
  bool in_values;
  int element;
  double value;
};

class RowsNonfiniteTest : public RowsTest {
 protected:
  /// Packs 70 tokens of 3 heads of which some elements are poisoned; returns the pairs counted, and
  /// checks the place of the first.
  std::uint64_t count_nonfinite(DType input, DType storage, const std::vector<Poison>& poisons) {
    const KvGeometry g = geometry(3, 96, 16, 0, 0, storage);
    HostTensor keys = random_tensor(random_, input, 70, 3, 96, 5, 0);
    HostTensor values = random_tensor(random_, input, 70, 3, 96, 0, 7);
    for (const Poison& p : poisons) {
      (p.in_values ? values : keys).set(p.token, p.head, p.element, p.value);
    }
    const Buffer key_data = upload(keys.bytes);
    const Buffer value_data = upload(values.bytes);
    const Buffer packed = allocate<std::uint16_t>(70 * 3 * 192);
    StepFlags* const flags = make_flags();
    const Buffer counters = upload(std::vector<SequenceCounters>{{.length = 1000}});
    AppendBatch batch;
    batch.push({.sequence = {.counters = counters.as<SequenceCounters>()},
                .keys = keys.view(key_data.data()),
                .values = values.view(value_data.data()),
                .tokens = 70,
                .flags = flags,
                .layer = 7});

    const Buffer squares = allocate<RowSquares>(70 * 3);
    pack_rows(*stream_, g, batch, packed.data(), squares.as<RowSquares>());

    std::int64_t nan_squares = 0;
    for (const RowSquares& row : download<RowSquares>(squares.data(), 70 * 3)) {
      EXPECT_EQ(std::isnan(row.key), std::isnan(row.value));
      nan_squares += std::isnan(row.key) ? 1 : 0;
    }
    EXPECT_EQ(nan_squares, static_cast<std::int64_t>(flags->nonfinite_tokens));
    const auto found = download<std::uint16_t>(packed.data(), 70 * 3 * 192);
    for (const Poison& p : poisons) {
      const int index = (p.token * 3 + p.head) * 192 + (p.in_values ? 96 : 0) + p.element;
      const double stored =
          testing::reference_value(found[static_cast<std::size_t>(index)], storage);
      const double expected =
          testing::reference_value(testing::reference_bits(p.value, storage), storage);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(stored));
      } else {
        EXPECT_EQ(stored, expected);
      }
    }
    EXPECT_EQ(flags->rows_selected, 0U);
    EXPECT_EQ(flags->nonfinite_queries, 0U);
    if (flags->nonfinite_tokens > 0) {
      const auto by_token = [](const Poison& a, const Poison& b) { return a.token < b.token; };
      const Poison& least = *std::min_element(poisons.begin(), poisons.end(), by_token);
      const auto place = NonfinitePlace::of(flags->first_nonfinite);
      EXPECT_EQ(place.token, 1000 + least.token);
      EXPECT_EQ(place.layer, 7);
      EXPECT_FALSE(place.in_query);
    } else {
      EXPECT_EQ(flags->first_nonfinite, NonfinitePlace::kNone);
    }
    return flags->nonfinite_tokens;
  }
};
KVTIER_INSTANTIATE_BACKENDS(RowsNonfiniteTest);

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST_P(RowsNonfiniteTest, CountsEachPairOnceAndNamesTheFirst) {
  const std::vector<Poison> poisons = {
      {0, 0, false, 0, kNan},       {0, 0, false, 95, kNan},  // one pair, twice in K
      {0, 0, true, 17, kInfinity},                            // and in V
      {0, 1, true, 95, -kInfinity},                           // another head
      {31, 2, false, 63, kNan},     {69, 2, true, 0, kNan},   // other tokens
  };
  const std::vector<Poison> late = {{69, 0, true, 1, kNan}, {33, 2, false, 95, kInfinity}};
  for (const DType input : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType storage : {DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(std::string(dtype_name(input)) + " to " + std::string(dtype_name(storage)));
      EXPECT_EQ(count_nonfinite(input, storage, {}), 0U);
      EXPECT_EQ(count_nonfinite(input, storage, poisons), 4U);
      EXPECT_EQ(count_nonfinite(input, storage, late), 2U);
    }
  }
}

TEST_P(RowsNonfiniteTest, JudgesTheStoredValue) {
  const double past_fp16 = 65520.0;  // the least that rounds to infinity
  const double below = 65519.0;
  EXPECT_EQ(count_nonfinite(DType::kFloat32, DType::kFloat16, {{5, 1, false, 3, past_fp16}}), 1U);
  EXPECT_EQ(count_nonfinite(DType::kFloat32, DType::kFloat16, {{5, 1, false, 3, -past_fp16}}), 1U);
  EXPECT_EQ(count_nonfinite(DType::kFloat32, DType::kFloat16, {{5, 1, false, 3, below}}), 0U);
  EXPECT_EQ(count_nonfinite(DType::kBFloat16, DType::kFloat16, {{5, 1, true, 3, 1e30}}), 1U);
  EXPECT_EQ(count_nonfinite(DType::kFloat32, DType::kBFloat16, {{5, 1, true, 3, 1e38}}), 0U);
  EXPECT_EQ(count_nonfinite(DType::kFloat32, DType::kBFloat16, {{5, 1, true, 3, 0x1.FFp127}}), 1U);
}

TEST_P(RowsNonfiniteTest, NeedsNoFlags) {
  const KvGeometry g = geometry(1, 64, 16, 0, 0);
  HostTensor keys = random_tensor(random_, DType::kFloat32, 2, 1, 64, 0, 0);
  keys.set(0, 0, 0, kNan);
  const Buffer data = upload(keys.bytes);
  const Buffer packed = allocate<std::uint16_t>(2 * 128);
  AppendBatch batch;
  batch.push({.sequence = {},
              .keys = keys.view(data.data()),
              .values = keys.view(data.data()),
              .tokens = 2});

  pack_rows(*stream_, g, batch, packed.data());

  EXPECT_EQ(download<std::uint16_t>(packed.data(), 256)[130],
            testing::reference_bits(keys.get(1, 0, 2), DType::kBFloat16));
}

}  // namespace
}  // namespace kvtier::transfer
