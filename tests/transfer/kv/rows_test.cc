#include "tests/transfer/kv/rows_fixture.h"

#include <gtest/gtest.h>

#include <utility>

namespace kvtier::transfer {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class PackQueriesTest : public RowsTest {};
KVTIER_INSTANTIATE_BACKENDS(PackQueriesTest);

TEST_P(PackQueriesTest, ConvertsRowsOfSeveralTensors) {
  for (const int head_dim : {64, 96, 128, 256}) {
    const KvGeometry g = geometry(3, head_dim, 16, 0, 0);
    SCOPED_TRACE(describe_geometry(g));
    const HostTensor tensors[] = {
        random_tensor(random_, DType::kFloat32, 4, g.query_heads(), head_dim, 0, 0),
        random_tensor(random_, DType::kFloat16, 5, g.query_heads(), head_dim, 3, 1),
        random_tensor(random_, DType::kBFloat16, 1, g.query_heads(), head_dim, 0, 8)};
    std::vector<Buffer> data;
    for (const HostTensor& tensor : tensors) data.push_back(upload(tensor.bytes));
    const std::vector<std::pair<std::size_t, std::int32_t>> picks = {
        {0, 3}, {1, 0}, {2, 0}, {1, 4}, {0, 0}};
    StepFlags* const flags = make_flags();
    QueryItems items;
    std::vector<float> expected;
    for (const auto& [which, token] : picks) {
      items.push(
          {.query = tensors[which].view(data[which].data()), .token = token, .flags = flags});
      for (int head = 0; head < g.query_heads(); ++head) {
        for (int i = 0; i < head_dim; ++i) {
          expected.push_back(static_cast<float>(tensors[which].get(token, head, i)));
        }
      }
    }
    const Buffer out = allocate<float>(expected.size());

    pack_queries(*stream_, g, items, out.as<float>());

    EXPECT_EQ(download<float>(out.data(), expected.size()), expected);
    EXPECT_EQ(flags->nonfinite_queries, 0U);
  }
}

TEST_P(PackQueriesTest, CountsNonfiniteRowsOnceAndNamesTheFirst) {
  const KvGeometry g = geometry(2, 64, 16, 0, 0);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    SCOPED_TRACE(dtype_name(dtype));
    HostTensor queries = random_tensor(random_, dtype, 64, g.query_heads(), 64, 1, 0);
    queries.set(0, 0, 0, kNan);
    queries.set(0, 3, 63, kInfinity);
    queries.set(63, 3, 63, -kInfinity);
    const Buffer data = upload(queries.bytes);
    StepFlags* const flags = make_flags();
    const Buffer counters = upload(std::vector<SequenceCounters>{{.length = 1000}});
    QueryItems items;
    for (int token = 63; token >= 0; --token) {
      items.push({.query = queries.view(data.data()),
                  .token = token,
                  .lag = 70 - token,
                  .flags = flags,
                  .counters = counters.as<SequenceCounters>(),
                  .layer = 3});
    }
    const Buffer out = allocate<float>(64 * 4 * 64);

    pack_queries(*stream_, g, items, out.as<float>());

    EXPECT_TRUE(std::isnan(download<float>(out.data(), 64 * 256)[63 * 256]));
    EXPECT_EQ(flags->nonfinite_queries, 2U);
    const auto place = NonfinitePlace::of(flags->first_nonfinite);
    EXPECT_EQ(place.token, 1000 - 70 - 1);
    EXPECT_EQ(place.layer, 3);
    EXPECT_TRUE(place.in_query);
    EXPECT_EQ(flags->nonfinite_tokens, 0U);
  }
}

TEST_P(PackQueriesTest, NeedsNoFlagsAndNoRows) {
  const KvGeometry g = geometry(1, 64, 16, 0, 0);
  HostTensor query = random_tensor(random_, DType::kFloat32, 1, 2, 64, 0, 0);
  query.set(0, 0, 5, kNan);
  const Buffer data = upload(query.bytes);
  const Buffer out = allocate<float>(128);
  QueryItems items;

  pack_queries(*stream_, g, items, out.as<float>());
  EXPECT_EQ(download<std::uint8_t>(out.data(), 512), std::vector<std::uint8_t>(512, 0xA5));
  items.push({.query = query.view(data.data())});
  pack_queries(*stream_, g, items, out.as<float>());

  EXPECT_TRUE(std::isnan(download<float>(out.data(), 6)[5]));
}

class PatchTableTest : public RowsTest {};
KVTIER_INSTANTIATE_BACKENDS(PatchTableTest);

