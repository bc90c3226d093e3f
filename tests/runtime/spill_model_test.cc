#include "kvtier/memory.h"

#include "runtime/spill_fixture.h"
#include "support/model_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// Random calls on sessions that fork, publish and share prefixes, over a tier that fails now and
/// then, against a model in plain memory: a call that throws changes nothing, and what is read is
/// what was appended.
namespace kvtier::testing {
namespace {

constexpr int kLayers = 2, kKvHeads = 2, kHeads = 4, kDim = 64;
constexpr std::int64_t kCapacity = 400;
constexpr std::size_t kMostSessions = 6;

using Ids = std::vector<std::int32_t>;
using Faults = FaultTier::Faults;

/// A session and its model: the ids of its tokens, and how many of these each layer has. Keys and
/// values of a token follow from its id and those before, so that equal prefixes have equal rows.
struct Member {
  Session session;
  Ids ids;
  std::array<std::int64_t, kLayers> length{};

  [[nodiscard]] std::int64_t shortest() const { return std::min(length[0], length[1]); }
};

/// Keys or values `[tokens, kv_heads, head_dim]` of tokens [begin, end) of a layer, which pages of
/// int8 rows hold as they are.
HostTensor rows_of(const Ids& ids, std::int64_t begin, std::int64_t end, int layer, bool values) {
  HostTensor rows(end - begin, kKvHeads, kDim, DType::kBFloat16);
  std::uint64_t hash = values ? 77 : 7;
  for (std::int64_t t = 0; t < end; ++t) {
    hash ^= static_cast<std::uint64_t>(ids[static_cast<std::size_t>(t)] + 1);
    hash *= std::uint64_t{0x9E3779B97F4A7C15};
    hash ^= hash >> 29U;
    if (t < begin) continue;
    std::minstd_rand random(static_cast<std::uint32_t>(hash >> 16U) * 2 +
                            static_cast<std::uint32_t>(layer));
    for (std::int64_t i = 0; i < kKvHeads * kDim; ++i) {
      const int n = i % kDim == 0 ? 127 : static_cast<int>(random() % 255) - 127;
      rows.set(static_cast<std::size_t>((t - begin) * kKvHeads * kDim + i),
               static_cast<float>(n) / 64.0F);
    }
  }
  return rows;
}

/// Sessions of one thread.
class RandomSessions {
 public:
  struct Options {
    bool loses = false;  ///< The tier loses pages.
    bool alone = true;   ///< The engine has no other sessions.
  };
  RandomSessions(Engine& engine, FaultTier& tier, std::uint64_t seed, const Options& options)
      : config_(engine.config()),
        tier_(tier),
        engine_(engine),
        random_(seed),
        options_(options),
        queries_(HostTensor::random(16, kHeads, kDim, DType::kFloat32, seed)) {
    open({});
  }

  void step() {
    if (members_.empty()) open({});
    Member& member = any();
    const int verb = pick(0, 99);
    if (verb < 24) {
      append(member, pick(0, kLayers - 1), pick(0, 7) == 0 ? pick(40, 150) : pick(1, 24));
    } else if (verb < 34) {
      decode();
    } else if (verb < 46) {
      attend(member, pick(0, kLayers - 1));
    } else if (verb < 48) {
      prefetch(member, pick(0, kLayers - 1));
    } else if (verb < 54) {
      fetch(member, pick(0, kLayers - 1));
    } else if (verb < 64) {
      truncate(member);
    } else if (verb < 68) {
      reserve(member);
    } else if (verb < 74) {
      fork(member);
    } else if (verb < 82) {
      publish(member);
    } else if (verb < 86) {
      open(Ids(any().ids));
    } else if (verb < 92) {
      close(pick(0, static_cast<int>(members_.size()) - 1));
    } else {
      change_faults();
    }
    if (::testing::Test::HasFatalFailure()) return;
    if (!options_.alone) return;
    const Stats stats = engine_.stats();
    ASSERT_EQ(stats.snapshot.sessions, members_.size());
    ASSERT_LE(stats.snapshot.pages_used, stats.snapshot.pages);
    ASSERT_EQ(stats.cumulative.tokens_appended, appended_);
    ASSERT_EQ(stats.cumulative.queries, attended_);
  }

