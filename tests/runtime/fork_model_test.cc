#include "runtime/engine_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

/// Random calls on a family of sessions that fork, against a model in plain memory: what each
/// attends to, and how many pages and sketch blocks are held.
namespace kvtier::testing {
namespace {

constexpr int kLayers = 2;
constexpr std::int64_t kPageTokens = 16, kBlockTokens = 1024;
constexpr std::int64_t kCapacity = 260;
constexpr std::size_t kMostSessions = 8;

/// Frames held by a (session, layer): the identity of each, shared as the engine's are.
using Frames = std::vector<std::shared_ptr<int>>;

struct ModelLayer {
  std::vector<float> keys, values;  ///< `[tokens, 2, 64]`, as stored.
  Frames pages, blocks;
  [[nodiscard]] std::int64_t length() const {
    return static_cast<std::int64_t>(keys.size()) / (2 * 64);
  }
};

using ModelSession = std::vector<ModelLayer>;

std::int64_t frames_for(std::int64_t tokens, std::int64_t unit) {
  return (tokens + unit - 1) / unit;
}

bool tail_shared(const Frames& frames, std::int64_t length, std::int64_t unit) {
  return length % unit != 0 && frames[static_cast<std::size_t>(length / unit)].use_count() > 1;
}

void write_to(Frames& frames, std::int64_t length, std::int64_t tokens, std::int64_t unit) {
  if (tail_shared(frames, length, unit)) {
    frames[static_cast<std::size_t>(length / unit)] = std::make_shared<int>();
  }
  while (static_cast<std::int64_t>(frames.size()) < frames_for(length + tokens, unit)) {
    frames.push_back(std::make_shared<int>());
  }
}

class Model {
 public:
  explicit Model(std::size_t pages) : num_pages_(static_cast<std::int64_t>(pages)) {}

  std::vector<ModelSession> sessions;

  [[nodiscard]] std::size_t pages_used() const { return distinct(&ModelLayer::pages); }
  [[nodiscard]] std::size_t blocks_used() const { return distinct(&ModelLayer::blocks); }

  /// Makes room for more tokens; returns false with nothing changed when it is not there.
  bool grow(ModelLayer& layer, std::int64_t tokens) {
    if (tokens == 0) return true;
    if (layer.length() + tokens > kCapacity) return false;
    std::int64_t more = tail_shared(layer.pages, layer.length(), kPageTokens) ? 1 : 0;
    more += std::max<std::int64_t>(frames_for(layer.length() + tokens, kPageTokens) -
                                       static_cast<std::int64_t>(layer.pages.size()),
                                   0);
    if (static_cast<std::int64_t>(pages_used()) + more > num_pages_) return false;
    write_to(layer.pages, layer.length(), tokens, kPageTokens);
    write_to(layer.blocks, layer.length(), tokens, kBlockTokens);
    return true;
  }
  /// As `grow`, for all layers or none, the copies of shared frames apart.
  bool reserve(ModelSession& session, std::int64_t tokens) {
    std::vector<std::pair<std::size_t, std::size_t>> before;
    for (ModelLayer& layer : session) {
      before.emplace_back(layer.pages.size(), layer.blocks.size());
      if (grow(layer, tokens)) continue;
      for (std::size_t i = 0; i < before.size(); ++i) {
        session[i].pages.resize(before[i].first);
        session[i].blocks.resize(before[i].second);
      }
      return false;
    }
    return true;
  }

 private:
  [[nodiscard]] std::size_t distinct(Frames ModelLayer::*frames) const {
    std::set<const int*> seen;
    for (const ModelSession& session : sessions) {
      for (const ModelLayer& layer : session) {
        for (const auto& frame : layer.*frames) seen.insert(frame.get());
      }
    }
    return seen.size();
  }

  std::int64_t num_pages_;
};

class RandomFamily {
 public:
  RandomFamily(const Config& config, std::uint64_t seed)
      : config_(config),
        engine_(config),
        model_(engine_.stats().snapshot.pages),
        random_(seed),
        bank_(config.model, 1000, seed, DType::kBFloat16, 1),
        out_(1, config.model.query_heads, config.model.head_dim, DType::kFloat32) {
    open();
    append_to(0, 0, 20);
    block_bytes_ = engine_.stats().snapshot.sketch_bytes_used;
  }

