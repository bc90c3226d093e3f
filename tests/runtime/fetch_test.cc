#include "runtime/engine_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

/// Rows by token: what was appended comes back, rounded as it is stored, wherever it lies.
namespace kvtier::testing {
namespace {

using ::testing::HasSubstr;

/// The keys and values that a layer ought to hold, kept by the test.
class Appended {
 public:
  explicit Appended(const ModelConfig& model) : model_(model) {}

  void append(Session& session, int layer, std::int64_t tokens, std::uint64_t seed) {
    const auto random = [&](std::uint64_t s) {
      return HostTensor::random(tokens, model_.kv_heads, model_.head_dim, DType::kFloat32, s);
    };
    const HostTensor key = random(2 * seed), value = random(2 * seed + 1);
    session.append(layer, key.view(), value.view());
    const std::vector<float> k = stored(key, model_.kv_dtype), v = stored(value, model_.kv_dtype);
    keys_.insert(keys_.end(), k.begin(), k.end());
    values_.insert(values_.end(), v.begin(), v.end());
  }
  void truncate(std::int64_t tokens) {
    const auto left = static_cast<std::size_t>(tokens * model_.kv_heads * model_.head_dim);
    keys_.resize(left);
    values_.resize(left);
  }
  [[nodiscard]] std::int64_t length() const {
    return static_cast<std::int64_t>(keys_.size()) / (model_.kv_heads * model_.head_dim);
  }
  [[nodiscard]] std::vector<float> key(std::int32_t token, int head) const {
    return row(keys_, token, head);
  }
  [[nodiscard]] std::vector<float> value(std::int32_t token, int head) const {
    return row(values_, token, head);
  }

 private:
  [[nodiscard]] std::vector<float> row(const std::vector<float>& rows, std::int32_t token,
                                       int head) const {
    const auto dim = static_cast<std::size_t>(model_.head_dim);
    if (token < 0) return std::vector<float>(dim, 0.0F);
    const auto at = (static_cast<std::size_t>(token) * static_cast<std::size_t>(model_.kv_heads) +
                     static_cast<std::size_t>(head)) *
                    dim;
    return {rows.begin() + static_cast<std::ptrdiff_t>(at),
            rows.begin() + static_cast<std::ptrdiff_t>(at + dim)};
  }

  ModelConfig model_;
  std::vector<float> keys_, values_;
};

/// Random ids of `length` tokens, in no order, with repeats and some of none.
std::vector<std::int32_t> random_ids(std::size_t count, std::int64_t length, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::uniform_int_distribution<std::int32_t> id(-1, static_cast<std::int32_t>(length) - 1);
  std::vector<std::int32_t> ids(count);
  for (std::int32_t& each : ids) each = id(engine);
  return ids;
}

class FetchTest : public EngineTest {
 protected:
  static TensorView ids_view(const std::vector<std::int32_t>& ids, int kv_heads) {
    const auto n = static_cast<std::int64_t>(ids.size()) / kv_heads;
    return {ids.data(), DType::kInt32, {kv_heads, n}};
  }
  static void expect_rows(Session& session, const ModelConfig& model, int layer,
                          const Appended& expected, const std::vector<std::int32_t>& ids) {
    const auto n = static_cast<std::int64_t>(ids.size()) / model.kv_heads;
    // A HostTensor [tokens, heads, dim] is here [kv_heads, n, dim].
    HostTensor keys(model.kv_heads, static_cast<int>(n), model.head_dim, model.kv_dtype);
    HostTensor values = keys;
    session.fetch(layer, ids_view(ids, model.kv_heads),
                  {.keys = keys.mutable_view(), .values = values.mutable_view()});
    for (int head = 0; head < model.kv_heads; ++head) {
      for (int i = 0; i < n; ++i) {
        const std::int32_t token = ids[static_cast<std::size_t>(head * n + i)];
        ASSERT_EQ(keys.row(head, i), expected.key(token, head)) << head << ' ' << i << ' ' << token;
        ASSERT_EQ(values.row(head, i), expected.value(token, head)) << head << ' ' << i;
      }
    }
  }
};

TEST_P(FetchTest, ReturnsTheRowsThatWereAppended) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const KvPlacement placement : {KvPlacement::kHost, KvPlacement::kDevice}) {
      Config config = this->config();
      config.model.layers = 2;
      config.model.kv_dtype = dtype;
      config.model.head_dim = dtype == DType::kFloat16 ? 128 : 64;
      config.memory.placement = placement;
      Engine engine(config);
      Session session = engine.open();
      Appended expected(config.model);
      append_random(session, config.model, 0, 33, 7);  // the other layer has other rows
      // Sinks, pages and ring; a part-filled page at the end. Twice as many ids as a piece holds.
      for (const std::int64_t tokens : {1, 15, 300, 1, 57}) {
        expected.append(session, 1, tokens, static_cast<std::uint64_t>(tokens + expected.length()));
        for (const std::size_t n : {1U, 37U, 4200U}) {
          SCOPED_TRACE(::testing::Message()
                       << dtype_name(dtype) << ' ' << expected.length() << ' ' << n);
          const auto count = n * static_cast<std::size_t>(config.model.kv_heads);
          expect_rows(session, config.model, 1, expected,
                      random_ids(count, expected.length(), n + static_cast<std::size_t>(tokens)));
        }
      }
    }
  }
}

