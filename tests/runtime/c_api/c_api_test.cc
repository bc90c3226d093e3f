#include "kvtier/kvtier.h"

#include "runtime/c_api/c_api_compiles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

/// The C ABI, by its header alone; tests/runtime/c_api/c_api_equality_test.cc compares it with the
/// C++ API.
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr kvtier_stream kNoStream = {0, nullptr};

struct EngineDeleter {
  void operator()(kvtier_engine* engine) const { kvtier_engine_destroy(engine); }
};
struct SessionDeleter {
  void operator()(kvtier_session* session) const { kvtier_session_close(session); }
};
using EnginePtr = std::unique_ptr<kvtier_engine, EngineDeleter>;
using SessionPtr = std::unique_ptr<kvtier_session, SessionDeleter>;

kvtier_config small_config() {
  kvtier_config config;
  kvtier_config_init(&config);
  config.query_heads = 2;
  config.head_dim = 64;
  config.host_bytes = 1 << 20;  // 64 pages
  config.device_bytes = 64 << 20;
  config.max_session_tokens = 2048;
  config.backend = KVTIER_BACKEND_CPU;
  config.retrieval.top_k = 32;
  config.retrieval.sink_tokens = 8;
  config.retrieval.recent_tokens = 8;
  return config;
}

EnginePtr make_engine(const kvtier_config& config = small_config()) {
  kvtier_engine* engine = nullptr;
  EXPECT_EQ(kvtier_engine_create(&config, &engine), KVTIER_OK) << kvtier_last_error();
  return EnginePtr(engine);
}

SessionPtr open_session(const EnginePtr& engine, std::int64_t capacity = 0) {
  kvtier_session* session = nullptr;
  EXPECT_EQ(kvtier_session_open(engine.get(), capacity, &session), KVTIER_OK)
      << kvtier_last_error();
  return SessionPtr(session);
}

/// fp32 elements and a tensor over them, its strides left to the library.
struct Floats {
  Floats(std::vector<std::int64_t> shape, unsigned seed) {
    std::size_t count = 1;
    tensor.dtype = KVTIER_FP32;
    tensor.rank = static_cast<std::int32_t>(shape.size());
    for (std::size_t i = 0; i < shape.size(); ++i) {
      tensor.shape[i] = shape[i];
      count *= static_cast<std::size_t>(shape[i]);
    }
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    values.resize(count);
    for (float& value : values) value = normal(random);
    tensor.data = values.data();
  }
  Floats(const Floats&) = delete;  // the tensor points to the values
  Floats& operator=(const Floats&) = delete;

  std::vector<float> values;
  kvtier_tensor tensor{};
};

struct Step {
  explicit Step(std::int64_t tokens, unsigned seed = 1)
      : query({tokens, 2, 64}, seed),
        key({tokens, 1, 64}, seed + 1),
        value({tokens, 1, 64}, seed + 2),
        out({tokens, 2, 64}, 0),
        lse({tokens, 2}, 0) {
    kvtier_attend_args_init(&args);
    args.query = query.tensor;
    args.key = key.tensor;
    args.value = value.tensor;
    args.out = out.tensor;
    args.lse = lse.tensor;
  }
  Floats query, key, value, out, lse;
  kvtier_attend_args args{};
};

void fill(const SessionPtr& session, std::int64_t tokens) {
  const Step step(tokens, 50);
  ASSERT_EQ(
      kvtier_session_append(session.get(), 0, &step.key.tensor, &step.value.tensor, kNoStream),
      KVTIER_OK)
      << kvtier_last_error();
}

std::int64_t length_of(const SessionPtr& session) {
  std::int64_t tokens = -1;
  EXPECT_EQ(kvtier_session_length(session.get(), 0, &tokens), KVTIER_OK);
  return tokens;
}

TEST(CApi, IsC) {
  std::vector<float> out(64, 0.0F);
  EXPECT_EQ(c_round_trip(KVTIER_BACKEND_CPU, out.data()), KVTIER_OK) << kvtier_last_error();
  double sum = 0.0;
  for (const float x : out) {
    EXPECT_LE(std::abs(x), 1.0F);  // an average of values that are all 1 or -1
    sum += std::abs(static_cast<double>(x));
  }
  EXPECT_GT(sum, 0.0);
}

