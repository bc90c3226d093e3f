#include "runtime/graph_fixture_cuda.h"
#include "runtime/paged_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

/// A step over pages of the caller in a CUDA graph: replays see the tables and lengths of their
/// time.
namespace kvtier::testing {
namespace {

class PagedGraphTest : public PagedTest {
 protected:
  static constexpr std::int64_t kSteps = 40;

  template <typename T>
  static void overwrite(const TensorView& to, const T* from, std::size_t count) {
    check(cudaMemcpy(const_cast<void*>(to.data), from, count * sizeof(T), cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));
  }
};
INSTANTIATE_TEST_SUITE_P(, PagedGraphTest, ::testing::Values(Backend::kCuda), backend_name);

TEST_P(PagedGraphTest, ReplaysGiveWhatCallsGive) {
  for (const Selection selection : {Selection::kPerSequence, Selection::kPerKvHead}) {
    const PagedConfig config =
        paged_config(paged_retrieval(SelectionRule::kPriority, selection), 4);
    const ModelConfig& model = config.model;
    // Behind the prompts come steps; the tables grow as they fill. One sequence is begun by a step.
    const PagedSequences sequences(config, {700 + kSteps, kSteps, 1500}, 3);
    const std::vector<std::int64_t> prompts = {700, 0, 1500 - kSteps};
    PagedSketches replayed(config), called(config);
    for (PagedSketches* sketches : {&replayed, &called}) {
      for (std::size_t s = 0; s < 3; ++s) {
        if (prompts[s] == 0) continue;
        std::vector<std::int32_t> slots;
        for (std::int64_t t = 0; t < prompts[s]; ++t) slots.push_back(sequences.slot(config, s, t));
        const auto shape = {prompts[s], std::int64_t{2}, std::int64_t{64}};
        sketches->store(0, place(sequences.keys[s].view().data, DType::kBFloat16, shape),
                        place(sequences.values[s].view().data, DType::kBFloat16, shape),
                        place(slots));
      }
    }
    const PagedLayer cache = cache_of(config, sequences);
    const PagedBatch batch = batch_of(sequences);
    const HostTensor first = HostTensor::random(3, model.query_heads, 64, DType::kBFloat16, 1);
    const HostTensor nothing(3, model.kv_heads, 64, DType::kBFloat16);
    const TensorView query = place(first), key = place(nothing), value = place(nothing);
    const TensorView slots = place({0, 0, 0});
    const auto make_outputs = [&] {
      return PagedAttendOutputs{.out = output<float>(DType::kFloat32, {3, model.query_heads, 64}),
                                .lse = output<float>(DType::kFloat32, {3, model.query_heads})};
    };
    const PagedAttendOutputs of_replays = make_outputs(), of_calls = make_outputs();
    const OwnStream stream;
    const auto step = [&](PagedSketches& sketches, const PagedAttendOutputs& outputs,
                          StreamRef on) {
      sketches.store(0, key, value, slots, on);
      sketches.attend(0, batch, query, cache, outputs, on);
    };
    const std::size_t row = 2 * 64 * sizeof(std::uint16_t);
    const auto feed = [&](std::int64_t number) {
      std::vector<std::byte> keys(3 * row), values(3 * row);
      std::vector<std::int32_t> places, lengths;
      for (std::size_t s = 0; s < 3; ++s) {
        const std::int64_t token = prompts[s] + number;
        const std::size_t from = static_cast<std::size_t>(token) * row;
        std::memcpy(keys.data() + s * row, sequences.keys[s].bytes().data() + from, row);
        std::memcpy(values.data() + s * row, sequences.values[s].bytes().data() + from, row);
        places.push_back(sequences.slot(config, s, token));
        lengths.push_back(static_cast<std::int32_t>(token + 1));
      }
      const auto seed = static_cast<std::uint64_t>(number) + 50;
      const HostTensor asked =
          HostTensor::random(3, model.query_heads, 64, DType::kBFloat16, seed, 2.0F);
      overwrite(key, keys.data(), keys.size());
      overwrite(value, values.data(), values.size());
      overwrite(slots, places.data(), places.size());
      overwrite(batch.lengths, lengths.data(), lengths.size());
      overwrite(query, asked.bytes().data(), asked.bytes().size());
    };
    feed(0);
    step(replayed, of_replays, {});  // kernels are loaded before the capture
    step(called, of_calls, {});
    const Graph graph(stream, [&] { step(replayed, of_replays, stream.ref()); });
    const auto count = static_cast<std::size_t>(3 * model.query_heads);
    for (std::int64_t number = 1; number < kSteps; ++number) {
      feed(number);
      graph.launch(stream);
      stream.synchronize();
      step(called, of_calls, {});
      ASSERT_EQ(download<float>(of_replays.out.data, count * 64),
                download<float>(of_calls.out.data, count * 64))
          << "step " << number;
      ASSERT_EQ(download<float>(of_replays.lse.data, count),
                download<float>(of_calls.lse.data, count));
    }
    EXPECT_NO_THROW(replayed.check());
    // The next call throws what a replay met in a table.
    const auto outside = static_cast<std::int32_t>(config.num_blocks);
    overwrite(batch.blocks, &outside, 1);
    graph.launch(stream);
    stream.synchronize();
    const auto error = error_of([&] { step(replayed, of_replays, stream.ref()); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(), ::testing::HasSubstr("found 1 others"));
  }
}

}  // namespace
}  // namespace kvtier::testing