  void step() {
    if (sessions_.empty()) open();
    const std::size_t i = static_cast<std::size_t>(pick(0, static_cast<int>(sessions_.size()) - 1));
    const int layer = pick(0, kLayers - 1);
    const int verb = pick(0, 99);
    if (verb < 40) {
      append_to(i, layer, pick(0, 9) == 0 ? pick(40, 120) : pick(1, 20));
    } else if (verb < 52) {
      truncate(i);
    } else if (verb < 58) {
      reserve(i);
    } else if (verb < 68) {
      fork(i);
    } else if (verb < 78) {
      close(i);
    } else {
      attend(i, layer);
    }
    const Stats::Snapshot now = engine_.stats().snapshot;
    ASSERT_EQ(now.pages_used, model_.pages_used());
    ASSERT_EQ(now.sketch_bytes_used, model_.blocks_used() * block_bytes_);
    ASSERT_EQ(now.sessions, sessions_.size());
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  ModelLayer& layer_of(std::size_t i, int layer) {
    return model_.sessions[i][static_cast<std::size_t>(layer)];
  }
  static void expect_exhausted(const std::optional<Error>& error, bool exhausted) {
    ASSERT_EQ(error.has_value(), exhausted) << (error ? error->what() : "no error");
    if (error) {
      ASSERT_EQ(error->code(), ErrorCode::kResourceExhausted) << error->what();
    }
  }

  void open() {
    sessions_.push_back(engine_.open({.capacity_tokens = kCapacity}));
    model_.sessions.emplace_back(kLayers);
  }
  void append_to(std::size_t i, int layer, std::int64_t tokens) {
    const std::int64_t first = pick(0, static_cast<int>(bank_.key.tokens() - tokens));
    ModelLayer& expected = layer_of(i, layer);
    const bool fits = model_.grow(expected, tokens);
    expect_exhausted(error_of([&] {
                       sessions_[i].append(layer, bank_.key.view(first, tokens),
                                           bank_.value.view(first, tokens));
                     }),
                     !fits);
    if (!fits) return;
    const auto copy = [&](const HostTensor& from, std::vector<float>& to) {
      const auto begin = from.values().begin() + first * 2 * 64;
      to.insert(to.end(), begin, begin + tokens * 2 * 64);
    };
    copy(bank_.key, expected.keys);
    copy(bank_.value, expected.values);
    ASSERT_EQ(sessions_[i].length(layer), expected.length());
  }
  void truncate(std::size_t i) {
    const std::int64_t longest = std::max(layer_of(i, 0).length(), layer_of(i, 1).length());
    const int most =
        static_cast<int>(pick(0, 3) == 0 ? longest : std::min<std::int64_t>(longest, 50));
    const std::int64_t tokens = longest - pick(0, most);
    sessions_[i].truncate(tokens);
    for (ModelLayer& layer : model_.sessions[i]) {
      if (layer.length() <= tokens) continue;
      layer.keys.resize(static_cast<std::size_t>(tokens) * 2 * 64);
      layer.values.resize(static_cast<std::size_t>(tokens) * 2 * 64);
      layer.pages.resize(static_cast<std::size_t>(frames_for(tokens, kPageTokens)));
      layer.blocks.resize(static_cast<std::size_t>(frames_for(tokens, kBlockTokens)));
    }
  }
  void reserve(std::size_t i) {
    const std::int64_t tokens = pick(0, 60);
    const bool fits = model_.reserve(model_.sessions[i], tokens);
    expect_exhausted(error_of([&] { sessions_[i].reserve(tokens); }), !fits);
  }
  void fork(std::size_t i) {
    const int count = pick(1, 3);
    if (sessions_.size() + static_cast<std::size_t>(count) > kMostSessions) return close(i);
    for (Session& child : sessions_[i].fork(count)) {
      sessions_.push_back(std::move(child));
      model_.sessions.push_back(model_.sessions[i]);
      // What the parent has reserved stays its own.
      for (ModelLayer& layer : model_.sessions.back()) {
        layer.pages.resize(static_cast<std::size_t>(frames_for(layer.length(), kPageTokens)));
        layer.blocks.resize(static_cast<std::size_t>(frames_for(layer.length(), kBlockTokens)));
      }
    }
  }
  void close(std::size_t i) {
    sessions_.erase(sessions_.begin() + static_cast<std::ptrdiff_t>(i));
    model_.sessions.erase(model_.sessions.begin() + static_cast<std::ptrdiff_t>(i));
  }
  /// Dense attention, or sparse with room for every token, of one query.
  void attend(std::size_t i, int layer) {
    const ModelLayer& expected = layer_of(i, layer);
    const std::int64_t length = expected.length();
    if (length == 0) return;
    const std::int64_t token = pick(0, static_cast<int>(bank_.query.tokens()) - 1);
    const LayerMode mode = pick(0, 1) == 0 ? LayerMode::kDense : LayerMode::kSparse;
    sessions_[i].attend(layer, {.query = bank_.query.view(token, 1)}, {.out = out_.mutable_view()},
                        {}, {.mode = mode});
    std::vector<std::int64_t> visible(static_cast<std::size_t>(length));
    std::iota(visible.begin(), visible.end(), 0);
    for (int h = 0; h < 4; ++h) {
      const oracle::Attention attention =
          oracle::attend(bank_.query.row(token, h),
                         kv_view(expected.keys, expected.values, 2, 64, h / 2), visible, 1.0 / 8.0);
      // Rounding of fp32 sums over a few hundred terms.
      ASSERT_LT(oracle::relative_error(out_.row(0, h), attention.out), 2e-5)
          << "head " << h << " of length " << length;
    }
  }

  Config config_;
  Engine engine_;
  std::vector<Session> sessions_;
  Model model_;
  std::mt19937_64 random_;
  CallTensors bank_;  ///< Tokens and queries are taken from it.
  HostTensor out_;
  std::size_t block_bytes_ = 0;
};

class ForkModelTest : public EngineTest {};

/// Calls per seed: fewer where each costs a kernel's launch, or is instrumented.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCalls = 3'000;
#else
constexpr int kCalls = 50'000;
#endif

TEST_P(ForkModelTest, RandomCallsOnForkedSessionsAgreeWithAModel) {
  Config config = this->config();
  config.model.layers = kLayers;
  config.memory.page_tokens = kPageTokens;
  config.memory.host_bytes = 60 * kPageTokens * 512;  // too few for what is asked for
  config.memory.max_session_tokens = 512;
  config.retrieval.top_k = 512;
  config.retrieval.sink_tokens = 5;
  config.retrieval.recent_tokens = 13;
  const int calls = GetParam() == Backend::kCuda ? 20'000 : kCalls;
  for (const std::uint64_t seed : {1U, 2U}) {
    RandomFamily family(config, seed * 10'000'000);
    for (int i = 0; i < calls; ++i) {
      ASSERT_NO_FATAL_FAILURE(family.step()) << "seed " << seed << " call " << i;
      if (HasFailure()) return;
    }
  }
}

KVTIER_INSTANTIATE_BACKENDS(ForkModelTest);

}  // namespace
}  // namespace kvtier::testing
