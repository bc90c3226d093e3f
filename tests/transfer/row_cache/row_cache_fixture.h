#pragma once

#include "tests/transfer/kv/rows_fixture.h"
#include "tests/transfer/row_cache/row_cache_set_model.h"
#include "transfer/row_cache/row_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <utility>

namespace kvtier::transfer {

/// A sequence whose rows are made of (token, head, how often the token was written), with a row
/// cache and the plain model of them.
struct CachedSequence {
  SequenceUnderTest s;
  std::vector<int> written;  ///< Per token.
  Buffer memory;             ///< None: no row cache is kept.
  RowCache row_cache;
  std::vector<std::vector<ModelSet>> model;  ///< Per head and set.
};

struct QueryIds {
  int sequence = 0;
  std::vector<std::vector<std::int32_t>> ids;     ///< Per head.
  std::vector<std::vector<std::uint16_t>> masks;  ///< Of the query heads that chose each.
};

class RowCacheTest : public RowsTest {
 protected:
  void SetUp() override {
    RowsTest::SetUp();
    if (IsSkipped()) return;
    totals_ = device_->allocate(Space::kDevice, sizeof(RowCacheTotals));
    stream_->fill(totals_.data(), 0, totals_.bytes());
  }

  static std::uint16_t element(const CachedSequence& sequence, std::int64_t token, int head,
                               int i) {
    const int version = sequence.written[static_cast<std::size_t>(token)];
    return static_cast<std::uint16_t>(token * 31 + head * 7 + version * 101 + i % 5);
  }

  CachedSequence make(const KvGeometry& g, std::int64_t length, const RowCacheShape& shape,
                      bool keeps) {
    CachedSequence sequence;
    sequence.s = make_sequence(g, length);
    sequence.written.assign(static_cast<std::size_t>(length), 0);
    sequence.s.expected.length = length;
    sequence.s.expected.resident_begin = std::max<std::int64_t>(0, length - g.recent_capacity);
    write(g, sequence, 0);
    const CopyRun run{sequence.s.counters.data(), &sequence.s.expected, sizeof(SequenceCounters)};
    stream_->copy({&run, 1});
    stream_->synchronize();
    if (!keeps) return sequence;
    sequence.memory = allocate<std::byte>(row_cache_bytes(g, shape.num_sets));
    sequence.row_cache = row_cache_in(g, shape.num_sets, sequence.memory.data());
    clear_row_cache(*stream_, g, shape.num_sets, sequence.row_cache);
    sequence.model.assign(
        static_cast<std::size_t>(g.kv_heads),
        std::vector<ModelSet>(static_cast<std::size_t>(shape.num_sets), ModelSet(shape.policy)));
    return sequence;
  }

  /// Writes the rows of the tokens from `begin` on anew, where they are read.
  void write(const KvGeometry& g, CachedSequence& sequence, std::int64_t begin) {
    stream_->synchronize();  // no gather reads any more
    const int elements = 2 * g.head_dim;
    std::vector<std::uint16_t> row(static_cast<std::size_t>(elements));
    for (std::int64_t token = begin; token < std::ssize(sequence.written); ++token) {
      for (int head = 0; head < g.kv_heads; ++head) {
        for (int i = 0; i < elements; ++i) {
          row[static_cast<std::size_t>(i)] = element(sequence, token, head, i);
        }
        const std::size_t page =
            sequence.s.page_order[static_cast<std::size_t>(token / g.page_tokens)];
        std::memcpy(sequence.s.pages.data() + page * static_cast<std::size_t>(g.page_bytes()) +
                        static_cast<std::size_t>((head * g.page_tokens + token % g.page_tokens) *
                                                 g.row_bytes()),
                    row.data(), row.size() * 2);
        if (token < g.sink_capacity) {
          put(sequence.s.sink, (head * g.sink_capacity + token) * g.row_bytes(), row);
        }
        if (token >= sequence.s.expected.resident_begin) {
          put(sequence.s.ring,
              (head * g.recent_capacity + token % g.recent_capacity) * g.row_bytes(), row);
        }
      }
    }
    stream_->synchronize();
  }
  void put(const Buffer& to, std::int64_t offset, const std::vector<std::uint16_t>& row) {
    const CopyRun run{to.data() + offset, row.data(), row.size() * 2};
    stream_->copy({&run, 1});
    stream_->synchronize();
  }