  /// Reads everything once more, without faults, and closes all.
  void finish() {
    tier_.set({});
    faulty_ = false;
    for (std::size_t i = members_.size(); i-- > 0;) {
      for (int layer = 0; layer < kLayers; ++layer) {
        fetch(members_[i], layer);
        if (::testing::Test::HasFatalFailure()) return;
        if (i >= members_.size()) break;  // lost, and closed
      }
    }
    members_.clear();
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  Member& any() {
    return members_[static_cast<std::size_t>(pick(0, static_cast<int>(members_.size()) - 1))];
  }

  /// Runs a call; one that throws has changed nothing. Returns whether it did not. `may_fail`: also
  /// where the tier has no fault.
  bool run(const std::function<void()>& call, bool may_fail = false) {
    const std::optional<Error> error = error_of(call);
    if (error) check_error(*error, may_fail);
    for (const Member& member : members_) {
      for (int layer = 0; layer < kLayers && error; ++layer) {
        EXPECT_EQ(member.session.length(layer), member.length[static_cast<std::size_t>(layer)]);
      }
    }
    return !error;
  }
  void check_error(const Error& error, bool may_fail) {
    if (error.code() == ErrorCode::kDataLoss) {
      EXPECT_TRUE(options_.loses) << error.what();
    } else if (error.code() == ErrorCode::kUnavailable) {
      EXPECT_TRUE(faulty_ || !options_.alone) << error.what();
    } else {
      EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted) << error.what();
      const bool few_blocks = !config_.extra_sketches.empty();
      EXPECT_TRUE(faulty_ || may_fail || few_blocks || !options_.alone) << error.what();
    }
    ASSERT_FALSE(::testing::Test::HasFailure());
  }

  void open(Ids ids) {
    if (members_.size() >= kMostSessions) return;
    ids.resize(std::min(ids.size(), static_cast<std::size_t>(pick(0, 400))));
    std::optional<Session> session;
    ASSERT_TRUE(
        run([&] { session = engine_.open({.capacity_tokens = kCapacity, .token_ids = ids}); }));
    const std::int64_t length = session->length();
    ASSERT_LE(length, static_cast<std::int64_t>(ids.size()));
    ids.resize(static_cast<std::size_t>(length));
    members_.push_back({std::move(*session), std::move(ids), {length, length}});
  }
  /// Ids for `tokens` more tokens of a layer.
  void extend(Member& member, int layer, std::int64_t tokens) {
    const std::int64_t end = member.length[static_cast<std::size_t>(layer)] + tokens;
    while (static_cast<std::int64_t>(member.ids.size()) < end)
      member.ids.push_back(pick(0, 40) == 0 ? pick(0, 3) : 0);
  }
  void append(Member& member, int layer, std::int64_t tokens) {
    std::int64_t& length = member.length[static_cast<std::size_t>(layer)];
    const bool too_many = length + tokens > kCapacity;
    extend(member, layer, tokens);
    const HostTensor keys = rows_of(member.ids, length, length + tokens, layer, false);
    const HostTensor values = rows_of(member.ids, length, length + tokens, layer, true);
    if (run([&] { member.session.append(layer, keys.view(), values.view()); }, too_many)) {
      ASSERT_FALSE(too_many);
      length += tokens;
      appended_ += static_cast<std::uint64_t>(tokens);
    }
    trim(member);
  }
  static void trim(Member& member) {
    member.ids.resize(static_cast<std::size_t>(std::max(member.length[0], member.length[1])));
  }

  struct Call {
    Member* member = nullptr;
    std::int64_t tokens = 0, first_query = 0;
    HostTensor keys, values, out;
    HostIds ids{0, 0, 0};
    AttendOptions options{};
  };
  void make_query(Call& call) {
    call.first_query = pick(0, 16 - static_cast<int>(call.tokens));
    call.out = HostTensor(call.tokens, kHeads, kDim, DType::kFloat32);
    call.ids = HostIds(call.tokens, kKvHeads, kCapacity);
    if (pick(0, 2) == 0) call.options.mode = LayerMode::kDense;
  }
  AttendOutputs outputs_of(Call& call) {
    return {.out = call.out.mutable_view(), .selected = call.ids.view()};
  }