TEST_P(PatchTableTest, WritesTheEntriesGiven) {
  const Buffer table = allocate<std::byte*>(1000);
  TablePatch patch;
  for (int i = 0; i < kMaxTablePatch; ++i) patch.values[i] = table.data() + i;
  std::vector<std::byte*> expected = download<std::byte*>(table.data(), 1000);

  for (const auto& [begin, count] :
       std::vector<std::pair<std::int64_t, int>>{{0, 1}, {5, 0}, {10, 33}, {700, kMaxTablePatch}}) {
    patch_table(*stream_, table.as<std::byte*>(), begin, patch, count);
    std::copy_n(patch.values, count, expected.begin() + begin);
    EXPECT_EQ(download<std::byte*>(table.data(), 1000), expected);
  }
}

class AllFiniteTest : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, AllFiniteTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16),
                         [](const auto& each) { return std::string(dtype_name(each.param)); });

TEST_P(AllFiniteTest, FindsEveryBadElementAndIgnoresGaps) {
  std::mt19937 random(11);
  for (const auto& [head_gap, token_gap] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 0}, {3, 0}, {0, 5}}) {
    SCOPED_TRACE("gaps " + std::to_string(head_gap) + " and " + std::to_string(token_gap));
    HostTensor tensor = random_tensor(random, GetParam(), 3, 2, 67, head_gap, token_gap);
    const auto finite = [&tensor] {
      return all_finite(tensor.view(tensor.bytes.data()), 3, 2, 67);
    };
    ASSERT_TRUE(finite());
    for (int token = 0; token < 3; ++token) {
      for (int head = 0; head < 2; ++head) {
        for (int i = 0; i < 67; ++i) {
          for (const double bad : {kNan, kInfinity, -kInfinity}) {
            tensor.set(token, head, i, bad);
            ASSERT_FALSE(finite()) << token << ' ' << head << ' ' << i << ' ' << bad;
          }
          tensor.set(token, head, i, i % 2 == 0 ? 65504.0 : -0.0);
          ASSERT_TRUE(finite()) << token << ' ' << head << ' ' << i;
        }
      }
    }
  }
}

TEST_P(AllFiniteTest, FindsTheLastElementOfALargeTensor) {
  HostTensor tensor(GetParam(), 3000, 8, 64, 0, 0);
  std::fill(tensor.bytes.begin(), tensor.bytes.end(), std::byte{0});
  const auto finite = [&tensor] {
    return all_finite(tensor.view(tensor.bytes.data()), 3000, 8, 64);
  };

  EXPECT_TRUE(finite());
  tensor.set(2999, 7, 63, kNan);
  EXPECT_FALSE(finite());
}

TEST_P(AllFiniteTest, FindsWhatRoundsToInfinityWhereItIsStored) {
  HostTensor tensor(GetParam(), 1, 1, 67, 0, 0);
  std::fill(tensor.bytes.begin(), tensor.bytes.end(), std::byte{0});
  const auto fits = [&](double value, DType storage) {
    tensor.set(0, 0, 66, value);
    return all_finite(tensor.view(tensor.bytes.data()), 1, 1, 67, storage);
  };
  EXPECT_TRUE(fits(65504.0, DType::kFloat32));
  if (GetParam() == DType::kFloat32) {
    // The least that rounds to infinity, and the float below it.
    for (const double sign : {1.0, -1.0}) {
      EXPECT_FALSE(fits(sign * 65520.0, DType::kFloat16));
      EXPECT_TRUE(fits(sign * std::nextafterf(65520.0F, 0.0F), DType::kFloat16));
      EXPECT_FALSE(fits(sign * 0x1.FFp127, DType::kBFloat16));
      EXPECT_TRUE(fits(sign * std::nextafterf(0x1.FFp127F, 0.0F), DType::kBFloat16));
    }
  } else if (GetParam() == DType::kBFloat16) {
    EXPECT_FALSE(fits(65536.0, DType::kFloat16));
    EXPECT_TRUE(fits(65280.0, DType::kFloat16));
  } else {
    EXPECT_TRUE(fits(65504.0, DType::kBFloat16));
  }
  EXPECT_FALSE(fits(kInfinity, DType::kBFloat16));
}

TEST_P(AllFiniteTest, OfNothingIsTrue) {
  EXPECT_TRUE(all_finite({.data = nullptr, .dtype = GetParam()}, 0, 2, 64));
}

}  // namespace
}  // namespace kvtier::transfer
