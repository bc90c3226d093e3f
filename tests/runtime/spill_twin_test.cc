#include "runtime/priority_fixture.h"
#include "runtime/spill_fixture.h"
#include "support/model_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// Random calls with any options together, on an engine whose pages go to a tier and on one that
/// has room for all: both give the same bits. On the CPU, which takes all sums in one order.
namespace kvtier::testing {
namespace {

constexpr int kLayers = 3;  // sparse, sliding-window, and sparse with a soft cap
constexpr std::int64_t kCapacity = 500;
constexpr std::size_t kMostSessions = 6;

/// A session of each engine.
struct Twins {
  Session small, large;
  std::vector<std::int32_t> ids;  ///< Of its tokens, for prefixes.
  std::array<std::int64_t, kLayers> length{};
  bool odd = false;  ///< It has rows that are not those of its ids.

  [[nodiscard]] std::int64_t shortest() const { return *std::ranges::min_element(length); }
  [[nodiscard]] std::int64_t longest() const { return *std::ranges::max_element(length); }
};

class RandomTwins {
 public:
  RandomTwins(const Config& small, const Config& large, FaultTier& tier, std::uint64_t seed)
      : config_(small),
        tier_(tier),
        small_(small),
        large_(large),
        random_(seed),
        seed_(seed * 100'000) {
    for (RetrievalConfig retrieval : priority_methods()) {
      retrieval.sink_tokens = pick(0, 3) * 8;
      retrieval.recent_tokens = pick(0, 3) * 8;
      for (const Selection selection : kinds_of_sets(retrieval)) {
        retrieval.selection = selection;
        methods_.push_back(retrieval);
        if (retrieval.coarse_bits > 0) continue;
        retrieval.error_target = 0.1;
        methods_.push_back(retrieval);
        retrieval.error_target = 0.0;
      }
      retrieval.rule = SelectionRule::kTopK;
      retrieval.coarse_bits = 0;
      methods_.push_back(retrieval);
    }
  }