  QueryIds random_query(int sequence, int heads, std::int64_t length, std::size_t most) {
    QueryIds query{.sequence = sequence, .ids = {}, .masks = {}};
    for (int head = 0; head < heads; ++head) {
      std::map<std::int32_t, std::uint16_t> chosen;
      const std::size_t count = random_() % (most + 1);
      while (chosen.size() < count) {
        // Small ids more often, so that some are asked for again and again.
        const double at = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
        chosen[static_cast<std::int32_t>(at * at * static_cast<double>(length))] =
            static_cast<std::uint16_t>(1 + random_() % 3);
      }
      query.ids.emplace_back();
      query.masks.emplace_back();
      for (const auto& [id, mask] : chosen) {
        query.ids.back().push_back(id);
        query.masks.back().push_back(mask);
      }
    }
    return query;
  }

  /// How rows are asked for.
  enum class Way { kStaged, kPlaced, kPrefetched };

  /// Tells for each (query, head), in order, which entries of its list are cached.
  using Found = std::vector<std::vector<bool>>;

  /// What a gather does to the model of one head, and what it counts.
  static void expect_head(const KvGeometry& g, CachedSequence& sequence, const RowCacheShape& shape,
                          int number, int head, const std::vector<QueryIds>& queries,
                          std::size_t staged, bool prefetched, StepFlags& expected, Found& found) {
    struct Use {
      std::int32_t token;
      unsigned heads;
    };
    const auto h = static_cast<std::size_t>(head);
    const bool keeps = sequence.memory.data() != nullptr;
    std::vector<std::vector<Use>> missing(static_cast<std::size_t>(shape.num_sets));
    if (keeps) {
      for (ModelSet& set : sequence.model[h]) set.begin(prefetched);
    }
    for (std::size_t q = 0; q < queries.size(); ++q) {
      const QueryIds& query = queries[q];
      if (query.sequence != number) continue;
      std::vector<bool>& cached = found[q * static_cast<std::size_t>(g.kv_heads) + h];
      cached.assign(query.ids[h].size(), false);
      if (!prefetched) expected.rows_selected += query.ids[h].size();
      for (std::size_t i = 0; i < query.ids[h].size() && (prefetched || i < staged); ++i) {
        const std::int32_t token = query.ids[h][i];
        const auto heads = static_cast<unsigned>(std::popcount(query.masks[h][i]));
        if (token < g.sink_capacity || token >= sequence.s.expected.resident_begin) {
          if (!prefetched) ++expected.rows_resident;
          continue;
        }
        const auto set = static_cast<std::size_t>(row_cache_set(token, shape.num_sets));
        if (keeps && sequence.model[h][set].find(token, heads)) {
          if (prefetched) continue;
          cached[i] = true;
          ++expected.rows_resident;
          ++expected.row_cache_hits;
          continue;
        }
        if (!prefetched) ++expected.rows_fetched_host;
        if (!keeps) continue;
        if (!prefetched) ++expected.row_cache_misses;
        if (missing[set].size() < kSetWays) missing[set].push_back({token, heads});
      }
    }
    if (!keeps) return;
    for (std::size_t set = 0; set < missing.size(); ++set) {
      ModelSet& model = sequence.model[h][set];
      if (!prefetched) {
        expected.rows_prefetched_useful += static_cast<std::uint64_t>(model.end_of_finding());
      }
      for (const Use& use : missing[set]) {
        const std::vector<std::int32_t> there = model.tokens();
        if (std::find(there.begin(), there.end(), use.token) != there.end()) continue;
        RowCacheChange change;
        const bool kept = model.admit(use.token, use.heads, change).has_value();
        if (kept) ++(prefetched ? expected.rows_prefetched : expected.row_cache_admissions);
        if (change.evicts) ++expected.row_cache_evictions;
        if (change.wastes) ++expected.rows_prefetched_wasted;
      }
    }
  }

