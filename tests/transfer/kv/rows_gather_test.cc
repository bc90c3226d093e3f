#include "tests/transfer/kv/rows_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

namespace kvtier::transfer {
namespace {

class RowsGatherTest : public RowsTest {
 protected:
  /// A sequence of `length` tokens whose rows tell where they were read: each element is the token,
  /// the head, and 1 for the page, 2 for the sink buffer, 3 for the ring.
  SequenceUnderTest marked_sequence(const KvGeometry& g, std::int64_t length) {
    SequenceUnderTest s = make_sequence(g, length);
    const auto row = static_cast<std::size_t>(g.row_bytes() / 2);
    const auto put = [&](std::vector<std::uint16_t>& where, std::int64_t index, std::int64_t token,
                         int head, int source) {
      const auto begin = where.begin() + index * static_cast<std::int64_t>(row);
      std::fill(begin, begin + static_cast<std::int64_t>(row), mark(token, head, source));
    };
    s.expected.length = length;
    s.expected.resident_begin = std::max<std::int64_t>(0, length - g.recent_capacity);
    for (int head = 0; head < g.kv_heads; ++head) {
      for (std::int64_t token = 0; token < length; ++token) {
        const auto page = static_cast<std::int64_t>(
            s.page_order[static_cast<std::size_t>(token / g.page_tokens)]);
        put(s.expected_pages, (page * g.kv_heads + head) * g.page_tokens + token % g.page_tokens,
            token, head, 1);
        if (token < g.sink_capacity) {
          put(s.expected_sink, head * g.sink_capacity + token, token, head, 2);
        }
        if (g.recent_capacity > 0 && token >= s.expected.resident_begin) {
          put(s.expected_ring, head * g.recent_capacity + token % g.recent_capacity, token, head,
              3);
        }
      }
    }
    const CopyRun runs[] = {{s.pages.data(), s.expected_pages.data(), s.pages.bytes()},
                            {s.sink.data(), s.expected_sink.data(), s.expected_sink.size() * 2},
                            {s.ring.data(), s.expected_ring.data(), s.expected_ring.size() * 2},
                            {s.counters.data(), &s.expected, sizeof(s.expected)}};
    stream_->copy(runs);
    stream_->synchronize();
    return s;
  }

  static std::uint16_t mark(std::int64_t token, int head, int source) {
    return static_cast<std::uint16_t>(token * 64 + head * 4 + source);
  }
  static int source_of(const KvGeometry& g, const SequenceUnderTest& s, std::int64_t token) {
    if (token < g.sink_capacity) return 2;
    return g.recent_capacity > 0 && token >= s.expected.resident_begin ? 3 : 1;
  }

  std::vector<std::int32_t> random_ids(std::int64_t length, std::size_t count) {
    std::set<std::int32_t> ids;
    std::uniform_int_distribution<std::int32_t> any(0, static_cast<std::int32_t>(length - 1));
    while (ids.size() < count) ids.insert(any(random_));
    return {ids.begin(), ids.end()};
  }

  /// Gathers `ids[row][head]` and checks staging and counters.
  void check_gather(const KvGeometry& g, const std::vector<const SequenceUnderTest*>& sequences,
                    const std::vector<int>& sequence_of_row,
                    const std::vector<std::vector<std::vector<std::int32_t>>>& ids,
                    std::int64_t capacity, std::int64_t staged_capacity, bool pages_on_device) {
    const std::size_t rows = ids.size();
    const auto heads = static_cast<std::size_t>(g.kv_heads);
    const auto cap = static_cast<std::size_t>(capacity);
    const auto staged_cap = static_cast<std::size_t>(staged_capacity);
    const auto row = static_cast<std::size_t>(g.row_bytes() / 2);
    std::vector<std::int32_t> flat(rows * heads * cap, -7);
    std::vector<std::int32_t> counts;
    std::vector<std::uint16_t> expected(rows * heads * staged_cap * row, kUnwritten);
    StepFlags expected_flags;
    SequenceBatch sequence_batch;
    QueryBatch query_batch;
    for (const SequenceUnderTest* s : sequences) sequence_batch.push(s->view);
    for (std::size_t r = 0; r < rows; ++r) {
      const SequenceUnderTest& s = *sequences[static_cast<std::size_t>(sequence_of_row[r])];
      query_batch.push({.sequence = sequence_of_row[r]});
      for (std::size_t h = 0; h < heads; ++h) {
        const std::vector<std::int32_t>& chosen = ids[r][h];
        const std::size_t lane = r * heads + h;
        std::copy(chosen.begin(), chosen.end(), &flat[lane * cap]);
        counts.push_back(static_cast<std::int32_t>(chosen.size()));
        expected_flags.rows_selected += chosen.size();
        for (std::size_t i = 0; i < std::min(chosen.size(), staged_cap); ++i) {
          const int source = source_of(g, s, chosen[i]);
          std::fill_n(&expected[(lane * staged_cap + i) * row], row,
                      mark(chosen[i], static_cast<int>(h), source));
          ++(source != 1 || pages_on_device ? expected_flags.rows_resident
                                            : expected_flags.rows_fetched_host);
        }
      }
    }
    const Buffer id_data = upload(flat);
    const Buffer count_data = upload(counts);
    const Buffer staged = allocate<std::uint16_t>(expected.size());
    StepFlags* const flags = make_flags();

    gather_rows(*stream_, g, sequence_batch, query_batch,
                {.ids = id_data.as<std::int32_t>(),
                 .counts = count_data.as<std::int32_t>(),
                 .capacity = capacity,
                 .staged = staged.data(),
                 .staged_capacity = staged_capacity},
                pages_on_device, flags);

    EXPECT_EQ(download<std::uint16_t>(staged.data(), expected.size()), expected);
    EXPECT_EQ(flags->rows_selected, expected_flags.rows_selected);
    EXPECT_EQ(flags->rows_resident, expected_flags.rows_resident);
    EXPECT_EQ(flags->rows_fetched_host, expected_flags.rows_fetched_host);
    EXPECT_EQ(flags->nonfinite_tokens + flags->nonfinite_queries + flags->tokens_scored, 0U);
  }
};
KVTIER_INSTANTIATE_BACKENDS(RowsGatherTest);

TEST_P(RowsGatherTest, ReadsSinkRingAndPages) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const bool pages_on_device : {false, true}) {
      const KvGeometry g = geometry(2, head_dim, 16, 6, 20);
      SCOPED_TRACE(describe_geometry(g) + (pages_on_device ? ", pages on the device" : ""));
      const SequenceUnderTest s = marked_sequence(g, 150);

      check_gather(g, {&s}, {0}, {{{0, 5, 6, 15, 16, 99, 129, 130, 149}, random_ids(150, 33)}}, 40,
                   40, pages_on_device);
    }
  }
}