TEST_P(FetchTest, FollowsTruncationsAndForks) {
  Config config = this->config();
  config.memory.page_tokens = 16;
  Engine engine(config);
  Session parent = engine.open();
  Appended of_parent(config.model);
  of_parent.append(parent, 0, 200, 1);
  parent.truncate(101);
  of_parent.truncate(101);
  std::vector<Session> children = parent.fork(1);
  Appended of_child = of_parent;
  const std::vector<std::int32_t> before = random_ids(256, 101, 1);
  expect_rows(children[0], config.model, 0, of_child, before);
  of_parent.append(parent, 0, 60, 2);
  of_child.append(children[0], 0, 40, 3);

  expect_rows(parent, config.model, 0, of_parent, random_ids(512, of_parent.length(), 2));
  expect_rows(children[0], config.model, 0, of_child, random_ids(512, of_child.length(), 3));
}

TEST_P(FetchTest, TakesTheIdsOfASelection) {
  const Config config = this->config();
  Engine engine(config);
  Session session = engine.open();
  Appended expected(config.model);
  expected.append(session, 0, 90, 1);  // fewer eligible tokens than are asked for: padded with -1
  const HostTensor query =
      HostTensor::random(1, config.model.query_heads, config.model.head_dim, DType::kFloat32, 5);
  HostIds ids(1, config.model.kv_heads, 64);
  session.select(0, query.view(), {.ids = ids.view()});
  ASSERT_THAT(ids.data, ::testing::Contains(-1));

  expect_rows(session, config.model, 0, expected, ids.data);
}

TEST_P(FetchTest, WritesWhereStridesSay) {
  const Config config = this->config();
  const ModelConfig& model = config.model;
  Engine engine(config);
  Session session = engine.open();
  Appended expected(model);
  expected.append(session, 0, 40, 1);
  // Columns 1 and 3 of four ids a head, to an output of [n, kv_heads, head_dim].
  const std::vector<std::int32_t> ids = {9, 5, 9, 0, 39, 9, 20, 9};
  TensorView tokens(ids.data() + 1, DType::kInt32, {model.kv_heads, 3});
  tokens.strides[0] = 4;
  HostTensor keys(3, model.kv_heads, model.head_dim, model.kv_dtype);
  HostTensor values = keys;
  const auto transposed = [&](HostTensor& tensor) {
    MutableTensorView view = tensor.mutable_view();
    std::swap(view.shape[0], view.shape[1]);
    std::swap(view.strides[0], view.strides[1]);
    return view;
  };
  session.fetch(0, tokens, {.keys = transposed(keys), .values = transposed(values)});

  for (int head = 0; head < model.kv_heads; ++head) {
    for (int i = 0; i < 3; ++i) {
      const std::int32_t token = ids[static_cast<std::size_t>(4 * head + i + 1)];
      EXPECT_EQ(keys.row(i, head), expected.key(token, head));
      EXPECT_EQ(values.row(i, head), expected.value(token, head));
    }
  }
}

TEST_P(FetchTest, RefusesWhatItCannotReadAndWritesNothing) {
  const Config config = this->config();
  const ModelConfig& model = config.model;
  Engine engine(config);
  Session session = engine.open();
  append_random(session, model, 0, 50, 1);
  HostTensor keys(model.kv_heads, 3, model.head_dim, model.kv_dtype);
  HostTensor values = keys;
  const std::vector<std::byte> untouched = keys.bytes();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

  const auto refused = [&](int layer, const TensorView& tokens, const FetchOutputs& outputs,
                           const std::string& what, ErrorCode code = ErrorCode::kInvalidArgument) {
    expect_error(error_of([&] { session.fetch(layer, tokens, outputs); }), code, what);
    EXPECT_EQ(keys.bytes(), untouched);
    EXPECT_EQ(values.bytes(), untouched);
  };
  std::vector<std::int32_t> ids = {0, 1, 2, 3, 4, 49};
  const TensorView tokens = ids_view(ids, model.kv_heads);
  const FetchOutputs outputs{.keys = keys.mutable_view(), .values = values.mutable_view()};
  for (const std::int32_t bad : {50, -2, kMost, std::numeric_limits<std::int32_t>::min()}) {
    ids[4] = bad;
    refused(0, tokens, outputs, "tokens[1, 1]: expected -1 or 0..49, found " + std::to_string(bad));
  }
  ids[4] = 4;
  refused(1, tokens, outputs, "layer: expected 0..0, found 1");
  refused(0, {}, outputs, "tokens: expected [2, n] with n >= 1, found none");
  refused(0, {ids.data(), DType::kInt32, {6}}, outputs, "tokens: expected [2, n]");
  refused(0, {ids.data(), DType::kInt32, {2, 0}}, outputs, "n >= 1");
  refused(0, {ids.data(), DType::kInt32, {3, 2}}, outputs, "tokens: expected int32 [2, 2]");
  refused(0, {ids.data(), DType::kFloat32, {2, 3}}, outputs, "tokens: expected int32 [2, 3]");
  refused(0, {ids.data(), DType::kInt32, {2, 3}, MemorySpace::kDevice}, outputs,
          "tokens: expected host memory, found device memory");
  TensorView huge = tokens;
  huge.shape[1] = std::numeric_limits<std::int64_t>::max();
  refused(0, huge, outputs, "keys: expected bf16 [2, 9223372036854775807, 64]");
  FetchOutputs bad = outputs;
  bad.values = {};
  refused(0, tokens, bad, "values: expected bf16 [2, 3, 64], found none");
  bad = outputs;
  bad.keys.dtype = DType::kFloat16;
  refused(0, tokens, bad, "keys: expected bf16 [2, 3, 64], found fp16 [2, 3, 64]");
  bad = outputs;
  bad.keys.strides[2] = 2;
  refused(0, tokens, bad, "keys: expected last stride 1, found last stride 2");
  session.truncate(0);
  refused(0, tokens, outputs, "expected stored tokens", ErrorCode::kFailedPrecondition);
}

KVTIER_INSTANTIATE_BACKENDS(FetchTest);

}  // namespace
}  // namespace kvtier::testing