  void check_gather(const KvGeometry& g, std::vector<CachedSequence>& sequences,
                    const RowCacheShape& shape, const std::vector<QueryIds>& queries,
                    std::int64_t capacity, std::int64_t staged_capacity, Way way = Way::kStaged) {
    const bool prefetched = way == Way::kPrefetched;
    const auto heads = static_cast<std::size_t>(g.kv_heads);
    const auto cap = static_cast<std::size_t>(capacity);
    const auto staged_cap = static_cast<std::size_t>(staged_capacity);
    const auto row = static_cast<std::size_t>(g.row_bytes() / 2);
    std::vector<std::int32_t> ids(queries.size() * heads * cap, -7), counts;
    std::vector<std::uint16_t> masks(ids.size(), 0x5555);
    std::vector<std::uint16_t> staging(queries.size() * heads * staged_cap * row, kUnwritten);
    RowCacheGather gather;
    gather.shape = shape;
    gather.prefetched = prefetched;
    gather.totals = totals_.as<RowCacheTotals>();
    gather.flags = make_flags();
    for (const CachedSequence& sequence : sequences) {
      gather.sequences.push(sequence.s.view);
      gather.row_cache.push(sequence.row_cache);
    }
    StepFlags expected;
    Found cached(queries.size() * heads);
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      for (int head = 0; head < g.kv_heads; ++head) {
        expect_head(g, sequences[s], shape, static_cast<int>(s), head, queries, staged_cap,
                    prefetched, expected, cached);
      }
    }
    for (std::size_t q = 0; q < queries.size(); ++q) {
      gather.query_batch.push({.sequence = queries[q].sequence});
      const CachedSequence& sequence = sequences[static_cast<std::size_t>(queries[q].sequence)];
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t list = q * heads + h;
        const std::vector<std::int32_t>& chosen = queries[q].ids[h];
        std::copy(chosen.begin(), chosen.end(), &ids[list * cap]);
        std::copy(queries[q].masks[h].begin(), queries[q].masks[h].end(), &masks[list * cap]);
        counts.push_back(static_cast<std::int32_t>(chosen.size()));
        for (std::size_t i = 0; i < std::min(chosen.size(), staged_cap); ++i) {
          if (way == Way::kPlaced && cached[list][i]) continue;  // it stays in its slot
          for (std::size_t e = 0; e < row; ++e) {
            staging[(list * staged_cap + i) * row + e] =
                element(sequence, chosen[i], static_cast<int>(h), static_cast<int>(e));
          }
        }
      }
    }
    const Buffer id_data = upload(ids), mask_data = upload(masks), count_data = upload(counts);
    const Buffer staged = allocate<std::uint16_t>(staging.size());
    gather.selection = {.ids = id_data.as<std::int32_t>(),
                        .head_mask = mask_data.as<std::uint16_t>(),
                        .counts = count_data.as<std::int32_t>(),
                        .capacity = capacity,
                        .staged = staged.data(),
                        .staged_capacity = staged_capacity};
    const auto num_queries = static_cast<std::int64_t>(queries.size());
    const std::size_t place_bytes = row_cache_places_bytes(g, num_queries, staged_capacity);
    const Buffer places = allocate<std::byte>(place_bytes);
    stream_->fill(places.data(), 0, place_bytes);
    stream_->synchronize();
    if (way == Way::kPlaced) {
      gather.places = row_cache_places_in(g, num_queries, staged_capacity, places.data());
    }

    gather_cached_rows(*stream_, g, gather);

