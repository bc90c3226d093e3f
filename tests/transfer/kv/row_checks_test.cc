#include "transfer/kv/row_checks.h"

#include "tests/transfer/kv/rows_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace kvtier::transfer {
namespace {

constexpr std::int64_t kTokens = 300;
constexpr std::int64_t kSinks = 4;
constexpr std::int64_t kRecent = 8;

/// A sequence whose rows have checks, and readings of all that are in its pages.
class RowChecksTest : public RowsTest {
 protected:
  void fill(int head_dim, bool int8) {
    g_ = geometry(2, head_dim, 16, kSinks, kRecent);
    g_.int8_pages = int8;
    g_.row_checks = true;
    s_ = make_sequence(g_, kTokens + 5);
    flags_ = make_flags();
    frames_ = {};
    if (on_device_) {
      checks_ = allocate<std::uint32_t>(s_.pages.bytes() / 4);
      frames_ = {s_.pages.data(), checks_.as<std::uint32_t>()};
    }
    for (const std::int64_t tokens : {std::int64_t{1}, std::int64_t{40}, kTokens - 41}) {
      append(tokens);
    }
    ids_.clear();
    for (int head = 0; head < g_.kv_heads; ++head) {
      for (std::int64_t token = kSinks; token < kTokens - kRecent; ++token) {
        ids_.push_back(static_cast<std::int32_t>(token));
      }
    }
    device_ids_ = upload(ids_);
    counts_ = upload(std::vector<std::int32_t>(2, static_cast<std::int32_t>(listed())));
    staged_ = allocate<std::byte>(static_cast<std::size_t>(2 * listed() * g_.row_bytes()));
  }
  /// Before `fill`: checks are on the device too.
  void keep_checks_of_frames() { on_device_ = true; }
  [[nodiscard]] std::int64_t listed() const { return kTokens - kRecent - kSinks; }

  void append(std::int64_t tokens) {
    const HostTensor keys =
        random_tensor(random_, DType::kBFloat16, tokens, g_.kv_heads, g_.head_dim, 0, 0);
    const HostTensor values =
        random_tensor(random_, DType::kFloat32, tokens, g_.kv_heads, g_.head_dim, 3, 1);
    const Buffer k = upload(keys.bytes), v = upload(values.bytes);
    AppendBatch batch;
    batch.push({.sequence = s_.view,
                .keys = keys.view(k.data()),
                .values = values.view(v.data()),
                .tokens = static_cast<std::int32_t>(tokens)});
    const Buffer packed =
        allocate<std::byte>(static_cast<std::size_t>(tokens * g_.kv_heads * g_.row_bytes()));
    write_row_checks(*stream_, g_, batch, frames_);
    pack_rows(*stream_, g_, batch, packed.data());
    store_rows(*stream_, g_, batch, packed.data());
    append_done(*stream_, g_, batch);
    stream_->synchronize();
  }

  [[nodiscard]] RowReading reading_of(std::int64_t staged) const {
    RowReading reading;
    reading.sequences.push(s_.view);
    reading.flags.push(flags_);
    reading.query_batch.push({.dense_from = dense_from_});
    reading.selection = {.ids = device_ids_.as<std::int32_t>(),
                         .counts = counts_.as<std::int32_t>(),
                         .capacity = listed(),
                         .staged = staged_.data(),
                         .staged_capacity = staged};
    reading.frames = frames_;
    return reading;
  }
  /// Stages the first `staged` rows of each list, and compares all. Returns how many are changed.
  std::uint64_t verify(std::int64_t staged) {
    const std::uint64_t before = flags_->rows_corrupt;
    const RowReading reading = reading_of(staged);
    if (staged > 0) {
      gather_rows(*stream_, g_, reading.sequences, reading.query_batch, reading.selection, false,
                  nullptr);
    }
    verify_rows(*stream_, g_, reading);
    stream_->synchronize();
    return flags_->rows_corrupt - before;
  }
  /// The same at once.
  std::uint64_t gather_whole(std::int64_t staged) {
    const std::uint64_t before = flags_->rows_corrupt;
    gather_whole_rows(*stream_, g_, reading_of(staged), flags_);
    stream_->synchronize();
    return flags_->rows_corrupt - before;
  }
  /// Staging without what was there.
  void clear_staging() {
    staged_ = upload(std::vector<std::byte>(staged_.bytes(), std::byte{0xA5}));
  }
  [[nodiscard]] std::vector<std::uint16_t> staged_rows() {
    return download<std::uint16_t>(staged_.data(), staged_.bytes() / 2);
  }