TEST_P(RowsGatherTest, StopsAtCountAndAtStagedCapacity) {
  const KvGeometry g = geometry(3, 64, 16, 4, 8);
  const SequenceUnderTest s = marked_sequence(g, 100);

  // None, one, as many as staged, one more, many more.
  check_gather(g, {&s}, {0, 0},
               {{{}, {42}, random_ids(100, 10)},
                {random_ids(100, 11), random_ids(100, 60), random_ids(100, 9)}},
               64, 10, false);
}

TEST_P(RowsGatherTest, ServesRowsOfSeveralSequences) {
  const KvGeometry g = geometry(2, 128, 32, 4, 8);
  const SequenceUnderTest a = marked_sequence(g, 70);
  const SequenceUnderTest b = marked_sequence(g, 33);
  const SequenceUnderTest c = marked_sequence(g, 200);

  check_gather(g, {&a, &b, &c}, {2, 0, 2, 1},
               {{random_ids(200, 50), random_ids(200, 1)},
                {random_ids(70, 64), {}},
                {random_ids(200, 64), random_ids(200, 63)},
                {random_ids(33, 33), random_ids(33, 2)}},
               64, 64, false);
}

TEST_P(RowsGatherTest, WorksWithoutSinkAndRing) {
  const KvGeometry g = geometry(1, 64, 64, 0, 0);
  const SequenceUnderTest s = marked_sequence(g, 100);

  check_gather(g, {&s}, {0}, {{{0, 1, 63, 64, 99}}}, 8, 8, false);
}

TEST_P(RowsGatherTest, ReadsFromTheRingWhatIsLeftOfItAfterTruncation) {
  const KvGeometry g = geometry(1, 64, 16, 2, 16);
  SequenceUnderTest s = marked_sequence(g, 64);  // the ring holds 48 to 63
  set_length(*stream_, s.view.counters, 52, 64);

  check_gather(g, {&s}, {0}, {{{1, 2, 47, 48, 51}}}, 8, 8, false);

  set_length(*stream_, s.view.counters, 30, 64);
  s.expected.resident_begin = 30;
  check_gather(g, {&s}, {0}, {{{1, 2, 17, 29}}}, 8, 8, false);
}

TEST_P(RowsGatherTest, GathersThousands) {
  const KvGeometry g = geometry(8, 64, 64, 16, 64);
  const SequenceUnderTest s = marked_sequence(g, 1000);
  std::vector<std::vector<std::int32_t>> ids;
  for (std::size_t head = 0; head < 8; ++head) ids.push_back(random_ids(1000, 257 + 70 * head));

  check_gather(g, {&s}, {0}, {ids}, 1000, 700, false);
}

TEST_P(RowsGatherTest, OfNoRowsOrNoStagingOnlyCounts) {
  const KvGeometry g = geometry(2, 64, 16, 4, 8);
  const SequenceUnderTest s = marked_sequence(g, 40);

  check_gather(g, {&s}, {}, {}, 8, 8, false);
  check_gather(g, {&s}, {0}, {{{1, 30}, {2}}}, 8, 0, false);
}

TEST_P(RowsGatherTest, NeedsNoFlags) {
  const KvGeometry g = geometry(1, 64, 16, 0, 4);
  const SequenceUnderTest s = marked_sequence(g, 40);
  const Buffer ids = upload(std::vector<std::int32_t>{3, 39});
  const Buffer counts = upload(std::vector<std::int32_t>{2});
  const Buffer staged = allocate<std::uint16_t>(2 * 128);
  SequenceBatch sequences;
  sequences.push(s.view);
  QueryBatch query_batch;
  query_batch.push({});

  gather_rows(*stream_, g, sequences, query_batch,
              {.ids = ids.as<std::int32_t>(),
               .counts = counts.as<std::int32_t>(),
               .capacity = 2,
               .staged = staged.data(),
               .staged_capacity = 2},
              false, nullptr);

  const auto found = download<std::uint16_t>(staged.data(), 256);
  EXPECT_EQ(found[0], mark(3, 0, 1));
  EXPECT_EQ(found[255], mark(39, 0, 3));
}

}  // namespace
}  // namespace kvtier::transfer