    EXPECT_EQ(download<std::uint16_t>(staged.data(), staging.size()), staging);
    const StepFlags& found = *gather.flags;
    EXPECT_EQ(found.rows_selected, expected.rows_selected);
    EXPECT_EQ(found.rows_resident, expected.rows_resident);
    EXPECT_EQ(found.rows_fetched_host, expected.rows_fetched_host);
    EXPECT_EQ(found.row_cache_hits, expected.row_cache_hits);
    EXPECT_EQ(found.row_cache_misses, expected.row_cache_misses);
    EXPECT_EQ(found.row_cache_admissions, expected.row_cache_admissions);
    EXPECT_EQ(found.row_cache_evictions, expected.row_cache_evictions);
    EXPECT_EQ(found.rows_prefetched, expected.rows_prefetched);
    EXPECT_EQ(found.rows_prefetched_useful, expected.rows_prefetched_useful);
    EXPECT_EQ(found.rows_prefetched_wasted, expected.rows_prefetched_wasted);
    prefetched_ += found.rows_prefetched;
    useful_ += found.rows_prefetched_useful;
    wasted_ += found.rows_prefetched_wasted;
    hits_ += found.row_cache_hits;
    evictions_ += found.row_cache_evictions;
    for (const CachedSequence& sequence : sequences) expect_sets(sequence, shape);
    if (way == Way::kPlaced)
      expect_places(g, sequences, queries, gather.places, staged_cap, cached);
  }

  /// Rows that are cached come first, in slots that hold them; the others are staged.
  void expect_places(const KvGeometry& g, const std::vector<CachedSequence>& sequences,
                     const std::vector<QueryIds>& queries, const RowCachePlaces& places,
                     std::size_t staged, const Found& cached) {
    const auto heads = static_cast<std::size_t>(g.kv_heads);
    const auto elements = static_cast<std::size_t>(g.row_bytes() / 2);
    const auto lists = download<PlacedList>(places.lists, queries.size() * heads);
    const auto tickets = download<std::uint32_t>(places.tickets, queries.size() * heads);
    EXPECT_EQ(std::count(tickets.begin(), tickets.end(), 0U), std::ssize(tickets));
    for (std::size_t list = 0; list < lists.size(); ++list) {
      SCOPED_TRACE("list " + std::to_string(list));
      const QueryIds& query = queries[list / heads];
      const CachedSequence& sequence = sequences[static_cast<std::size_t>(query.sequence)];
      const std::vector<std::int32_t>& ids = query.ids[list % heads];
      const std::size_t count = std::min(ids.size(), staged);
      std::vector<std::size_t> order;
      for (std::size_t i = 0; i < count; ++i) {
        if (cached[list][i]) order.push_back(i);
      }
      EXPECT_EQ(lists[list].known, 1U);
      ASSERT_EQ(lists[list].num_found, static_cast<int>(order.size()));
      EXPECT_EQ(lists[list].slots == nullptr, sequence.memory.data() == nullptr);
      for (std::size_t i = count; i-- > 0;) {
        if (!cached[list][i]) order.push_back(i);
      }
      const auto found = download<RowPlace>(places.places + list * staged, count);
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t entry = order[i];
        EXPECT_EQ(found[i].head_mask, query.masks[list % heads][entry]);
        if (!cached[list][entry]) {
          EXPECT_EQ(found[i].at, -1 - static_cast<std::int32_t>(entry));
          continue;
        }
        const auto row =
            download<std::uint16_t>(lists[list].slots + found[i].at * g.row_bytes(), elements);
        for (std::size_t e = 0; e < elements; ++e) {
          ASSERT_EQ(row[e], element(sequence, ids[entry], static_cast<int>(list % heads),
                                    static_cast<int>(e)));
        }
      }
    }
  }

  void expect_sets(const CachedSequence& sequence, const RowCacheShape& shape) {
    for (std::size_t head = 0; head < sequence.model.size(); ++head) {
      const auto sets = static_cast<std::size_t>(shape.num_sets);
      const auto found = download<RowCacheSet>(sequence.row_cache.sets + head * sets, sets);
      for (std::size_t i = 0; i < sets; ++i) {
        const std::vector<std::int32_t> tokens(std::begin(found[i].tokens),
                                               std::end(found[i].tokens));
        EXPECT_EQ(tokens, sequence.model[head][i].tokens()) << "head " << head << ", set " << i;
      }
    }
  }

  void forget(const KvGeometry& g, CachedSequence& sequence, const RowCacheShape& shape,
              std::int64_t length) {
    StepFlags* const flags = make_flags();
    forget_cached_rows(*stream_, g,
                       {.row_cache = sequence.row_cache,
                        .num_sets = shape.num_sets,
                        .length = length,
                        .flags = flags});
    stream_->synchronize();
    std::uint64_t wasted = 0;
    for (std::vector<ModelSet>& sets : sequence.model) {
      for (ModelSet& set : sets) wasted += static_cast<std::uint64_t>(set.forget(length));
    }
    EXPECT_EQ(flags->rows_prefetched_wasted, wasted);
    wasted_ += wasted;
    for (auto& written : std::span(sequence.written).subspan(static_cast<std::size_t>(length))) {
      ++written;
    }
    write(g, sequence, length);
  }

  Buffer totals_;
  std::uint64_t hits_ = 0;
  std::uint64_t evictions_ = 0;
  std::uint64_t prefetched_ = 0, useful_ = 0, wasted_ = 0;
};

}  // namespace kvtier::transfer