  void step() {
    if (members_.empty()) open(false);
    Twins& member = members_[static_cast<std::size_t>(pick(0, int(members_.size()) - 1))];
    const int layer = pick(0, kLayers - 1);
    const int verb = pick(0, 99);
    if (verb < 20) {
      append(member, layer, pick(0, 7) == 0 ? pick(40, 150) : pick(1, 40));
    } else if (verb < 45) {
      decode(layer);
    } else if (verb < 60) {
      attend(member, layer);
    } else if (verb < 66) {
      select(member, layer);
    } else if (verb < 70) {
      fetch(member, layer);
    } else if (verb < 78) {
      truncate(member);
    } else if (verb < 83) {
      const int tokens = pick(0, 70);
      both([&](Session& s) { s.reserve(tokens); }, member);
    } else if (verb < 88) {
      fork(member);
    } else if (verb < 92) {
      publish(member);
    } else if (verb < 95) {
      open(true);
    } else if (verb < 96) {
      prefetch(member, layer);
    } else if (verb < 98) {
      change_faults();
    } else {
      members_.erase(members_.begin() + (&member - members_.data()));
    }
  }
  [[nodiscard]] Stats stats() { return small_.stats(); }
  void finish() {
    tier_.set({});
    for (std::size_t i = 0; i < members_.size(); ++i) {
      for (int layer = 0; layer < kLayers; ++layer) fetch(members_[i], layer);
    }
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  /// Runs a call on the small engine and, where it is done there, on the large one.
  bool twice(const std::function<void()>& small, const std::function<void()>& large,
             bool spoiled = false) {
    const Stats::Cumulative small_before = small_.stats().cumulative;
    const Stats::Cumulative large_before = large_.stats().cumulative;
    const std::optional<Error> error = error_of(small);
    if (error) {
      if (spoiled && error->code() == ErrorCode::kInvalidArgument) {
        EXPECT_TRUE(error_of(large).has_value());
      } else {
        EXPECT_TRUE(error->code() == ErrorCode::kResourceExhausted ||
                    (faulty_ && error->code() == ErrorCode::kUnavailable))
            << error->what();
      }
      for (const Twins& member : members_) {
        for (int layer = 0; layer < kLayers; ++layer) {
          EXPECT_EQ(member.small.length(layer), member.length[std::size_t(layer)]);
        }
      }
      return false;
    }
    const std::optional<Error> other = error_of(large);
    EXPECT_FALSE(other.has_value()) << other->what();
    const Stats::Cumulative mine = small_.stats().cumulative - small_before;
    const Stats::Cumulative theirs = large_.stats().cumulative - large_before;
    EXPECT_EQ(mine.rows_selected, theirs.rows_selected);
    EXPECT_EQ(mine.rows_attended, theirs.rows_attended);
    EXPECT_EQ(mine.queries, theirs.queries);
    EXPECT_EQ(mine.tokens_appended, theirs.tokens_appended);
    EXPECT_EQ(mine.rows_corrupt, 0U);
    return true;
  }
  template <typename Call>
  bool both(const Call& call, Twins& member) {
    return twice([&] { call(member.small); }, [&] { call(member.large); });
  }

  void open(bool with_prefix) {
    if (members_.size() >= kMostSessions) return;
    SessionConfig config;
    config.capacity_tokens = kCapacity;
    std::vector<std::int32_t> ids;
    if (with_prefix) {
      ids = members_[static_cast<std::size_t>(pick(0, int(members_.size()) - 1))].ids;
      config.token_ids = ids;
    }
    std::optional<Session> small, large;
    if (!twice([&] { small = small_.open(config); }, [&] { large = large_.open(config); })) return;
    const std::int64_t length = small->length();
    if (length > large->length()) {  // stored again since
      small->truncate(large->length());
    } else {
      large->truncate(length);
    }
    ids.resize(static_cast<std::size_t>(small->length()));
    Twins& member = members_.emplace_back(
        Twins{std::move(*small), std::move(*large), std::move(ids), {}, false});
    member.length.fill(member.small.length());
  }
  /// Rows of a layer are those of the ids, so that prefixes have the same.
  struct Rows {
    HostTensor keys, values;
  };
  Rows rows(Twins& member, int layer, std::int64_t tokens) {
    const ModelConfig& model = config_.model;
    const std::int64_t begin = member.length[std::size_t(layer)];
    while (std::int64_t(member.ids.size()) < begin + tokens) {
      member.ids.push_back(pick(0, 30) == 0 ? pick(0, 3) : 0);
    }
    Rows made{HostTensor(tokens, model.kv_heads, model.head_dim, DType::kBFloat16),
              HostTensor(tokens, model.kv_heads, model.head_dim, DType::kBFloat16)};
    std::uint64_t hash = 7;
    for (std::int64_t t = 0; t < begin + tokens; ++t) {
      hash ^= static_cast<std::uint64_t>(member.ids[std::size_t(t)] + 1);
      hash *= std::uint64_t{0x9E3779B97F4A7C15};
      hash ^= hash >> 29U;
      if (t < begin) continue;
      std::minstd_rand random(std::uint32_t(hash >> 16U) * 4 + std::uint32_t(layer));
      std::normal_distribution<float> normal;
      const float weight = random() % 20 == 0 ? 4.0F : 1.0F;
      const int n = model.kv_heads * model.head_dim;
      for (int i = 0; i < n; ++i) {
        made.keys.set(std::size_t((t - begin) * n + i), weight * normal(random));
        made.values.set(std::size_t((t - begin) * n + i), weight * normal(random));
      }
    }
    return made;
  }
  static void trim(Twins& member) { member.ids.resize(std::size_t(member.longest())); }
  void append(Twins& member, int layer, std::int64_t tokens) {
    std::int64_t& length = member.length[std::size_t(layer)];
    if (length + tokens > kCapacity) return;
    const Rows made = rows(member, layer, tokens);
    if (both([&](Session& s) { s.append(layer, made.keys.view(), made.values.view()); }, member)) {
      length += tokens;
    }
    trim(member);
  }

  /// A call with random options.
  struct Call {
    Twins* member = nullptr;
    std::int64_t tokens = 0;
    Rows rows;
    HostTensor query;
    Picked given{1, 1, 1};
    bool gives = false, spoiled = false;
    RetrievalConfig retrieval;
    AttendOptions options{};
    struct Results {
      HostTensor out, lse;
      HostIds ids{1, 1, 1};
      std::vector<float> missed;
      bool with_ids = false, with_missed = false;
    };
    std::array<Results, 2> results;

    [[nodiscard]] AttendInputs inputs() const {
      AttendInputs inputs{.query = query.view()};
      if (gives) {
        inputs.selected = given.ids_view();
        inputs.bias = given.bias_view();
      }
      return inputs;
    }
    [[nodiscard]] DecodeInputs decode_inputs() const {
      const AttendInputs in = inputs();
      return {in.query, rows.keys.view(), rows.values.view(), in.selected, in.bias};
    }
    [[nodiscard]] AttendOutputs outputs(int engine) {
      Results& r = results[std::size_t(engine)];
      AttendOutputs out{.out = r.out.mutable_view(),
                        .lse = {r.lse.mutable_view().data, DType::kFloat32, {tokens, r.lse.n()}}};
      if (r.with_ids) out.selected = r.ids.view();
      if (r.with_missed) out.missed = {r.missed.data(), DType::kFloat32, {tokens, r.lse.n()}};
      return out;
    }
    [[nodiscard]] bool same() const {
      return results[0].out.bytes() == results[1].out.bytes() &&
             results[0].lse.bytes() == results[1].lse.bytes() &&
             results[0].ids.data == results[1].ids.data && results[0].missed == results[1].missed;
    }
  };
  void fill(Call& call, int layer, std::int64_t length) {
    const ModelConfig& model = config_.model;
    call.query = HostTensor::random(call.tokens, model.query_heads, model.head_dim, DType::kFloat32,
                                    ++seed_, 0.5F);
    if (pick(0, 3) > 0) {
      call.retrieval = methods_[std::size_t(pick(0, int(methods_.size()) - 1))];
      call.retrieval.seed = config_.retrieval.seed;
      call.options.retrieval = &call.retrieval;
    }
    const RetrievalConfig& retrieval =
        call.options.retrieval != nullptr ? call.retrieval : config_.retrieval;
    if (pick(0, 4) == 0) call.options.dense_from = pick(std::max(0, int(length) - 120), 500);
    if (pick(0, 6) == 0) call.options.mode = LayerMode::kDense;
    if (pick(0, 6) == 0 && layer != 1) call.options.logit_softcap = float(pick(0, 1)) * 5.0F;
    const bool sparse = layer != 1 && !call.options.mode;
    if (sparse && pick(0, 5) == 0) {
      call.gives = true;
      const std::array heads{1, model.kv_heads, model.query_heads};
      call.given = Picked(call.tokens, heads[std::size_t(pick(0, 2))], pick(1, 60));
      for (std::size_t i = 0; i < call.given.ids.data.size(); ++i) {
        call.given.ids.data[i] = pick(-1, int(length) + 5);
        call.given.biases[i] = 0.01F * float(pick(0, 300));
      }
    }
    const bool caps = call.options.logit_softcap.value_or(layer == 2 ? 20.0F : 0.0F) > 0.0F;
    const bool estimates =
        sparse && !call.gives && !caps && retrieval.estimator == Estimator::kNormAware &&
        retrieval.coarse_bits == 0 && retrieval.selection != Selection::kPerSequence;
    const bool with_missed = estimates && pick(0, 3) == 0;
    if (estimates && pick(0, 4) == 0) {
      call.options.recall_target = RecallTarget{.recall = 0.8, .min_top_k = 5};
    }
    const bool with_ids = pick(0, 2) == 0;
    for (Call::Results& r : call.results) {
      r.out = HostTensor(call.tokens, model.query_heads, model.head_dim,
                         seed_ % 3 == 0 ? DType::kFloat16 : DType::kFloat32);
      r.lse = HostTensor(call.tokens, 1, model.query_heads, DType::kFloat32);
      r.ids = HostIds(call.tokens, model.query_heads, kCapacity);
      r.missed.assign(std::size_t(call.tokens * model.query_heads), -7.0F);
      r.with_ids = with_ids;
      r.with_missed = with_missed;
    }
  }

  void decode(int layer) {
    std::vector<Call> calls;
    const std::size_t wanted = std::size_t(pick(1, 3));
    calls.reserve(wanted);
    const bool spoils = pick(0, 5) == 0;
    for (Twins& member : members_) {
      const std::int64_t tokens = pick(0, 4) == 0 ? pick(1, 40) : pick(1, 4);
      const std::int64_t length = member.length[std::size_t(layer)];
      if (calls.size() == wanted || pick(0, 1) == 0 || length + tokens > kCapacity) continue;
      Call& call = calls.emplace_back();
      call.member = &member;
      call.tokens = tokens;
      call.rows = rows(member, layer, tokens);
      fill(call, layer, length + tokens);
    }
    if (calls.empty()) return;
    if (spoils) {  // the last results are not finite: all is taken back
      Call& last = calls.back();
      for (std::size_t i = 0; i < last.rows.keys.values().size(); ++i) last.rows.keys.set(i, 3e37F);
      for (std::size_t i = 0; i < last.query.values().size(); ++i) last.query.set(i, 3e37F);
    }
    const auto items = [&](int engine) {
      std::vector<BatchItem> batch;
      for (Call& call : calls) {
        batch.push_back({.session = engine == 0 ? &call.member->small : &call.member->large,
                         .inputs = call.decode_inputs(),
                         .outputs = call.outputs(engine),
                         .options = call.options});
      }
      return batch;
    };
    const std::vector<BatchItem> small = items(0), large = items(1);
    if (twice([&] { small_.decode(layer, small); }, [&] { large_.decode(layer, large); }, spoils)) {
      for (Call& call : calls) {
        call.member->length[std::size_t(layer)] += call.tokens;
        call.member->odd = call.member->odd || (spoils && &call == &calls.back());
        ASSERT_TRUE(call.same()) << describe(call, layer);
      }
    }
    for (Call& call : calls) trim(*call.member);
  }
  static std::string describe(const Call& call, int layer) {
    return "layer " + std::to_string(layer) + ", tokens " + std::to_string(call.tokens) +
           ", length " + std::to_string(call.member->length[std::size_t(layer)]) + ", dense_from " +
           std::to_string(call.options.dense_from.value_or(-1)) + ", gives " +
           std::to_string(call.gives) + ", method " +
           (call.options.retrieval != nullptr ? name_of(call.retrieval) : "default") + ", error " +
           std::to_string(call.retrieval.error_target);
  }
  void attend(Twins& member, int layer) {
    const std::int64_t length = member.length[std::size_t(layer)];
    if (length == 0) return;
    Call call;
    call.member = &member;
    call.tokens = std::min<std::int64_t>(length, pick(1, 6));
    fill(call, layer, length);
    call.options.tokens_after = pick(0, int(length - call.tokens));
    if (pick(0, 1) == 0) call.options.tokens_after = 0;
    if (twice([&] { member.small.attend(layer, call.inputs(), call.outputs(0), {}, call.options); },
              [&] {
                member.large.attend(layer, call.inputs(), call.outputs(1), {}, call.options);
              })) {
      ASSERT_TRUE(call.same()) << describe(call, layer);
    }
  }
  void select(Twins& member, int layer) {
    const std::int64_t length = member.length[std::size_t(layer)];
    if (length == 0 || layer == 1) return;
    Call call;
    call.tokens = std::min<std::int64_t>(length, pick(1, 6));
    fill(call, layer, length);
    if (call.options.mode) return;
    const RetrievalConfig& retrieval =
        call.options.retrieval != nullptr ? call.retrieval : config_.retrieval;
    Picked a(call.tokens, config_.model.num_sets(retrieval.selection), length), b = a;
    const bool biased = retrieval.rule == SelectionRule::kPriority;
    if (twice(
            [&] {
              member.small.select(layer, call.query.view(), a.outputs(biased), {}, call.options);
            },
            [&] {
              member.large.select(layer, call.query.view(), b.outputs(biased), {}, call.options);
            })) {
      call.member = &member;
      ASSERT_TRUE(a == b) << describe(call, layer);
    }
  }
  void prefetch(Twins& member, int layer) {
    if (member.length[std::size_t(layer)] == 0 || layer == 1) return;
    const HostTensor query = HostTensor::random(1, config_.model.query_heads,
                                                config_.model.head_dim, DType::kFloat32, ++seed_);
    (void)both([&](Session& s) { s.prefetch(layer, query.view()); }, member);
  }
  void fetch(Twins& member, int layer) {
    if (member.length[std::size_t(layer)] == 0) return;
    std::vector<std::byte> a, b;
    if (twice([&] { a = all_rows(member.small, config_.model, layer); },
              [&] { b = all_rows(member.large, config_.model, layer); })) {
      ASSERT_TRUE(a == b) << "rows of layer " << layer;
    }
  }
  void truncate(Twins& member) {
    const int longest = int(member.longest());
    const int to = longest - pick(0, pick(0, 3) == 0 ? longest : std::min(longest, 40));
    const bool one = pick(0, 3) == 0;
    const int layer = pick(0, kLayers - 1);
    if (one && to > member.length[std::size_t(layer)]) return;
    ASSERT_TRUE(
        both([&](Session& s) { s.truncate(to, {}, one ? std::optional(layer) : std::nullopt); },
             member));
    for (int i = 0; i < kLayers; ++i) {
      std::int64_t& length = member.length[std::size_t(i)];
      if (!one || i == layer) length = std::min<std::int64_t>(length, to);
    }
    trim(member);
  }
  void change_faults() {
    const int kind = pick(0, 7);
    FaultTier::Faults faults;
    faulty_ = kind > 3;
    if (kind == 4) faults.put = TierStatus::kFull;
    if (kind == 5) faults.half = true;
    if (kind == 6) faults.good_puts = std::uint64_t(pick(0, 12));
    if (kind == 7) faults.get = TierStatus::kUnavailable;
    tier_.set(faults);
  }
  void fork(Twins& member) {
    const auto at = std::size_t(&member - members_.data());
    if (members_.size() + 1 > kMostSessions) return;
    std::vector<Session> a, b;
    ASSERT_TRUE(twice([&] { a = member.small.fork(1); }, [&] { b = member.large.fork(1); }));
    members_.push_back({std::move(a[0]), std::move(b[0]), members_[at].ids, members_[at].length,
                        members_[at].odd});
  }
  void publish(Twins& member) {
    if (member.odd) return;
    const auto ids = std::span(member.ids).first(std::size_t(member.shortest()));
    ASSERT_TRUE(both([&](Session& s) { s.publish(ids); }, member));
  }

  Config config_;
  FaultTier& tier_;
  bool faulty_ = false;  ///< The tier fails now.
  Engine small_, large_;
  std::mt19937_64 random_;
  std::uint64_t seed_;
  std::vector<RetrievalConfig> methods_;
  std::vector<Twins> members_;
};

TEST(SpillTwins, AnyCallsGiveTheSameBits) {
  constexpr int kCalls = 400;  // of a seed
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kUsualCalls = 4 * kCalls;
#else
  constexpr int kUsualCalls = 24 * kCalls;
#endif
  const int seeds = std::max(1, num_model_calls(kUsualCalls) / kCalls);
  std::uint64_t restored = 0;
  for (int seed = 1; seed <= seeds; ++seed) {
    const auto tier = std::make_shared<FaultTier>();
    SCOPED_TRACE("seed " + std::to_string(seed));
    // Enough for the always-attended tokens of a call, which an error target weighs together.
    Config small = tiered_config(Backend::kCpu, std::size_t(75 + seed * 7 % 50), tier);
    Config large = tiered_config(Backend::kCpu, kPlenty, nullptr);
    for (Config* config : {&small, &large}) {
      config->model.layers = kLayers;
      config->model.layer_options = {
          {}, {.mode = LayerMode::kSlidingWindow, .window_tokens = 90}, {.logit_softcap = 20.0F}};
      config->retrieval = priority_estimators()[1];
      config->retrieval.top_k = 0;
      config->retrieval.error_target = seed % 2 == 0 ? 0.1 : 0.0;
      if (seed % 2 == 1) config->retrieval.top_k = 60;
      config->retrieval.sink_tokens = seed % 3 * 9;
      config->retrieval.recent_tokens = 16;
      for (const RetrievalConfig& method : priority_methods()) {
        config->extra_sketches.push_back(method.sketch(config->model.head_dim));
      }
      config->memory.verify_rows = seed % 3 == 0;
      if (seed % 4 == 1) {
        config->memory.page_format = PageFormat::kInt8;
        config->memory.host_bytes /= 2;
      }
      if (seed % 2 == 0) {
        config->memory.staging_rows = 32;
        config->memory.row_cache_bytes = 1 * MiB;
        config->memory.prefetch_rows = seed % 4 == 0;
      }
    }
    RandomTwins twins(small, large, *tier, std::uint64_t(seed));
    for (int call = 0; call < kCalls; ++call) {
      twins.step();
      ASSERT_FALSE(HasFailure()) << "call " << call;
    }
    twins.finish();
    ASSERT_FALSE(HasFailure());
    restored += twins.stats().cumulative.pages_restored;
  }
  EXPECT_GT(restored, 0U);
}

}  // namespace
}  // namespace kvtier::testing