  /// One decode of some sessions together.
  void decode() {
    const int layer = pick(0, kLayers - 1);
    const auto at = static_cast<std::size_t>(layer);
    std::vector<Call> calls;
    const auto wanted = static_cast<std::size_t>(pick(1, 3));
    for (std::size_t i = 0; i < members_.size() && calls.size() < wanted; ++i) {
      if (pick(0, 1) == 0 || members_[i].length[at] + 4 > kCapacity) continue;
      Call& call = calls.emplace_back();
      call.member = &members_[i];
      call.tokens = pick(1, 4);
      extend(*call.member, layer, call.tokens);
      const std::int64_t length = call.member->length[at];
      call.keys = rows_of(call.member->ids, length, length + call.tokens, layer, false);
      call.values = rows_of(call.member->ids, length, length + call.tokens, layer, true);
      make_query(call);
    }
    if (calls.empty()) return;
    std::vector<BatchItem> items;
    for (Call& call : calls) {
      items.push_back({.session = &call.member->session,
                       .inputs = {.query = queries_.view(call.first_query, call.tokens),
                                  .key = call.keys.view(),
                                  .value = call.values.view()},
                       .outputs = outputs_of(call),
                       .options = call.options});
    }
    const bool done = run([&] { engine_.decode(layer, items); });
    for (Call& call : calls) {
      if (done) {
        call.member->length[at] += call.tokens;
        appended_ += static_cast<std::uint64_t>(call.tokens);
        attended_ += static_cast<std::uint64_t>(call.tokens);
      }
      trim(*call.member);
      if (done) check(call, layer);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  void attend(Member& member, int layer) {
    const std::int64_t length = member.length[static_cast<std::size_t>(layer)];
    if (length == 0) return;
    Call call;
    call.member = &member;
    call.tokens = std::min<std::int64_t>(length, pick(1, 3));
    make_query(call);
    const bool done = run([&] {
      member.session.attend(layer, {.query = queries_.view(call.first_query, call.tokens)},
                            outputs_of(call), {}, call.options);
    });
    if (!done) return;
    attended_ += static_cast<std::uint64_t>(call.tokens);
    check(call, layer);
  }
  void prefetch(Member& member, int layer) {
    if (member.length[static_cast<std::size_t>(layer)] == 0) return;
    run([&] { member.session.prefetch(layer, queries_.view(pick(0, 15), 1)); });
  }
  /// The attention of the last query, over the tokens that it says were selected.
  void check(Call& call, int layer) {
    const std::int64_t length = call.member->length[static_cast<std::size_t>(layer)];
    const std::int64_t t = call.tokens - 1;
    const HostTensor keys = rows_of(call.member->ids, 0, length, layer, false);
    const HostTensor values = rows_of(call.member->ids, 0, length, layer, true);
    const bool dense = call.options.mode == LayerMode::kDense;
    const oracle::Visible visible =
        oracle::visible_tokens({.mode = dense ? LayerMode::kDense : LayerMode::kSparse,
                                .sink = config_.retrieval.sink_tokens,
                                .recent = config_.retrieval.recent_tokens},
                               length, 0);
    for (int head = 0; head < kHeads; ++head) {
      std::vector<std::int64_t> tokens = visible.static_tokens;
      const std::vector<std::int64_t> chosen = call.ids.ids(t, head / 2);
      tokens.insert(tokens.end(), chosen.begin(), chosen.end());
      if (!dense) {
        ASSERT_EQ(chosen.size(), std::min<std::size_t>(visible.eligible.size(), 48));
      }
      const oracle::Attention expected = oracle::attend(
          queries_.row(call.first_query + t, head),
          kv_view(keys.values(), values.values(), kKvHeads, kDim, head / 2), tokens, 1.0 / 8.0);
      ASSERT_LT(oracle::relative_error(call.out.row(t, head), expected.out), 5e-5)
          << "head " << head << " of length " << length;
    }
  }
  void fetch(Member& member, int layer) {
    const std::int64_t length = member.length[static_cast<std::size_t>(layer)];
    if (length == 0) return;
    std::vector<std::byte> found;
    if (!run([&] { found = all_rows(member.session, config_.model, layer); })) return lost(member);
    const HostTensor keys = rows_of(member.ids, 0, length, layer, false);
    const HostTensor values = rows_of(member.ids, 0, length, layer, true);
    constexpr std::size_t kRow = kDim * 2;
    for (std::int64_t t = 0; t < length; ++t) {
      for (int head = 0; head < kKvHeads; ++head) {
        const auto from = static_cast<std::size_t>(t * kKvHeads + head) * kRow;
        const auto to = static_cast<std::size_t>(head * length + t) * kRow;
        const auto same = [&](const HostTensor& rows, std::size_t at) {
          return std::equal(rows.bytes().begin() + static_cast<std::ptrdiff_t>(from),
                            rows.bytes().begin() + static_cast<std::ptrdiff_t>(from + kRow),
                            found.begin() + static_cast<std::ptrdiff_t>(at));
        };
        ASSERT_TRUE(same(keys, to) && same(values, found.size() / 2 + to))
            << "token " << t << " of " << length << ", layer " << layer << ", head " << head;
      }
    }
  }
  /// A session of which a tier may have lost pages ends.
  void lost(const Member& member) {
    if (options_.loses && !faulty_) {
      members_.erase(members_.begin() + (&member - members_.data()));
    }
  }
  void truncate(Member& member) {
    const std::int64_t longest = static_cast<std::int64_t>(member.ids.size());
    const auto most =
        static_cast<int>(pick(0, 3) == 0 ? longest : std::min<std::int64_t>(longest, 40));
    const std::int64_t to = longest - pick(0, most);
    const bool one = pick(0, 3) == 0;
    const int layer = pick(0, kLayers - 1);
    if (one && to > member.length[static_cast<std::size_t>(layer)]) return;
    ASSERT_TRUE(
        run([&] { member.session.truncate(to, {}, one ? std::optional(layer) : std::nullopt); }));
    for (int i = 0; i < kLayers; ++i) {
      std::int64_t& length = member.length[static_cast<std::size_t>(i)];
      if (!one || i == layer) length = std::min(length, to);
    }
    trim(member);
  }
  void reserve(Member& member) {
    const int tokens = pick(0, 24);
    run([&] { member.session.reserve(tokens); }, /*may_fail=*/true);
  }
  void fork(Member& member) {
    const auto at = static_cast<std::size_t>(&member - members_.data());
    const int count = pick(1, 2);
    if (members_.size() + static_cast<std::size_t>(count) > kMostSessions) return;
    std::vector<Session> children;
    ASSERT_TRUE(run([&] { children = member.session.fork(count); }));
    for (Session& child : children) {
      members_.push_back({std::move(child), members_[at].ids, members_[at].length});
    }
  }
  void publish(Member& member) {
    const auto tokens = static_cast<std::size_t>(member.shortest());
    ASSERT_TRUE(run([&] { member.session.publish(std::span(member.ids).first(tokens)); }));
  }
  void close(int i) { members_.erase(members_.begin() + i); }
  void change_faults() {
    const int kind = pick(0, options_.loses ? 8 : 6);
    Faults faults;
    faulty_ = kind > 1;
    if (kind == 2) faults.put = TierStatus::kFull;
    if (kind == 3) faults.put = TierStatus::kUnavailable;
    if (kind == 4) faults.half = true;
    if (kind == 5) faults.good_puts = static_cast<std::uint64_t>(pick(0, 12));
    if (kind == 6) faults.get = TierStatus::kUnavailable;
    if (kind == 7) faults.get = TierStatus::kCorrupt;
    if (kind == 8) tier_.forget();
    tier_.set(faults);
  }

  Config config_;
  FaultTier& tier_;
  Engine& engine_;
  std::mt19937_64 random_;
  const Options options_;
  bool faulty_ = false;  ///< The tier fails now.
  HostTensor queries_;
  std::vector<Member> members_;
  std::uint64_t appended_ = 0, attended_ = 0;
};

class SpillModelTest : public SpillTest {
 protected:
  /// A configuration for each seed, over a new tier.
  Config config_of(std::uint64_t seed, std::size_t frames) {
    tier_ = std::make_shared<FaultTier>();
    Config config = with_frames(frames + seed * 7 % 30);
    config.memory.verify_rows = seed % 3 == 0;
    if (seed % 5 == 0) {
      config.memory.page_format = PageFormat::kInt8;
      config.memory.host_bytes /= 2;  // rows of half the size, and their factors
    }
    if (seed % 2 == 0) {
      config.memory.staging_rows = 32;
      config.memory.row_cache_bytes = 1 * MiB;
      config.memory.prefetch_rows = seed % 4 == 0;
    }
    if (seed % 4 == 1) {
      // Sketches of many bits, of which the device has few blocks.
      for (std::uint64_t i = 1; i <= 3; ++i) {
        config.extra_sketches.push_back({.num_planes = 1024, .seed = i});
      }
      const std::size_t block = session_memory(config, 1).sketches / kLayers;
      config.memory.device_bytes = engine_memory(config, GetParam()).workspace + 7 * block;
    }
    return config;
  }
  static int num_seeds() { return std::max(1, num_model_calls(kUsualCalls) / kCalls); }

  void run(std::uint64_t first, bool loses) {
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(num_seeds());
         ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Config config = config_of(seed, 50);
      if (loses && seed % 3 == 1) {
        config.memory.tiers.push_back(std::make_shared<FaultTier>(/*retains=*/false));
      }
      Engine engine(config);
      RandomSessions sessions(engine, *tier_, seed, {.loses = loses});
      for (int call = 0; call < kCalls; ++call) {
        sessions.step();
        ASSERT_FALSE(HasFailure()) << "call " << call;
      }
      sessions.finish();
      ASSERT_FALSE(HasFailure());
      expect_prefixes_alone(engine);
    }
  }
  /// Without sessions, what is held are the stored prefixes.
  static void expect_prefixes_alone(const Engine& engine) {
    const Stats::Snapshot now = engine.stats().snapshot;
    ASSERT_EQ(now.sessions, 0U);
    ASSERT_EQ(now.pages_used + now.pages_in_tiers,
              now.prefix_tokens / static_cast<std::size_t>(kPageTokens) * kLayers);
    ASSERT_EQ(now.pages_shared, 0U);
  }

  static constexpr int kCalls = 600;  ///< Of a seed.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr int kUsualCalls = 2 * kCalls;
#else
  static constexpr int kUsualCalls = 10 * kCalls;
#endif
};

TEST_P(SpillModelTest, WhatIsReadIsWhatWasAppendedWhateverTheTierRefuses) { run(1, false); }

TEST_P(SpillModelTest, PagesThatAreLostAreReportedAndTheOthersAreWhole) { run(1001, true); }

TEST_P(SpillModelTest, SessionsOfSeveralThreadsAreWhole) {
  constexpr std::uint64_t kThreads = 4;
  for (int i = 0; i < num_seeds(); i += static_cast<int>(kThreads)) {
    const auto seed = static_cast<std::uint64_t>(i + 1);
    SCOPED_TRACE("seed " + std::to_string(seed));
    Engine engine(config_of(seed, 100));
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        RandomSessions sessions(engine, *tier_, 100 * seed + t, {.alone = false});
        for (int call = 0; call < kCalls && !HasFailure(); ++call) sessions.step();
        sessions.finish();
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_FALSE(HasFailure());
    expect_prefixes_alone(engine);
  }
}

KVTIER_INSTANTIATE_BACKENDS(SpillModelTest);

}  // namespace
}  // namespace kvtier::testing
