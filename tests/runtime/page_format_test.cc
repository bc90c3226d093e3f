#include "runtime/engine_fixture.h"
#include "runtime/rejection_fixture.h"
#include "runtime/spill_fixture.h"
#include "transfer/kv/int8.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <string>
#include <utility>

/// Pages with rows in int8. An engine that is given rows which int8 has rounded already, and keeps
/// bf16, is what they are compared with: both attend to the same numbers.
namespace kvtier::testing {
namespace {

constexpr std::int64_t kStored = 300;

/// Rounds every row of one half as pages do.
HostTensor rounded(const HostTensor& given) {
  HostTensor result = given;
  const auto d = static_cast<std::size_t>(given.n());
  for (std::size_t begin = 0; begin < given.values().size(); begin += d) {
    float largest = 0.0F;
    for (std::size_t x = begin; x < begin + d; ++x) {
      largest = std::max(largest, std::fabs(given.values()[x]));
    }
    const float scale = transfer::int8_scale(largest);
    for (std::size_t x = begin; x < begin + d; ++x) {
      result.set(x, transfer::to_int8(given.values()[x], 1.0F / scale) * scale);
    }
  }
  return result;
}

class PageFormatTest : public EngineTest {
 protected:
  [[nodiscard]] Config int8() const {
    Config config = this->config();
    config.memory.page_format = PageFormat::kInt8;
    config.retrieval.sink_tokens = 5;
    config.retrieval.recent_tokens = 20;
    return config;
  }
  [[nodiscard]] Config plain() const {
    Config config = int8();
    config.memory.page_format = PageFormat::kModel;
    return config;
  }
  struct Rows {
    HostTensor keys, values;
  };
  [[nodiscard]] Rows rows_of(const ModelConfig& model, std::uint64_t seed,
                             std::int64_t tokens = kStored) const {
    return {HostTensor::random(tokens, model.kv_heads, model.head_dim, DType::kBFloat16, seed),
            HostTensor::random(tokens, model.kv_heads, model.head_dim, DType::kBFloat16, seed + 1,
                               0.01F)};
  }
  static void append(Session& session, const Rows& rows) {
    session.append(0, rows.keys.view(), rows.values.view());
  }
};

TEST_P(PageFormatTest, RowsAreThoseThatWereRounded) {
  Engine engine(int8()), twin(plain());
  Session session = engine.open(), other = twin.open();
  const Rows rows = rows_of(engine.config().model, 3);
  append(session, rows);
  append(other, {rounded(rows.keys), rounded(rows.values)});
  EXPECT_EQ(all_rows(session, engine.config().model, 0), all_rows(other, engine.config().model, 0));
}

// Short appends, middling and long ones take different kernels.
TEST_P(PageFormatTest, EveryAppendRoundsAsTheCpuDoes) {
  for (const int head_dim : {64, 96, 128, 256}) {
    SCOPED_TRACE(head_dim);
    Config here = int8();
    here.model.head_dim = head_dim;
    here.reject_nonfinite = false;
    Config there = here;
    there.backend = Backend::kCpu;
    Engine engine(here), twin(there);
    Session session = engine.open(), other = twin.open();
    std::uint64_t seed = 20;
    for (const std::int64_t tokens : {1, 5, 130, 2100, 1, 7}) {
      Rows rows = rows_of(here.model, ++seed, tokens);
      const auto d = static_cast<std::size_t>(head_dim);
      for (std::size_t x = 0; x < d; ++x) {  // of one key: numbers that become 0
        rows.keys.set(x, rows.keys.values()[x] * (x % 2 == 0 ? 0x1p-9F : 300.0F));
      }
      if (tokens > 4) {
        rows.keys.set(3 * d + 1, std::numeric_limits<float>::infinity());
        rows.values.set(6 * d + 2, std::numeric_limits<float>::quiet_NaN());
        for (std::size_t x = 8 * d; x < 9 * d; ++x) rows.values.set(x, 0x1p-126F);
      }
      append(session, rows);
      append(other, rows);
    }
    EXPECT_EQ(all_rows(session, here.model, 0), all_rows(other, here.model, 0));
    EXPECT_EQ(engine.stats().cumulative.nonfinite_tokens, twin.stats().cumulative.nonfinite_tokens);
  }
}

TEST_P(PageFormatTest, AttendsToRoundedRowsOfEveryShape) {
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const int group : {1, 4, 12}) {
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + ", group " + std::to_string(group));
      Config narrow = int8();
      narrow.model.head_dim = head_dim;
      narrow.model.query_heads = group * narrow.model.kv_heads;
      narrow.memory.placement = group == 1 ? KvPlacement::kHost : KvPlacement::kDevice;
      Config wide = narrow;
      wide.memory.page_format = PageFormat::kModel;
      Engine engine(narrow), twin(wide);
      Session session = engine.open(), other = twin.open();
      const Rows rows = rows_of(narrow.model, 3);
      append(session, rows);
      append(other, {rounded(rows.keys), rounded(rows.values)});
      for (const LayerMode mode : {LayerMode::kDense, LayerMode::kSparse}) {
        CallTensors a(narrow.model, 3, 9), b(narrow.model, 3, 9);
        HostIds ids(3, narrow.model.query_heads, 40);
        for (std::size_t i = 0; i < ids.data.size(); ++i) {
          ids.data[i] = static_cast<std::int32_t>(i * 37 % kStored);
        }
        AttendInputs inputs = a.attend_inputs();
        if (mode == LayerMode::kSparse) inputs.selected = ids.view();
        session.attend(0, inputs, a.outputs(), {}, {.mode = mode});
        other.attend(0, inputs, b.outputs(), {}, {.mode = mode});
        EXPECT_EQ(a.out.bytes(), b.out.bytes());
        EXPECT_EQ(a.lse.bytes(), b.lse.bytes());
      }
    }
  }
}