TEST(CApi, KnowsItsVersion) { EXPECT_STREQ(kvtier_version(), KVTIER_TEST_PROJECT_VERSION); }

TEST(CApi, NamesEveryStatus) {
  const std::vector<std::pair<kvtier_status, std::string>> names = {
      {KVTIER_OK, "OK"},
      {KVTIER_CANCELLED, "CANCELLED"},
      {KVTIER_INVALID_ARGUMENT, "INVALID_ARGUMENT"},
      {KVTIER_DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"},
      {KVTIER_NOT_FOUND, "NOT_FOUND"},
      {KVTIER_RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"},
      {KVTIER_FAILED_PRECONDITION, "FAILED_PRECONDITION"},
      {KVTIER_ABORTED, "ABORTED"},
      {KVTIER_UNIMPLEMENTED, "UNIMPLEMENTED"},
      {KVTIER_INTERNAL, "INTERNAL"},
      {KVTIER_UNAVAILABLE, "UNAVAILABLE"},
      {KVTIER_DATA_LOSS, "DATA_LOSS"}};
  for (const auto& [status, name] : names) EXPECT_EQ(kvtier_status_name(status), name);
  for (const int number : {7, 16, 259, -1}) {  // 259 is 3 in eight bits
    EXPECT_STREQ(c_status_name(number), "UNKNOWN") << number;
  }
}

TEST(CApi, EachKindOfFailureHasItsStatus) {
  const EnginePtr engine = make_engine();
  const SessionPtr session = open_session(engine);
  Step step(1);

  EXPECT_EQ(kvtier_session_attend(session.get(), 0, &step.args, kNoStream),
            KVTIER_FAILED_PRECONDITION);
  EXPECT_THAT(kvtier_last_error(), HasSubstr("empty layer"));
  EXPECT_EQ(kvtier_session_decode(session.get(), 1, &step.args, kNoStream),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_THAT(kvtier_last_error(), StartsWith("layer: expected 0..0, found 1"));
  EXPECT_EQ(kvtier_session_reserve(session.get(), 2049, kNoStream), KVTIER_RESOURCE_EXHAUSTED);
  EXPECT_EQ(kvtier_session_truncate(session.get(), 1, kNoStream), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(kvtier_session_advance(session.get(), 0, 1), KVTIER_INVALID_ARGUMENT);
  kvtier_session* none = nullptr;
  EXPECT_EQ(kvtier_session_open(engine.get(), 4096, &none), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
  const kvtier_stream stream = {1, &step};
  EXPECT_EQ(kvtier_session_reserve(session.get(), 1, stream), KVTIER_INVALID_ARGUMENT);
  EXPECT_THAT(kvtier_last_error(), HasSubstr("CPU backend"));
  step.key.values[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(kvtier_session_decode(session.get(), 0, &step.args, kNoStream),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_THAT(kvtier_last_error(), HasSubstr("NaN"));
  EXPECT_EQ(length_of(session), 0);

  kvtier_config config = small_config();
  config.backend = KVTIER_BACKEND_CUDA;
  kvtier_engine* cuda = nullptr;
  const kvtier_status status = kvtier_engine_create(&config, &cuda);
  if (status != KVTIER_OK) {
    EXPECT_EQ(status, KVTIER_UNIMPLEMENTED);
    EXPECT_EQ(cuda, nullptr);
  }
  kvtier_engine_destroy(cuda);
}

TEST(CApi, AConfigurationIsCheckedByTheCppApi) {
  kvtier_config config = small_config();
  config.head_dim = 65;
  config.retrieval.top_k = -1;
  kvtier_engine* engine = nullptr;

  EXPECT_EQ(kvtier_engine_create(&config, &engine), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(engine, nullptr);
  EXPECT_THAT(kvtier_last_error(), HasSubstr("found 2 problems"));
  EXPECT_THAT(kvtier_last_error(), HasSubstr("model.head_dim"));
}

TEST(CApi, RefusesStructSizesItDoesNotKnow) {
  const EnginePtr engine = make_engine();
  const SessionPtr session = open_session(engine);
  fill(session, 10);
  for (const std::ptrdiff_t change : {-8, 8}) {
    const auto changed = [&](std::size_t size) {
      return static_cast<std::size_t>(static_cast<std::ptrdiff_t>(size) + change);
    };
    const auto expect_refused = [&](kvtier_status status, const std::string& name) {
      EXPECT_EQ(status, KVTIER_INVALID_ARGUMENT);
      EXPECT_THAT(kvtier_last_error(), StartsWith(name + ".struct_size: expected "));
    };
    kvtier_engine* none = nullptr;
    kvtier_config config = small_config();
    config.struct_size = changed(config.struct_size);
    expect_refused(kvtier_engine_create(&config, &none), "kvtier_config");
    config = small_config();
    config.retrieval.struct_size = changed(config.retrieval.struct_size);
    expect_refused(kvtier_engine_create(&config, &none), "kvtier_retrieval_config");
    EXPECT_EQ(none, nullptr);

    Step step(1);
    step.args.struct_size = changed(step.args.struct_size);
    expect_refused(kvtier_session_decode(session.get(), 0, &step.args, kNoStream),
                   "kvtier_attend_args");
    kvtier_attend_args_init(&step.args);
    kvtier_options options;
    kvtier_options_init(&options);
    options.struct_size = changed(options.struct_size);
    step.args.options = &options;
    expect_refused(kvtier_session_decode(session.get(), 0, &step.args, kNoStream),
                   "kvtier_options");
    kvtier_stats stats{};
    stats.struct_size = change > 0 ? changed(sizeof(stats)) : sizeof(stats.struct_size) - 1;
    expect_refused(kvtier_engine_stats(engine.get(), &stats), "kvtier_stats");
  }
  EXPECT_EQ(length_of(session), 10);
}

TEST(CApi, StatisticsFillTheCallersSize) {
  const EnginePtr engine = make_engine();
  const SessionPtr session = open_session(engine);
  fill(session, 100);
  kvtier_stats full;
  std::memset(&full, 0xA5, sizeof(full));
  full.struct_size = sizeof(full);
  ASSERT_EQ(kvtier_engine_stats(engine.get(), &full), KVTIER_OK);
  EXPECT_EQ(full.struct_size, sizeof(full));
  EXPECT_EQ(full.tokens_appended, 100U);
  EXPECT_EQ(full.sessions, 1U);
  EXPECT_EQ(full.pages, 64U);
  EXPECT_EQ(full.pages_used, 2U);
  EXPECT_EQ(full.host_page_bytes_used, 2U * 64 * 256);

  kvtier_stats brief;
  std::memset(&brief, 0xA5, sizeof(brief));
  brief.struct_size = offsetof(kvtier_stats, rows_selected);
  ASSERT_EQ(kvtier_engine_stats(engine.get(), &brief), KVTIER_OK);
  EXPECT_EQ(brief.struct_size, offsetof(kvtier_stats, rows_selected));
  EXPECT_EQ(brief.tokens_appended, 100U);
  EXPECT_EQ(brief.queries, 0U);
  EXPECT_EQ(brief.rows_selected, 0xA5A5A5A5A5A5A5A5U);
  EXPECT_EQ(brief.pages_used, 0xA5A5A5A5A5A5A5A5U);
}

TEST(CApi, TheRowCacheIsConfiguredAndCounted) {
  kvtier_config config = small_config();
  config.staging_rows = 64;  // without, the CPU reads rows in place
  config.row_cache_bytes = 1 << 20;
  config.row_cache_rows = 64;
  config.row_cache_policy = KVTIER_ROW_CACHE_LRU;
  {
    const EnginePtr engine = make_engine(config);
    const SessionPtr session = open_session(engine);
    fill(session, 300);
    const Step step(1);
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(kvtier_session_attend(session.get(), 0, &step.args, kNoStream), KVTIER_OK);
    }
    kvtier_stats stats{};
    stats.struct_size = sizeof(stats);
    ASSERT_EQ(kvtier_engine_stats(engine.get(), &stats), KVTIER_OK);
    EXPECT_GT(stats.row_cache_misses, 24U);  // of 32 rows, some of which are in the ring
    EXPECT_EQ(stats.row_cache_hits, stats.row_cache_misses);
    EXPECT_EQ(stats.row_cache_admissions, stats.row_cache_misses);
    EXPECT_EQ(stats.row_cache_evictions, 0U);
    EXPECT_GT(stats.row_cache_bytes_used, 64U * 256);
    EXPECT_GE(stats.row_cache_bytes, stats.row_cache_bytes_used);
  }
  std::memset(&config.row_cache_policy, 0x7F, sizeof(config.row_cache_policy));  // as C may set it
  kvtier_engine* none = nullptr;
  EXPECT_EQ(kvtier_engine_create(&config, &none), KVTIER_INVALID_ARGUMENT);
  EXPECT_THAT(kvtier_last_error(), HasSubstr("row_cache_policy"));
}

TEST(CApi, StatisticsOfTiersAreThoseOfTheDiskCache) {
  std::string folder = ::testing::TempDir() + "kvtier-c-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  kvtier_config config = small_config();
  config.host_bytes = std::uint64_t{8} * 64 * 256;
  config.disk_cache = folder.c_str();
  config.disk_cache_bytes = std::uint64_t{16} << 20;
  kvtier_engine* made = nullptr;
  ASSERT_EQ(kvtier_engine_create(&config, &made), KVTIER_OK) << kvtier_last_error();
  {
    const EnginePtr engine(made);
    const SessionPtr session = open_session(engine);
    for (int i = 0; i < 10; ++i) fill(session, 100);  // 16 pages, in 8 frames
    kvtier_stats all;
    all.struct_size = sizeof(all);
    ASSERT_EQ(kvtier_engine_stats(engine.get(), &all), KVTIER_OK);
    EXPECT_EQ(all.num_tiers, 1U);
    kvtier_tier_stats tier;
    std::memset(&tier, 0xA5, sizeof(tier));
    tier.struct_size = sizeof(tier);
    ASSERT_EQ(kvtier_engine_tier_stats(engine.get(), 0, &tier), KVTIER_OK);
    EXPECT_STREQ(tier.kind, "file");
    EXPECT_GE(tier.stored, 8U);
    EXPECT_EQ(tier.puts, tier.stored);
    EXPECT_EQ(tier.bytes_written, all.tier_bytes_written);
    EXPECT_EQ(tier.servers, 0U);
    EXPECT_GT(std::accumulate(std::begin(tier.put_counts), std::end(tier.put_counts), 0ULL), 0U);

    tier.struct_size = offsetof(kvtier_tier_stats, puts);
    tier.puts = 77;
    ASSERT_EQ(kvtier_engine_tier_stats(engine.get(), 0, &tier), KVTIER_OK);
    EXPECT_EQ(tier.puts, 77U);
    tier.struct_size = sizeof(tier) + 8;
    EXPECT_EQ(kvtier_engine_tier_stats(engine.get(), 0, &tier), KVTIER_INVALID_ARGUMENT);
    tier.struct_size = sizeof(tier);
    EXPECT_EQ(kvtier_engine_tier_stats(engine.get(), 1, &tier), KVTIER_INVALID_ARGUMENT);
    EXPECT_THAT(kvtier_last_error(), HasSubstr("expected one of 1 tiers, found 1"));
  }
  std::filesystem::remove_all(folder);
}

TEST(CApi, RefusesNullPointers) {
  const EnginePtr engine = make_engine();
  const SessionPtr session = open_session(engine);
  fill(session, 10);
  Step step(1);
  const kvtier_config config = small_config();
  kvtier_engine* none = nullptr;
  kvtier_session* no_session = nullptr;
  kvtier_stats stats{};
  stats.struct_size = sizeof(stats);
  std::int64_t tokens = 0;
  const kvtier_tensor* k = &step.key.tensor;
  const kvtier_tensor* q = &step.query.tensor;
  const kvtier_batch_item no_args = {session.get(), nullptr};
  const kvtier_batch_item no_item_session = {nullptr, &step.args};

  const auto expect_refused = [](kvtier_status status, const std::string& part) {
    EXPECT_EQ(status, KVTIER_INVALID_ARGUMENT);
    EXPECT_THAT(kvtier_last_error(), HasSubstr(part));
    EXPECT_THAT(kvtier_last_error(), HasSubstr("expected"));
  };
  expect_refused(kvtier_engine_create(nullptr, &none), "config");
  expect_refused(kvtier_engine_create(&config, nullptr), "engine");
  expect_refused(kvtier_engine_stats(nullptr, &stats), "engine");
  expect_refused(kvtier_engine_stats(engine.get(), nullptr), "stats");
  expect_refused(kvtier_engine_decode(nullptr, 0, nullptr, 0, kNoStream), "engine");
  expect_refused(kvtier_engine_decode(engine.get(), 0, nullptr, 1, kNoStream), "items");
  expect_refused(kvtier_engine_decode(engine.get(), 0, &no_args, 1, kNoStream), "args");
  expect_refused(kvtier_engine_decode(engine.get(), 0, &no_item_session, 1, kNoStream), "session");
  expect_refused(kvtier_engine_merge(nullptr, q, q, 1, q, nullptr, kNoStream), "engine");
  expect_refused(kvtier_engine_merge(engine.get(), nullptr, q, 1, q, nullptr, kNoStream), "outs");
  expect_refused(kvtier_engine_merge(engine.get(), q, nullptr, 1, q, nullptr, kNoStream), "lses");
  expect_refused(kvtier_engine_merge(engine.get(), q, q, 1, nullptr, nullptr, kNoStream), "out");
  expect_refused(kvtier_session_open(nullptr, 0, &no_session), "engine");
  expect_refused(kvtier_session_open(engine.get(), 0, nullptr), "session");
  expect_refused(kvtier_session_append(nullptr, 0, k, k, kNoStream), "session");
  expect_refused(kvtier_session_append(session.get(), 0, nullptr, k, kNoStream), "keys");
  expect_refused(kvtier_session_append(session.get(), 0, k, nullptr, kNoStream), "values");
  expect_refused(kvtier_session_reserve(nullptr, 1, kNoStream), "session");
  expect_refused(kvtier_session_select(nullptr, 0, q, q, nullptr, nullptr, nullptr, kNoStream),
                 "session");
  expect_refused(
      kvtier_session_select(session.get(), 0, nullptr, q, nullptr, nullptr, nullptr, kNoStream),
      "query");
  expect_refused(
      kvtier_session_select(session.get(), 0, q, nullptr, nullptr, nullptr, nullptr, kNoStream),
      "ids");
  expect_refused(kvtier_session_attend(nullptr, 0, &step.args, kNoStream), "session");
  expect_refused(kvtier_session_attend(session.get(), 0, nullptr, kNoStream), "args");
  expect_refused(kvtier_session_decode(nullptr, 0, &step.args, kNoStream), "session");
  expect_refused(kvtier_session_decode(session.get(), 0, nullptr, kNoStream), "args");
  expect_refused(kvtier_session_fetch(nullptr, 0, k, k, k), "session");
  expect_refused(kvtier_session_fetch(session.get(), 0, nullptr, k, k), "tokens");
  expect_refused(kvtier_session_fetch(session.get(), 0, k, nullptr, k), "keys");
  expect_refused(kvtier_session_fetch(session.get(), 0, k, k, nullptr), "values");
  expect_refused(kvtier_session_length(nullptr, 0, &tokens), "session");
  expect_refused(kvtier_session_length(session.get(), 0, nullptr), "tokens");
  expect_refused(kvtier_session_truncate(nullptr, 0, kNoStream), "session");
  kvtier_session* child = nullptr;
  kvtier_prefix prefix{};
  expect_refused(kvtier_session_open_prefix(engine.get(), 0, &prefix, &child), "kvtier_prefix");
  prefix.struct_size = sizeof(prefix);
  expect_refused(kvtier_session_open_prefix(nullptr, 0, &prefix, &child), "engine");
  expect_refused(kvtier_session_open_prefix(engine.get(), 0, nullptr, &child), "prefix");
  expect_refused(kvtier_session_open_prefix(engine.get(), 0, &prefix, nullptr), "session");
  prefix.num_token_ids = 1;
  expect_refused(kvtier_session_open_prefix(engine.get(), 0, &prefix, &child), "token_ids");
  prefix.num_token_ids = 0;
  prefix.tenant_secret_bytes = 1;
  expect_refused(kvtier_session_open_prefix(engine.get(), 0, &prefix, &child), "tenant_secret");
  expect_refused(kvtier_session_publish(nullptr, nullptr, 0, kNoStream), "session");
  expect_refused(kvtier_session_publish(session.get(), nullptr, 1, kNoStream), "token_ids");
  expect_refused(kvtier_session_fork(nullptr, 1, &child, kNoStream), "session");
  expect_refused(kvtier_session_fork(session.get(), 1, nullptr, kNoStream), "children");
  EXPECT_EQ(kvtier_session_fork(session.get(), 0, &child, kNoStream), KVTIER_INVALID_ARGUMENT);
  EXPECT_EQ(child, nullptr);
  expect_refused(kvtier_session_advance(nullptr, 0, 0), "session");
  kvtier_engine_destroy(nullptr);
  kvtier_session_close(nullptr);
  EXPECT_EQ(kvtier_engine_backend(nullptr), KVTIER_BACKEND_AUTO);
  ASSERT_EQ(kvtier_engine_stats(engine.get(), &stats), KVTIER_OK);
  EXPECT_EQ(stats.sessions, 1U) << "a refused open leaves no session behind";
  EXPECT_EQ(length_of(session), 10);
}

TEST(CApi, RefusesUnknownEnumerators) {
  kvtier_engine* none = nullptr;
  const auto expect_refused = [&](auto spoil, const std::string& part) {
    kvtier_config config = small_config();
    spoil(config);
    EXPECT_EQ(kvtier_engine_create(&config, &none), KVTIER_INVALID_ARGUMENT);
    EXPECT_THAT(kvtier_last_error(), HasSubstr(part));
  };
  const auto set = [](auto& field, int value) { std::memcpy(&field, &value, sizeof(value)); };
  expect_refused([&](kvtier_config& c) { set(c.kv_dtype, 4); }, "kv_dtype: expected 0..3, found 4");
  expect_refused([&](kvtier_config& c) { set(c.placement, 2); }, "placement");
  expect_refused([&](kvtier_config& c) { set(c.backend, 3); }, "backend");
  expect_refused([&](kvtier_config& c) { set(c.retrieval.plane_kind, 2); }, "plane kind");
  kvtier_layer_config layer = {KVTIER_LAYER_SPARSE, 0, 0.0F, 0.0F};
  set(layer.mode, 3);
  expect_refused([&](kvtier_config& c) { c.layer_options = &layer; }, "layer_options.mode");

  const EnginePtr engine = make_engine();
  const SessionPtr session = open_session(engine);
  Step step(1);
  set(step.args.query.dtype, 9);
  EXPECT_EQ(kvtier_session_decode(session.get(), 0, &step.args, kNoStream),
            KVTIER_INVALID_ARGUMENT);
  step.args.query = step.query.tensor;
  step.args.query.rank = 5;
  EXPECT_EQ(kvtier_session_decode(session.get(), 0, &step.args, kNoStream),
            KVTIER_INVALID_ARGUMENT);
  EXPECT_THAT(kvtier_last_error(), HasSubstr("query.rank: expected 1..4, found 5"));
  EXPECT_EQ(length_of(session), 0);
}

TEST(CApi, TheLastErrorBelongsToItsThread) {
  const EnginePtr engine = make_engine();
  EXPECT_EQ(kvtier_session_open(engine.get(), -7, nullptr), KVTIER_INVALID_ARGUMENT);
  const std::string here = kvtier_last_error();
  std::string before, after;
  std::thread([&] {
    before = kvtier_last_error();
    (void)kvtier_engine_create(nullptr, nullptr);
    after = kvtier_last_error();
  }).join();

  EXPECT_EQ(before, "");
  EXPECT_THAT(after, HasSubstr("engine"));
  EXPECT_NE(after, here);
  EXPECT_EQ(kvtier_last_error(), here);
}

TEST(CApi, SessionsOutliveTheirEngine) {
  EnginePtr engine = make_engine();
  const SessionPtr session = open_session(engine);
  engine.reset();
  fill(session, 100);
  Step step(1);
  EXPECT_EQ(kvtier_session_decode(session.get(), 0, &step.args, kNoStream), KVTIER_OK)
      << kvtier_last_error();
  EXPECT_EQ(length_of(session), 101);
}

TEST(CApi, MessagesReachTheLog) {
  std::vector<std::string> messages;
  kvtier_config config = small_config();
  config.log_context = &messages;
  config.log = [](void* context, std::int32_t, const char* message) {
    static_cast<std::vector<std::string>*>(context)->emplace_back(message);
  };
  const EnginePtr engine = make_engine(config);
  EXPECT_THAT(messages, ::testing::Contains(HasSubstr("engine ready")));
}

}  // namespace