  [[nodiscard]] std::byte* page(std::int64_t token) {
    const std::size_t place = s_.page_order[static_cast<std::size_t>(token / g_.page_tokens)];
    return s_.pages.data() + place * static_cast<std::size_t>(g_.page_bytes());
  }
  /// Byte `i` of what a page has of a row: elements, factors, check.
  [[nodiscard]] std::byte& byte_of(std::int64_t token, int head, std::int64_t i) {
    const auto row = page_row<float>(g_, page(token), head, token);
    if (i < g_.page_row_bytes()) return row.bytes[i];
    i -= g_.page_row_bytes();
    if (g_.int8_pages && i < 8) return reinterpret_cast<std::byte*>(row.scales)[i];
    if (g_.int8_pages) i -= 8;
    return reinterpret_cast<std::byte*>(
        check_in_page<std::uint32_t>(g_, page(token), head, token))[i];
  }
  [[nodiscard]] std::int64_t bytes_of_row() const {
    return g_.page_row_bytes() + (g_.int8_pages ? 8 : 0) + 4;
  }
  std::int64_t any(std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random_);
  }

  KvGeometry g_;
  SequenceUnderTest s_;
  StepFlags* flags_ = nullptr;
  std::int64_t dense_from_ = std::numeric_limits<std::int64_t>::max();
  std::vector<std::int32_t> ids_;
  Buffer device_ids_, counts_, staged_;
  bool on_device_ = false;
  Buffer checks_;
  FrameChecks frames_;
};
KVTIER_INSTANTIATE_BACKENDS(RowChecksTest);

TEST_P(RowChecksTest, RowsThatWereWrittenAreWhole) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const bool int8 : {false, true}) {
      SCOPED_TRACE(std::to_string(head_dim) + (int8 ? ", int8" : ""));
      fill(head_dim, int8);
      for (const std::int64_t staged : {std::int64_t{0}, std::int64_t{7}, listed()}) {
        EXPECT_EQ(verify(staged), 0U);
        const std::vector<std::uint16_t> expected = staged_rows();
        clear_staging();
        EXPECT_EQ(gather_whole(staged), 0U);
        const auto rows = static_cast<std::ptrdiff_t>(2 * staged * g_.row_bytes() / 2);
        const std::vector<std::uint16_t> found = staged_rows();
        EXPECT_TRUE(std::equal(found.begin(), found.begin() + rows, expected.begin())) << staged;
      }
      for (std::int64_t token = 0; token < kTokens; ++token) {
        EXPECT_TRUE(row_is_whole(g_, page(token), 1, token)) << token;
      }
    }
  }
}

// 10,000 turned bits: each is found, in staging and in place, and none is in a staged row.
TEST_P(RowChecksTest, EveryTurnedBitIsFoundAndNoneServed) {
  constexpr int kRounds = 25, kRowsOfRound = 200;
  for (const bool int8 : {false, true}) {
    SCOPED_TRACE(int8 ? "int8" : "bf16");
    fill(128, int8);
    ASSERT_EQ(verify(listed()), 0U);
    const std::vector<std::uint16_t> whole = staged_rows();
    const auto elements = static_cast<std::size_t>(g_.row_bytes() / 2);
    for (int round = 0; round < kRounds; ++round) {
      std::set<std::pair<int, std::int64_t>> rows;
      while (rows.size() < kRowsOfRound) {
        rows.insert({static_cast<int>(any(2)), kSinks + any(listed())});
      }
      std::vector<std::pair<std::byte*, std::byte>> turned;
      for (const auto& [head, token] : rows) {
        turned.emplace_back(&byte_of(token, head, any(bytes_of_row())),
                            static_cast<std::byte>(1U << any(8)));
      }
      for (const auto& [at, bit] : turned) *at ^= bit;

      EXPECT_EQ(verify(0), rows.size());
      EXPECT_EQ(gather_whole(listed() / 2), rows.size());
      std::vector<std::uint16_t> expected = whole;
      for (const auto& [head, token] : rows) {
        const auto first = static_cast<std::size_t>(head * listed() + token - kSinks) * elements;
        std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(first), elements, 0xFFFF);
        EXPECT_FALSE(row_is_whole(g_, page(token), head, token));
      }
      EXPECT_EQ(verify(listed()), rows.size());
      EXPECT_EQ(staged_rows(), expected) << "round " << round;
      clear_staging();
      EXPECT_EQ(gather_whole(listed()), rows.size());
      EXPECT_EQ(staged_rows(), expected) << "round " << round;
      for (const auto& [at, bit] : turned) *at ^= bit;
    }
    EXPECT_EQ(verify(listed()), 0U);
  }
}

