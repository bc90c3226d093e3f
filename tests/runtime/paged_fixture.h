#pragma once

#include "kvtier/paged.h"

#include "runtime/engine_fixture.h"
#include "support/priority_oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

namespace kvtier::testing {

/// How an engine lays its cache out.
enum class CacheLayout {
  kApart,       ///< Keys and values `[blocks, tokens, heads, dim]` each.
  kTogether,    ///< `[blocks, 2, tokens, heads, dim]`.
  kHeadsFirst,  ///< `[blocks, 2, heads, tokens, dim]`.
};

/// A retrieval that `PagedSketches` takes.
inline RetrievalConfig paged_retrieval(SelectionRule rule, Selection selection,
                                       SketchCode code = SketchCode::kScalar) {
  RetrievalConfig retrieval;
  retrieval.selection = selection;
  retrieval.rule = rule;
  retrieval.code = code;
  retrieval.num_planes = 128;
  retrieval.top_k = 40;
  retrieval.sink_tokens = 12;
  retrieval.recent_tokens = 20;
  return retrieval;
}

/// Sequences of one layer in a paged cache, as an engine has them: keys and values on the host, and
/// which block each run of tokens is in.
struct PagedSequences {
  PagedSequences(const PagedConfig& config, std::vector<std::int64_t> lengths_in,
                 std::uint64_t seed, std::int64_t widest_in = 0)
      : lengths(std::move(lengths_in)), widest(widest_in) {
    const ModelConfig& model = config.model;
    std::vector<std::int32_t> free(static_cast<std::size_t>(config.num_blocks));
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), std::mt19937_64(seed));
    for (const std::int64_t length : lengths) {
      widest = std::max(widest, (length + config.block_tokens - 1) / config.block_tokens);
    }
    widest = std::max<std::int64_t>(
        widest, (config.max_tokens + config.block_tokens - 1) / config.block_tokens);
    tables.assign(lengths.size() * static_cast<std::size_t>(widest), -1);
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      const std::int64_t tokens = std::max<std::int64_t>(lengths[s], 1);
      keys.push_back(HostTensor::random(tokens, model.kv_heads, model.head_dim, model.kv_dtype,
                                        seed + 100 * s + 1));
      values.push_back(HostTensor::random(tokens, model.kv_heads, model.head_dim, model.kv_dtype,
                                          seed + 100 * s + 2));
      for (std::int64_t i = 0; i * config.block_tokens < lengths[s]; ++i) {
        tables[s * static_cast<std::size_t>(widest) + static_cast<std::size_t>(i)] = free.back();
        free.pop_back();
      }
    }
  }

  [[nodiscard]] std::int32_t slot(const PagedConfig& config, std::size_t s,
                                  std::int64_t token) const {
    const std::int32_t block = tables[s * static_cast<std::size_t>(widest) +
                                      static_cast<std::size_t>(token / config.block_tokens)];
    return block * config.block_tokens + static_cast<std::int32_t>(token % config.block_tokens);
  }
  [[nodiscard]] std::vector<std::int32_t> lengths32() const {
    return {lengths.begin(), lengths.end()};
  }

  std::vector<std::int64_t> lengths;
  std::int64_t widest;
  std::vector<HostTensor> keys, values;
  std::vector<std::int32_t> tables;  ///< `[sequences][widest]`
};

/// One layer of a cache in the memory of the backend, written as an engine does.
class PagedTest : public BackendTest {
 protected:
  [[nodiscard]] static PagedConfig paged_config(const RetrievalConfig& retrieval, int group = 2,
                                                int kv_heads = 2, int block_tokens = 16) {
    PagedConfig config;
    config.backend = GetParam();
    config.model = {.layers = 2,
                    .query_heads = kv_heads * group,
                    .kv_heads = kv_heads,
                    .head_dim = 64,
                    .kv_dtype = DType::kBFloat16,
                    .layer_options = {}};
    config.retrieval = retrieval;
    config.block_tokens = block_tokens;
    config.num_blocks = 5000 / block_tokens;
    config.max_tokens = 1500;
    config.max_batch_rows = 3;
    return config;
  }
  [[nodiscard]] MemorySpace space() const {
    return GetParam() == Backend::kCuda ? MemorySpace::kDevice : MemorySpace::kHost;
  }
  /// A tensor in the memory of the backend, kept until the test ends.
  TensorView place(const void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view(data, dtype, shape, space());
    std::size_t count = 1;
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    kept_.push_back(
        upload(std::span(static_cast<const std::byte*>(data), count * dtype_bytes(dtype))));
    view.data = kept_.back().data();
    return view;
  }
  TensorView place(const HostTensor& tensor) {
    const TensorView view = tensor.view();
    return place(view.data, view.dtype, {view.shape[0], view.shape[1], view.shape[2]});
  }
  TensorView place(const std::vector<std::int32_t>& values) {
    return place(values.data(), DType::kInt32, {std::ssize(values)});
  }
  /// An output in the memory of the backend.
  template <typename T>
  MutableTensorView output(DType dtype, std::initializer_list<std::int64_t> shape) {
    std::size_t count = 1;
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    kept_.push_back(allocate<T>(count));
    return {kept_.back().data(), dtype, shape, space()};
  }