TEST_P(PageFormatTest, AttendsToRoundedRowsInEveryPlace) {
  for (const KvPlacement placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
    for (const int staging_rows : {0, 7, 1000}) {
      Config narrow = int8(), wide = plain();
      for (Config* config : {&narrow, &wide}) {
        config->memory.placement = placement;
        config->memory.staging_rows = staging_rows;
      }
      Engine engine(narrow), twin(wide);
      Session session = engine.open(), other = twin.open();
      const ModelConfig& model = engine.config().model;
      const Rows rows = rows_of(model, 3);
      append(session, rows);
      append(other, {rounded(rows.keys), rounded(rows.values)});
      HostIds ids(1, model.query_heads, 40);
      for (std::size_t i = 0; i < ids.data.size(); ++i) {
        ids.data[i] = static_cast<std::int32_t>(i * 37 % kStored);
      }
      CallTensors a(model, 1, 9), b(model, 1, 9);
      AttendInputs inputs = a.attend_inputs();
      inputs.selected = ids.view();
      session.attend(0, inputs, a.outputs());
      other.attend(0, inputs, b.outputs());
      EXPECT_EQ(a.out.bytes(), b.out.bytes());
      EXPECT_EQ(a.lse.bytes(), b.lse.bytes());
      const AttendOptions dense{.mode = LayerMode::kDense};
      session.attend(0, a.attend_inputs(), a.outputs(), {}, dense);
      other.attend(0, b.attend_inputs(), b.outputs(), {}, dense);
      EXPECT_EQ(a.out.bytes(), b.out.bytes());
      EXPECT_EQ(a.lse.bytes(), b.lse.bytes());
    }
  }
}