TEST_P(RowChecksTest, RowsInThePlaceOfOthersAreFound) {
  for (const bool int8 : {false, true}) {
    fill(64, int8);
    for (std::int64_t i = 0; i < bytes_of_row(); ++i) {
      byte_of(20, 1, i) = byte_of(21, 1, i);  // another token, its check too
      byte_of(30, 0, i) = byte_of(30, 1, i);  // another head
      byte_of(40, 0, i) = std::byte{0};
    }
    EXPECT_EQ(verify(listed()), 3U);
  }
}

// A GPU compares with the copies on the device; what has come to a frame otherwise brings its own.
TEST_P(RowChecksTest, ChecksOfFramesAreOfTheirRows) {
  keep_checks_of_frames();
  for (const bool int8 : {false, true}) {
    SCOPED_TRACE(int8 ? "int8" : "bf16");
    fill(128, int8);
    EXPECT_EQ(verify(7), 0U);
    EXPECT_EQ(gather_whole(listed()), 0U);
    for (const std::int64_t token : {std::int64_t{4}, std::int64_t{77}, std::int64_t{291}}) {
      byte_of(token, 1, 9) ^= std::byte{0x40};
    }
    EXPECT_EQ(verify(7), 3U);
    EXPECT_EQ(gather_whole(listed()), 3U);
    EXPECT_EQ(gather_whole(20), 3U);
    for (const std::int64_t token : {std::int64_t{4}, std::int64_t{77}, std::int64_t{291}}) {
      byte_of(token, 1, 9) ^= std::byte{0x40};
    }
    stream_->fill(checks_.data(), 0x5A, checks_.bytes());
    for (std::int64_t token = 0; token < kTokens; token += g_.page_tokens) {
      load_frame_checks(*stream_, g_, frames_, page(token));
    }
    EXPECT_EQ(gather_whole(listed()), 0U);
    EXPECT_EQ(verify(listed()), 0U);
  }
}

// Rows that are read in their pages beside those that are staged: a tail, and the end of a list.
TEST_P(RowChecksTest, AGatherComparesWhatIsReadInPlace) {
  constexpr std::int64_t kDenseFrom = 100, kStaged = 33;
  fill(128, false);
  dense_from_ = kDenseFrom;
  counts_ = upload(std::vector<std::int32_t>(2, static_cast<std::int32_t>(kDenseFrom - kSinks)));
  // Sinks and ring are not compared; rows of the list and of the tail are, once each.
  for (const std::int64_t token :
       {std::int64_t{2}, std::int64_t{10}, std::int64_t{36}, std::int64_t{37}, std::int64_t{99},
        std::int64_t{100}, std::int64_t{291}, std::int64_t{292}, std::int64_t{299}}) {
    byte_of(token, 0, 5) ^= std::byte{0x10};
  }
  for (const std::int64_t staged : {std::int64_t{0}, kStaged, kDenseFrom}) {
    EXPECT_EQ(gather_whole(staged), 6U) << staged;
  }
}

TEST_P(RowChecksTest, AGatherCountsAsWithoutChecks) {
  fill(128, false);
  const RowReading reading = reading_of(100);
  gather_rows(*stream_, g_, reading.sequences, reading.query_batch, reading.selection, false,
              flags_);
  stream_->synchronize();
  const StepFlags plain = *flags_;
  *flags_ = {};
  EXPECT_EQ(gather_whole(100), 0U);
  EXPECT_EQ(flags_->rows_selected, plain.rows_selected);
  EXPECT_EQ(flags_->rows_fetched_host, plain.rows_fetched_host);
  EXPECT_EQ(flags_->rows_resident, plain.rows_resident);
}

// A change within one word cannot go unseen.
TEST(RowCheck, WordsAreMixedByABijection) {
  const auto inverse = [](std::uint32_t odd) {
    std::uint32_t x = odd;
    for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
    return x;
  };
  const auto unmix = [&](std::uint32_t x) {
    x ^= x >> 16;
    x *= inverse(0xC2B2AE35U);
    x ^= x >> 13 ^ x >> 26;
    x *= inverse(0x85EBCA6BU);
    return x ^ x >> 16;
  };
  std::mt19937 random(4);
  for (int i = 0; i < 10'000; ++i) {
    const auto word = static_cast<std::uint32_t>(random());
    ASSERT_EQ(unmix(mix_word(word)), word);
  }
}

}  // namespace
}  // namespace kvtier::transfer