  PagedBatch batch_of(const PagedSequences& sequences, std::int64_t max_length = 0) {
    const auto count = static_cast<std::int64_t>(sequences.lengths.size());
    const std::vector<std::int32_t> lengths = sequences.lengths32();
    return {.blocks = place(sequences.tables.data(), DType::kInt32, {count, sequences.widest}),
            .lengths = place(lengths.data(), DType::kInt32, {count}),
            .max_length = max_length};
  }
  /// Writes the rows of all sequences to a new cache.
  PagedLayer cache_of(const PagedConfig& config, const PagedSequences& sequences,
                      CacheLayout layout = CacheLayout::kApart) {
    const ModelConfig& model = config.model;
    const std::int64_t dim = model.head_dim, heads = model.kv_heads, tokens = config.block_tokens;
    const std::int64_t half = tokens * heads * dim;
    const bool apart = layout == CacheLayout::kApart;
    const bool heads_first = layout == CacheLayout::kHeadsFirst;
    const std::int64_t block_stride = apart ? half : 2 * half;
    const std::int64_t token_stride = heads_first ? dim : heads * dim;
    const std::int64_t head_stride = heads_first ? tokens * dim : dim;
    const std::int64_t values_at = apart ? config.num_blocks * half : half;
    std::vector<std::uint16_t> memory(static_cast<std::size_t>(2 * config.num_blocks * half),
                                      0x7FC0);  // NaN where nothing is written
    for (std::size_t s = 0; s < sequences.lengths.size(); ++s) {
      for (std::int64_t t = 0; t < sequences.lengths[s]; ++t) {
        const std::int64_t slot = sequences.slot(config, s, t);
        for (std::int64_t head = 0; head < heads; ++head) {
          const std::int64_t at =
              slot / tokens * block_stride + slot % tokens * token_stride + head * head_stride;
          const auto bytes = static_cast<std::size_t>(dim) * 2;
          const std::int64_t from = (t * heads + head) * dim * 2;
          std::memcpy(&memory[static_cast<std::size_t>(at)],
                      sequences.keys[s].bytes().data() + from, bytes);
          std::memcpy(&memory[static_cast<std::size_t>(at + values_at)],
                      sequences.values[s].bytes().data() + from, bytes);
        }
      }
    }
    kept_.push_back(upload(memory));
    PagedLayer layer;
    layer.keys = TensorView(kept_.back().data(), model.kv_dtype,
                            {config.num_blocks, tokens, heads, dim}, space());
    layer.keys.strides = {block_stride, token_stride, head_stride, 1};
    layer.values = layer.keys;
    layer.values.data = kept_.back().as<std::uint16_t>() + values_at;
    return layer;
  }
  /// Sketches all tokens of all sequences.
  void store_all(PagedSketches& sketches, int layer, const PagedSequences& sequences) {
    for (std::size_t s = 0; s < sequences.lengths.size(); ++s) {
      const std::int64_t length = sequences.lengths[s];
      if (length == 0) continue;
      std::vector<std::int32_t> slots;
      for (std::int64_t t = 0; t < length; ++t) {
        slots.push_back(sequences.slot(sketches.config(), s, t));
      }
      sketches.store(layer, place(sequences.keys[s]), place(sequences.values[s]), place(slots));
    }
  }

