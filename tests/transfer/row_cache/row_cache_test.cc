#include "tests/transfer/row_cache/row_cache_fixture.h"
#include "transfer/kv/frame_factors.h"
#include "transfer/kv/page_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace kvtier::transfer {
namespace {

KVTIER_INSTANTIATE_BACKENDS(RowCacheTest);

TEST_P(RowCacheTest, KeepsWhatThePlainModelKeepsAndServesTheSameRows) {
  struct Case {
    int num_sets;
    RowCachePolicy policy;
    int head_dim;
  };
  for (const Case& c : {Case{1, RowCachePolicy::kScore, 64}, Case{3, RowCachePolicy::kClock, 96},
                        Case{8, RowCachePolicy::kLru, 128}, Case{9, RowCachePolicy::kScore, 256},
                        Case{21, RowCachePolicy::kScore, 128}}) {
    const KvGeometry g = geometry(2, c.head_dim, 16, 6, 20);
    const RowCacheShape shape{.num_sets = c.num_sets, .policy = c.policy};
    SCOPED_TRACE(describe_geometry(g) + ", sets " + std::to_string(c.num_sets) + ", seed " +
                 std::to_string(kSeed));
    std::vector<CachedSequence> sequences;
    sequences.push_back(make(g, 900, shape, true));
    sequences.push_back(make(g, 300, shape, false));
    sequences.push_back(make(g, 700, shape, true));
    for (int step = 0; step < 12; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      // Two query rows of one sequence, which may want the same missing rows.
      check_gather(g, sequences, shape,
                   {random_query(2, 2, 700, 300), random_query(0, 2, 900, 130),
                    random_query(1, 2, 300, 60), random_query(2, 2, 700, 90)},
                   400, 250);
      if (HasFailure()) return;
      if (step % 4 == 3) forget(g, sequences[0], shape, 500 - 100 * (step / 4));
    }
    EXPECT_GT(hits_, 100U);
    EXPECT_GT(evictions_, 10U);
  }
}

TEST_P(RowCacheTest, PrefetchedRowsAreThoseOfThePlainModelAndTheCountersAddUp) {
  struct Case {
    int num_sets;
    RowCachePolicy policy;
    int head_dim;
  };
  for (const Case& c : {Case{9, RowCachePolicy::kScore, 128}, Case{5, RowCachePolicy::kClock, 64},
                        Case{4, RowCachePolicy::kLru, 256}}) {
    const KvGeometry g = geometry(2, c.head_dim, 16, 6, 20);
    const RowCacheShape shape{.num_sets = c.num_sets, .policy = c.policy};
    SCOPED_TRACE(describe_geometry(g) + ", sets " + std::to_string(c.num_sets) + ", seed " +
                 std::to_string(kSeed));
    std::vector<CachedSequence> sequences;
    sequences.push_back(make(g, 900, shape, true));
    sequences.push_back(make(g, 300, shape, false));
    sequences.push_back(make(g, 700, shape, true));
    prefetched_ = useful_ = wasted_ = 0;
    for (int step = 0; step < 16; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      // Two query rows of one sequence, which may want the same rows.
      check_gather(g, sequences, shape,
                   {random_query(2, 2, 700, 150), random_query(0, 2, 900, 130),
                    random_query(1, 2, 300, 60), random_query(2, 2, 700, 90)},
                   400, step % 2 == 1 ? 250 : 0, step % 2 == 1 ? Way::kStaged : Way::kPrefetched);
      if (HasFailure()) return;
      if (step % 8 == 6) forget(g, sequences[0], shape, 500 - 100 * (step / 8));
    }
    EXPECT_GT(useful_, 50U);
    EXPECT_GT(wasted_, 5U);
    std::uint64_t waiting = 0;
    for (const CachedSequence& sequence : sequences) {
      for (const std::vector<ModelSet>& sets : sequence.model) {
        for (const ModelSet& set : sets)
          waiting += static_cast<std::uint64_t>(set.num_prefetched());
      }
    }
    EXPECT_EQ(prefetched_, useful_ + wasted_ + waiting);
    for (CachedSequence& sequence : sequences) forget(g, sequence, shape, 0);
    EXPECT_EQ(prefetched_, useful_ + wasted_);
  }
}

TEST_P(RowCacheTest, SaysWhereRowsAreThatItFinds) {
  if (GetParam() == Backend::kCpu) GTEST_SKIP() << "places are of CUDA alone";
  struct Case {
    int num_sets;
    int head_dim;
  };
  for (const Case& c : {Case{1, 128}, Case{9, 64}, Case{21, 96}, Case{40, 256}}) {
    const KvGeometry g = geometry(2, c.head_dim, 16, 6, 20);
    const RowCacheShape shape{.num_sets = c.num_sets};
    SCOPED_TRACE(describe_geometry(g) + ", sets " + std::to_string(c.num_sets) + ", seed " +
                 std::to_string(kSeed));
    std::vector<CachedSequence> sequences;
    sequences.push_back(make(g, 900, shape, true));
    sequences.push_back(make(g, 300, shape, false));
    sequences.push_back(make(g, 1700, shape, true));
    for (int step = 0; step < 8; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      check_gather(g, sequences, shape,
                   {random_query(2, 2, 1700, 900), random_query(0, 2, 900, 130),
                    random_query(1, 2, 300, 60), random_query(2, 2, 1700, 90)},
                   1000, 750, step == 5 ? Way::kStaged : Way::kPlaced);
      if (HasFailure()) return;
      if (step % 4 == 3) forget(g, sequences[0], shape, 500 - 100 * (step / 4));
    }
    EXPECT_GT(hits_, 100U);
  }
}

TEST_P(RowCacheTest, LooksThroughListsLongerThanATile) {
  const KvGeometry g = geometry(1, 64, 64, 8, 8);
  const RowCacheShape shape{.num_sets = 10};
  std::vector<CachedSequence> sequences;
  sequences.push_back(make(g, 6000, shape, true));
  for (const std::size_t most : {2048U, 2049U, 5000U}) {
    check_gather(g, sequences, shape, {random_query(0, 1, 6000, most)}, 6000, 5900);
  }
}

TEST_P(RowCacheTest, ServesRowsOfAnotherTokenThatCameAfterATruncation) {
  const KvGeometry g = geometry(1, 64, 16, 4, 8);
  const RowCacheShape shape{.num_sets = 2};
  std::vector<CachedSequence> sequences;
  sequences.push_back(make(g, 100, shape, true));
  const QueryIds query{.sequence = 0, .ids = {{10, 50, 51}}, .masks = {{1, 1, 1}}};

  check_gather(g, sequences, shape, {query}, 8, 8);
  check_gather(g, sequences, shape, {query}, 8, 8);
  EXPECT_EQ(hits_, 3U);
  forget(g, sequences[0], shape, 51);
  check_gather(g, sequences, shape, {query}, 8, 8);
  EXPECT_EQ(hits_, 5U);
}

TEST_P(RowCacheTest, OfNoRowsOrNoStagingOnlyCounts) {
  const KvGeometry g = geometry(2, 64, 16, 4, 8);
  const RowCacheShape shape{.num_sets = 2};
  std::vector<CachedSequence> sequences;
  sequences.push_back(make(g, 40, shape, true));

  check_gather(g, sequences, shape, {{.sequence = 0, .ids = {{}, {}}, .masks = {{}, {}}}}, 8, 8);
  check_gather(g, sequences, shape, {{.sequence = 0, .ids = {{9}, {8, 9}}, .masks = {{1}, {1, 1}}}},
               8, 0);
}

// Factors in the pages that are NaN show that those on the device are read.
TEST_P(RowCacheTest, ReadsInt8RowsWithTheFactorsOnTheDevice) {
  constexpr std::int64_t kLength = 700;
  constexpr int kStaged = 300;
  for (const int head_dim : {64, 96, 128, 256}) {
    KvGeometry g = geometry(2, head_dim, 16, 6, 20);
    g.int8_pages = true;
    const bool copies = GetParam() == Backend::kCuda;
    SCOPED_TRACE(describe_geometry(g) + ", seed " + std::to_string(kSeed));
    SequenceUnderTest s = make_sequence(g, kLength);
    s.expected.length = kLength;
    s.expected.resident_begin = kLength - g.recent_capacity;
    const CopyRun counters{s.counters.data(), &s.expected, sizeof(SequenceCounters)};
    stream_->copy({&counters, 1});
    const auto elements = static_cast<std::size_t>(g.row_bytes() / 2);
    std::vector<std::vector<std::uint16_t>> rows;  // [token, head]
    const auto page_of = [&](std::int64_t token) {
      const std::size_t place = s.page_order[static_cast<std::size_t>(token / g.page_tokens)];
      return s.pages.data() + place * static_cast<std::size_t>(g.page_bytes());
    };
    std::normal_distribution<double> normal(0.0, 3.0);
    for (std::int64_t token = 0; token < kLength; ++token) {
      for (int head = 0; head < g.kv_heads; ++head) {
        std::vector<std::uint16_t> given(elements), kept(elements);
        for (std::uint16_t& x : given) x = testing::reference_bits(normal(random_), g.dtype);
        cpu::store_page_row(g, page_of(token), head, token,
                            reinterpret_cast<const std::byte*>(given.data()),
                            reinterpret_cast<std::byte*>(kept.data()));
        rows.push_back(kept);
      }
    }
    RowCacheGather gather;
    gather.shape = {.num_sets = 5};
    const Buffer memory = allocate<std::byte>(row_cache_bytes(g, gather.shape.num_sets));
    gather.row_cache.push(row_cache_in(g, gather.shape.num_sets, memory.data()));
    clear_row_cache(*stream_, g, gather.shape.num_sets, gather.row_cache[0]);
    const Buffer factors =
        allocate<std::byte>(frame_factor_bytes(g, static_cast<std::size_t>(s.num_pages + 1)));
    if (copies) {
      gather.factors = {s.pages.data(), factors.as<float>()};
      for (std::int64_t token = 0; token < kLength; token += g.page_tokens) {
        load_frame_factors(*stream_, g, gather.factors, page_of(token));
      }
      stream_->synchronize();
      for (std::int64_t token = 0; token < kLength; ++token) {
        for (int head = 0; head < g.kv_heads; ++head) {
          float* const scales = page_row<float>(g, page_of(token), head, token).scales;
          scales[0] = scales[1] = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
    std::vector<std::int32_t> ids;
    std::vector<std::uint16_t> expected;
    for (int head = 0; head < g.kv_heads; ++head) {
      std::vector<std::int32_t> chosen(kLength - 26);
      std::iota(chosen.begin(), chosen.end(), 6);  // in pages alone
      std::shuffle(chosen.begin(), chosen.end(), random_);
      std::sort(chosen.begin(), chosen.begin() + kStaged);
      for (int i = 0; i < kStaged; ++i) {
        ids.push_back(chosen[static_cast<std::size_t>(i)]);
        const auto at = static_cast<std::size_t>(ids.back() * g.kv_heads + head);
        expected.insert(expected.end(), rows[at].begin(), rows[at].end());
      }
    }
    const Buffer id_data = upload(ids);
    const Buffer masks = upload(std::vector<std::uint16_t>(ids.size(), 1));
    const Buffer counts =
        upload(std::vector<std::int32_t>(static_cast<std::size_t>(g.kv_heads), kStaged));
    gather.sequences.push(s.view);
    gather.query_batch.push({.sequence = 0});
    gather.totals = totals_.as<RowCacheTotals>();
    gather.flags = make_flags();
    for (int step = 0; step < 2; ++step) {  // rows are missing, then most are found
      SCOPED_TRACE("step " + std::to_string(step));
      const Buffer staged = allocate<std::uint16_t>(expected.size());
      gather.selection = {.ids = id_data.as<std::int32_t>(),
                          .head_mask = masks.as<std::uint16_t>(),
                          .counts = counts.as<std::int32_t>(),
                          .capacity = kStaged,
                          .staged = staged.data(),
                          .staged_capacity = kStaged};
      gather_cached_rows(*stream_, g, gather);
      EXPECT_EQ(download<std::uint16_t>(staged.data(), expected.size()), expected);
    }
    EXPECT_GT(gather.flags->row_cache_hits, 100U);
  }
}

}  // namespace
}  // namespace kvtier::transfer