TEST_P(PageFormatTest, CachedRowsAreTheSameNumbers) {
  Config cached = int8();
  cached.memory.staging_rows = 1000;
  Config cold = cached;
  cached.memory.row_cache_bytes = 8 * MiB;
  Engine engine(cached), twin(cold);
  Session session = engine.open(), other = twin.open();
  const ModelConfig& model = engine.config().model;
  const Rows rows = rows_of(model, 8);
  append(session, rows);
  append(other, rows);
  for (std::uint64_t step = 0; step < 5; ++step) {
    CallTensors a(model, 1, step % 2), b(model, 1, step % 2);
    session.decode(0, a.inputs(), a.outputs(true));
    other.decode(0, b.inputs(), b.outputs(true));
    EXPECT_TRUE(as_resident(GetParam(), a, b)) << "step " << step;
  }
  EXPECT_GT(engine.stats().cumulative.row_cache_hits, 0U);
}

TEST_P(PageFormatTest, SelectsByTheRowsThatWereGiven) {
  Engine engine(int8()), twin(plain());
  Session session = engine.open(), other = twin.open();
  const ModelConfig& model = engine.config().model;
  const Rows rows = rows_of(model, 4);
  append(session, rows);
  append(other, rows);
  CallTensors a(model, 3, 9), b(model, 3, 9);
  session.select(0, a.query.view(), {.ids = a.ids.view()});
  other.select(0, b.query.view(), {.ids = b.ids.view()});
  EXPECT_EQ(a.ids.data, b.ids.data);
}

TEST_P(PageFormatTest, ForksAndStoredPrefixesHaveTheSameRows) {
  Engine engine(int8());
  const ModelConfig& model = engine.config().model;
  const Rows rows = rows_of(model, 5);
  std::vector<std::int32_t> ids(kStored);
  std::iota(ids.begin(), ids.end(), 7);
  Session first = engine.open({.token_ids = ids});
  append(first, rows);
  first.publish(ids);
  std::vector<Session> forks = first.fork(1);
  Session attached = engine.open({.token_ids = ids});
  const std::int64_t whole = attached.length();
  ASSERT_GT(whole, 200);
  attached.append(0, rows.keys.view(whole), rows.values.view(whole));
  CallTensors a(model, 1, 9), b(model, 1, 9), c(model, 1, 9);
  first.decode(0, a.inputs(), a.outputs(true));
  forks[0].decode(0, b.inputs(), b.outputs(true));
  attached.decode(0, c.inputs(), c.outputs(true));
  EXPECT_TRUE(b.same_results(a));
  EXPECT_TRUE(c.same_results(a));
}

TEST_P(PageFormatTest, EvictedPagesAreRestoredTheSame) {
  auto tier = std::make_shared<FaultTier>();
  Config small = tiered_config(GetParam(), 40, tier);
  Config large = tiered_config(GetParam(), kPlenty, nullptr);
  small.memory.page_format = large.memory.page_format = PageFormat::kInt8;
  Engine engine(small), twin(large);
  const ModelConfig& model = engine.config().model;
  Session a = engine.open(), b = twin.open();
  append_to_all(a, model, 600, 7);
  append_to_all(b, model, 600, 7);
  Session other = engine.open();
  append_to_all(other, model, 600, 8);
  ASSERT_GT(engine.stats().cumulative.pages_evicted, 0U);
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(all_rows(a, model, layer), all_rows(b, model, layer));
  }
}

TEST_P(PageFormatTest, TakesHalfOfTheMemory) {
  Engine engine(int8()), twin(plain());
  Session session = engine.open(), other = twin.open();
  const Rows rows = rows_of(engine.config().model, 6);
  append(session, rows);
  append(other, rows);
  const std::size_t half = engine.stats().snapshot.host_page_bytes_used;
  const std::size_t whole = twin.stats().snapshot.host_page_bytes_used;
  const auto d = static_cast<std::size_t>(engine.config().model.head_dim);
  EXPECT_EQ(half * 4 * d, whole * (2 * d + 8));
  EXPECT_LT(engine.stats().cumulative.bytes_device_to_host,
            twin.stats().cumulative.bytes_device_to_host);
}

KVTIER_INSTANTIATE_BACKENDS(PageFormatTest);

}  // namespace
}  // namespace kvtier::testing