  /// What a call of `select` lists.
  struct Listed {
    std::vector<std::int64_t> ids;
    std::vector<double> biases;
  };
  /// `[sequences][sets]`
  std::vector<std::vector<Listed>> select(PagedSketches& sketches, int layer,
                                          const PagedBatch& batch, const HostTensor& query) {
    const PagedConfig& config = sketches.config();
    const std::int64_t rows = query.tokens();
    const std::int64_t sets = config.model.num_sets(config.retrieval.selection);
    const std::int64_t n = sketches.attended_bound(config.max_tokens) + 2;
    const bool weighted = config.retrieval.rule == SelectionRule::kPriority;
    PagedSelectOutputs outputs{.ids = output<std::int32_t>(DType::kInt32, {rows, sets, n}),
                               .bias = {}};
    if (weighted) outputs.bias = output<float>(DType::kFloat32, {rows, sets, n});
    sketches.select(layer, batch, place(query), outputs);
    const auto count = static_cast<std::size_t>(rows * sets * n);
    const auto ids = download<std::int32_t>(outputs.ids.data, count);
    const auto biases =
        weighted ? download<float>(outputs.bias.data, count) : std::vector<float>(count, 0.0F);
    std::vector<std::vector<Listed>> lists(static_cast<std::size_t>(rows));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t set = 0; set < sets; ++set) {
        Listed list;
        bool padded = false;
        for (std::int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<std::size_t>((row * sets + set) * n + i);
          if (ids[at] == -1) {
            padded = true;
            EXPECT_EQ(biases[at], 0.0F);
            continue;
          }
          EXPECT_FALSE(padded) << "an id behind the padding";
          list.ids.push_back(ids[at]);
          list.biases.push_back(static_cast<double>(biases[at]));
        }
        EXPECT_TRUE(std::is_sorted(list.ids.begin(), list.ids.end()));
        lists[static_cast<std::size_t>(row)].push_back(std::move(list));
      }
    }
    return lists;
  }

  struct Attended {
    std::vector<float> out, lse;
  };
  Attended attend(PagedSketches& sketches, int layer, const PagedBatch& batch,
                  const HostTensor& query, const PagedLayer& cache) {
    const ModelConfig& model = sketches.config().model;
    const std::int64_t rows = query.tokens();
    const PagedAttendOutputs outputs{
        .out = output<float>(DType::kFloat32, {rows, model.query_heads, model.head_dim}),
        .lse = output<float>(DType::kFloat32, {rows, model.query_heads})};
    sketches.attend(layer, batch, place(query), cache, outputs);
    const auto heads = static_cast<std::size_t>(rows * model.query_heads);
    return {download<float>(outputs.out.data, heads * static_cast<std::size_t>(model.head_dim)),
            download<float>(outputs.lse.data, heads)};
  }
  /// Compares with attention in double precision over what the lists say; none: over all tokens.
  static void expect_attention(const PagedConfig& config, const PagedSequences& sequences,
                               const HostTensor& query,
                               const std::vector<std::vector<Listed>>* lists,
                               const Attended& found) {
    const ModelConfig& model = config.model;
    const int group = model.query_heads / model.kv_heads;
    for (std::size_t s = 0; s < sequences.lengths.size(); ++s) {
      const std::vector<float>& keys = sequences.keys[s].values();
      const std::vector<float>& values = sequences.values[s].values();
      Listed all;
      for (std::int64_t t = 0; t < sequences.lengths[s]; ++t) all.ids.push_back(t);
      all.biases.assign(all.ids.size(), 0.0);
      for (int head = 0; head < model.query_heads; ++head) {
        const int kv_head = head / group;
        const Listed& list =
            lists == nullptr
                ? all
                : (*lists)[s][(*lists)[s].size() == 1 ? 0 : static_cast<std::size_t>(kv_head)];
        const oracle::Attention expected = oracle::attend_with_biases(
            query.row(static_cast<std::int64_t>(s), head),
            kv_view(keys, values, model.kv_heads, model.head_dim, kv_head), list.ids, list.biases,
            1.0 / std::sqrt(static_cast<double>(model.head_dim)));
        const std::size_t at =
            s * static_cast<std::size_t>(model.query_heads) + static_cast<std::size_t>(head);
        const auto dim = static_cast<std::size_t>(model.head_dim);
        const std::span out(found.out.data() + at * dim, dim);
        const double tolerance = config.backend == Backend::kCuda ? 2e-3 : 5e-5;
        if (list.ids.empty()) {
          for (const float x : out) ASSERT_EQ(x, 0.0F);
          ASSERT_EQ(found.lse[at], -INFINITY);
          continue;
        }
        ASSERT_LE(oracle::relative_error(out, expected.out), tolerance)
            << "sequence " << s << ", head " << head;
        ASSERT_NEAR(static_cast<double>(found.lse[at]), expected.lse, tolerance);
      }
    }
  }

 private:
  std::vector<transfer::Buffer> kept_;
};

}  // namespace kvtier::testing
