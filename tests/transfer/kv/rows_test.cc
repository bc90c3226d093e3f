#include "support/fake_device.h"
#include "tests/transfer/kv/rows_fixture.h"

#include <gtest/gtest.h>

#include <functional>
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
        random_tensor(random_, DType::kFloat32, 4, g.query_heads, head_dim, 0, 0),
        random_tensor(random_, DType::kFloat16, 5, g.query_heads, head_dim, 3, 1),
        random_tensor(random_, DType::kBFloat16, 1, g.query_heads, head_dim, 0, 8)};
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
      for (int head = 0; head < g.query_heads; ++head) {
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
    HostTensor queries = random_tensor(random_, dtype, 64, g.query_heads, 64, 1, 0);
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

/// Arguments that the front doors refuse. Nothing may have been enqueued then.
class RowsArguments : public ::testing::Test {
 protected:
  void expect_rejected(const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_NE(std::string(error.what()).find("expected"), std::string::npos) << error.what();
    }
    EXPECT_EQ(device_.pending(*stream_), 0U);
  }

  testing::FakeDevice device_;
  std::unique_ptr<Stream> stream_ = device_.make_stream();
  KvGeometry good_ = geometry(2, 64, 16, 4, 8);
  std::byte memory_[64] = {};
};

TEST_F(RowsArguments, RejectsABadGeometry) {
  std::vector<KvGeometry> bad(9, good_);
  bad[0].head_dim = 80;
  bad[1].dtype = DType::kFloat32;
  bad[2].kv_heads = 0;
  bad[3].query_heads = 3;
  bad[4].page_tokens = 0;
  bad[5].sink_capacity = -1;
  bad[6].recent_capacity = -1;
  bad[7].query_heads = 0;
  bad[8].head_dim = 0;
  for (std::size_t i = 0; i < bad.size(); ++i) {
    SCOPED_TRACE("geometry " + std::to_string(i));
    expect_rejected([&] { pack_rows(*stream_, bad[i], {}, memory_); });
    expect_rejected([&] { store_rows(*stream_, bad[i], {}, memory_); });
    expect_rejected([&] { append_done(*stream_, bad[i], {}); });
    expect_rejected([&] { gather_rows(*stream_, bad[i], {}, {}, {}, false, nullptr); });
    expect_rejected([&] { pack_queries(*stream_, bad[i], {}, nullptr); });
  }
}

TEST_F(RowsArguments, RejectsABadAppend) {
  SequenceCounters counters;
  const std::byte* page = memory_;
  const AppendItem good{.sequence = {&page, memory_, memory_, &counters},
                        .keys = {.data = memory_},
                        .values = {.data = memory_},
                        .tokens = 1};
  const auto with = [&good](const std::function<void(AppendItem&)>& change) {
    AppendBatch batch;
    batch.push(good);
    change(batch[0]);
    return batch;
  };
  const std::vector<AppendBatch> pack = {
      with([](AppendItem& item) { item.tokens = -1; }),
      with([](AppendItem& item) { item.packed_offset = -1; }),
      with([](AppendItem& item) { item.keys.data = nullptr; }),
      with([](AppendItem& item) { item.values.data = nullptr; }),
      with([](AppendItem& item) { item.keys.dtype = DType::kInt32; }),
      with([](AppendItem& item) { item.values.dtype = DType::kInt32; })};
  for (const AppendBatch& batch : pack) {
    expect_rejected([&] { pack_rows(*stream_, good_, batch, memory_); });
  }
  const std::vector<AppendBatch> store = {
      with([](AppendItem& item) { item.tokens = -1; }),
      with([](AppendItem& item) { item.sequence.pages = nullptr; }),
      with([](AppendItem& item) { item.sequence.sink_rows = nullptr; }),
      with([](AppendItem& item) { item.sequence.recent_rows = nullptr; }),
      with([](AppendItem& item) { item.sequence.counters = nullptr; })};
  for (const AppendBatch& batch : store) {
    expect_rejected([&] { store_rows(*stream_, good_, batch, memory_); });
  }
  expect_rejected([&] { append_done(*stream_, good_, store.back()); });
  AppendBatch too_many;
  too_many.count = kMaxBatch + 1;
  expect_rejected([&] { append_done(*stream_, good_, too_many); });
}

TEST_F(RowsArguments, RejectsABadLength) {
  SequenceCounters counters{.length = 5, .capacity = 10};
  expect_rejected([&] { set_length(*stream_, &counters, -1, 10); });
  expect_rejected([&] { set_length(*stream_, &counters, 11, 10); });
  expect_rejected([&] { set_length(*stream_, nullptr, 1, 10); });
  EXPECT_EQ(counters.length, 5);
}

TEST_F(RowsArguments, RejectsABadPatch) {
  std::byte* table[1] = {};
  expect_rejected([&] { patch_table(*stream_, table, 0, {}, kMaxTablePatch + 1); });
  expect_rejected([&] { patch_table(*stream_, table, 0, {}, -1); });
  expect_rejected([&] { patch_table(*stream_, table, -1, {}, 1); });
}

TEST_F(RowsArguments, RejectsABadGather) {
  SequenceCounters counters;
  const std::byte* page = memory_;
  SequenceBatch sequences;
  sequences.push({&page, memory_, memory_, &counters});
  QueryBatch rows;
  rows.push({.sequence = 0});
  const SelectionView selection{.capacity = 4, .staged = memory_, .staged_capacity = 4};
  const auto gather = [&](const SequenceBatch& s, const QueryBatch& r, const SelectionView& v) {
    expect_rejected([&] { gather_rows(*stream_, good_, s, r, v, false, nullptr); });
  };

  SequenceBatch broken = sequences;
  broken[0].pages = nullptr;
  gather(broken, rows, selection);
  QueryBatch elsewhere = rows;
  elsewhere[0].sequence = 1;
  gather(sequences, elsewhere, selection);
  elsewhere[0].sequence = -1;
  gather(sequences, elsewhere, selection);
  QueryBatch too_many = rows;
  too_many.count = kMaxBatch + 1;
  gather(sequences, too_many, selection);
  SelectionView unstaged = selection;
  unstaged.staged = nullptr;
  gather(sequences, rows, unstaged);
  SelectionView oversized = selection;
  oversized.staged_capacity = 5;
  gather(sequences, rows, oversized);
}

TEST_F(RowsArguments, RejectsABadQuery) {
  QueryItems items;
  items.push({.query = {.data = memory_}, .token = -1});
  expect_rejected([&] { pack_queries(*stream_, good_, items, nullptr); });
  items[0] = {.query = {.data = nullptr}};
  expect_rejected([&] { pack_queries(*stream_, good_, items, nullptr); });
  items[0] = {.query = {.data = memory_, .dtype = DType::kInt32}};
  expect_rejected([&] { pack_queries(*stream_, good_, items, nullptr); });
}

}  // namespace
}  // namespace kvtier::transfer
