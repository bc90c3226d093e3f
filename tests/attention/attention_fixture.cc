#include "tests/attention/attention_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvtier::attention {
namespace {

using transfer::Buffer;
using transfer::Space;

std::uint16_t stored(DType dtype, double value) {
  return dtype == DType::kFloat16 ? oracle::to_fp16(value) : oracle::to_bf16(value);
}

std::uint16_t stored_nan(DType dtype) { return dtype == DType::kFloat16 ? 0x7E00 : 0x7FC0; }

float loaded(DType dtype, const std::byte* bytes) {
  if (dtype == DType::kFloat32) {
    float value = 0.0F;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof(bits));
  return static_cast<float>(dtype == DType::kFloat16 ? oracle::from_fp16(bits)
                                                     : oracle::from_bf16(bits));
}

/// Writes K then V of one (token, KV head), or NaN.
void write_row(const Problem& problem, const SequenceData& data, int kv_head, std::int64_t token,
               bool poison, std::byte* to) {
  const auto d = static_cast<std::size_t>(problem.kv.head_dim);
  const auto begin = (static_cast<std::size_t>(kv_head * data.length + token)) * d;
  std::vector<std::uint16_t> row(2 * d, stored_nan(problem.kv.dtype));
  for (std::size_t x = 0; x < d && !poison; ++x) {
    row[x] = stored(problem.kv.dtype, static_cast<double>(data.keys[begin + x]));
    row[d + x] = stored(problem.kv.dtype, static_cast<double>(data.values[begin + x]));
  }
  std::memcpy(to, row.data(), row.size() * sizeof(std::uint16_t));
}

std::int64_t resident_begin(const SequenceData& data) { return data.length - data.resident_tokens; }

bool in_host_page(const Problem& problem, const SequenceData& data, std::int64_t token) {
  const bool resident = token < problem.kv.sink_capacity || token >= resident_begin(data);
  return !resident && !problem.pages_on_device;
}

}  // namespace

std::vector<std::int64_t> Problem::static_tokens(std::size_t query_index) const {
  const oracle::VisibleRule visible_rule{.mode = rule.mode,
                                         .sink = rule.sink_tokens,
                                         .recent = rule.recent_tokens,
                                         .window = rule.window_tokens,
                                         .dense_from = query_tokens[query_index].dense_from};
  const SequenceData& data =
      sequences[static_cast<std::size_t>(query_tokens[query_index].sequence)];
  return oracle::visible_tokens(visible_rule, data.length, query_tokens[query_index].lag)
      .static_tokens;
}

std::vector<std::int64_t> Problem::attended(std::size_t query_index, int head) const {
  std::vector<std::int64_t> tokens = static_tokens(query_index);
  if (selected.empty()) return tokens;
  const auto list = query_index * static_cast<std::size_t>(kv.kv_heads) +
                    static_cast<std::size_t>(head / group());
  for (const SelectedRow& entry : selected[list]) {
    if (((entry.mask >> (head % group())) & 1) != 0) tokens.push_back(entry.id);
  }
  return tokens;
}

std::vector<double> Problem::biases(std::size_t query_index, int head) const {
  std::vector<double> biases(static_tokens(query_index).size(), 0.0);
  if (selected.empty()) return biases;
  const auto list = query_index * static_cast<std::size_t>(kv.kv_heads) +
                    static_cast<std::size_t>(head / group());
  const auto own = static_cast<std::size_t>(bias_heads <= 1 ? 0 : head % group());
  for (const SelectedRow& entry : selected[list]) {
    if (((entry.mask >> (head % group())) & 1) == 0) continue;
    biases.push_back(bias_heads == 0 ? 0.0 : static_cast<double>(entry.biases[own]));
  }
  return biases;
}

Problem make_problem(std::uint64_t seed, DType dtype, int head_dim, int kv_heads, int group,
                     const std::vector<std::int64_t>& lengths,
                     const std::vector<std::int32_t>& lags) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  Problem problem;
  problem.kv = {.kv_heads = kv_heads,
                .group = group,
                .head_dim = head_dim,
                .page_tokens = 16,
                .sink_capacity = 8,
                .recent_capacity = 24,
                .dtype = dtype};
  problem.rule = {
      .mode = LayerMode::kSparse, .sink_tokens = 8, .recent_tokens = 16, .window_tokens = 0};
  problem.softmax_scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
  for (const std::int64_t length : lengths) {
    SequenceData data;
    data.length = length;
    data.resident_tokens = std::min<std::int64_t>(length, problem.kv.recent_capacity);
    const auto count = static_cast<std::size_t>(kv_heads * length * head_dim);
    for (std::vector<float>* tensor : {&data.keys, &data.values}) {
      tensor->resize(count);
      for (float& x : *tensor) x = static_cast<float>(oracle::round_to(dtype, normal(engine)));
    }
    for (const std::int32_t lag : lags) {
      problem.query_tokens.push_back({static_cast<std::int32_t>(problem.sequences.size()), lag,
                                      std::numeric_limits<std::int64_t>::max()});
    }
    problem.sequences.push_back(std::move(data));
  }
  problem.queries.resize(problem.query_tokens.size() * static_cast<std::size_t>(kv_heads * group) *
                         static_cast<std::size_t>(head_dim));
  for (float& x : problem.queries) x = static_cast<float>(2.0 * normal(engine));
  return problem;
}

void select_at_random(Problem& problem, std::uint64_t seed, double share) {
  std::mt19937_64 engine(seed);
  std::bernoulli_distribution chosen(share);
  problem.selected.clear();
  for (std::size_t query_index = 0; query_index < problem.query_tokens.size(); ++query_index) {
    const SequenceData& data =
        problem.sequences[static_cast<std::size_t>(problem.query_tokens[query_index].sequence)];
    const std::vector<std::int64_t> static_tokens = problem.static_tokens(query_index);
    const std::int64_t visible = data.length - problem.query_tokens[query_index].lag;
    for (int kv_head = 0; kv_head < problem.kv.kv_heads; ++kv_head) {
      std::vector<SelectedRow> list;
      for (std::int64_t token = 0; token < visible; ++token) {
        if (std::binary_search(static_tokens.begin(), static_tokens.end(), token) ||
            !chosen(engine))
          continue;
        const auto heads = static_cast<std::uint16_t>((1U << problem.group()) - 1U);
        const auto mask = static_cast<std::uint16_t>(engine() & heads);
        list.push_back({static_cast<std::int32_t>(token), mask == 0 ? std::uint16_t{1} : mask});
      }
      problem.selected.push_back(std::move(list));
    }
  }
}

void bias_at_random(Problem& problem, std::uint64_t seed, int heads) {
  std::mt19937_64 engine(seed);
  std::uniform_real_distribution<float> bias(-2.0F, 6.0F);
  problem.bias_heads = heads;
  for (auto& list : problem.selected) {
    for (SelectedRow& row : list) {
      row.biases.clear();
      for (int h = 0; h < heads; ++h) row.biases.push_back(std::max(0.0F, bias(engine)));
    }
  }
}

FlashDecodeLimits limits_of(const Problem& problem) {
  return {.num_queries = static_cast<int>(problem.query_tokens.size()),
          .query_heads = problem.kv.query_heads(),
          .head_dim = problem.kv.head_dim};
}

void AttentionTest::place_sequence(const Problem& problem, const SequenceData& data,
                                   Placed& placed) {
  const transfer::KvGeometry& kv = problem.kv;
  const auto row_bytes = static_cast<std::size_t>(kv.row_bytes());
  const auto page_bytes = static_cast<std::size_t>(kv.page_bytes());
  const std::int64_t num_pages = (data.length + kv.page_tokens - 1) / kv.page_tokens;
  std::vector<std::byte> pages(static_cast<std::size_t>(num_pages) * page_bytes);
  std::vector<std::byte> sinks(static_cast<std::size_t>(kv.kv_heads * kv.sink_capacity) *
                               row_bytes);
  std::vector<std::byte> ring(static_cast<std::size_t>(kv.kv_heads * kv.recent_capacity) *
                              row_bytes);
  for (int head = 0; head < kv.kv_heads; ++head) {
    for (std::int64_t t = 0; t < data.length; ++t) {
      const bool sink = t < kv.sink_capacity;
      const bool recent = t >= resident_begin(data);
      const auto in_page = static_cast<std::size_t>(head * kv.page_tokens + t % kv.page_tokens);
      std::byte* page = pages.data() + static_cast<std::size_t>(t / kv.page_tokens) * page_bytes;
      write_row(problem, data, head, t, sink || recent || problem.poison_pages,
                page + in_page * row_bytes);
      if (sink) {
        const auto slot = static_cast<std::size_t>(head * kv.sink_capacity + t);
        write_row(problem, data, head, t, false, sinks.data() + slot * row_bytes);
      }
      if (recent) {
        const auto slot =
            static_cast<std::size_t>(head * kv.recent_capacity + t % kv.recent_capacity);
        write_row(problem, data, head, t, sink, ring.data() + slot * row_bytes);
      }
    }
  }
  const Space space = problem.pages_on_device ? Space::kDevice : Space::kPinnedHost;
  Buffer frames = device_->allocate(space, std::max<std::size_t>(pages.size(), 1));
  if (!pages.empty()) {
    const transfer::CopyRun run{frames.data(), pages.data(), pages.size()};
    stream_->copy({&run, 1});
  }
  std::vector<const std::byte*> table;
  for (std::int64_t p = 0; p < num_pages; ++p) {
    table.push_back(frames.data() + static_cast<std::size_t>(p) * page_bytes);
  }
  const std::vector<transfer::SequenceCounters> counters{
      {.length = data.length, .resident_begin = resident_begin(data), .capacity = data.length}};
  Buffer table_buffer = upload(table);
  Buffer sink_buffer = upload(sinks);
  Buffer ring_buffer = upload(ring);
  Buffer counters_buffer = upload(counters);
  placed.request.sequences.push({.pages = table_buffer.as<const std::byte*>(),
                                 .sink_rows = sink_buffer.data(),
                                 .recent_rows = ring_buffer.data(),
                                 .counters = counters_buffer.as<transfer::SequenceCounters>()});
  for (Buffer* buffer : {&frames, &table_buffer, &sink_buffer, &ring_buffer, &counters_buffer}) {
    placed.kept.push_back(std::move(*buffer));
  }
}

void AttentionTest::place_selection(const Problem& problem, Placed& placed) {
  std::size_t capacity = 1;
  for (const auto& list : problem.selected) capacity = std::max(capacity, list.size());
  const std::size_t lists = problem.selected.size();
  const auto row_bytes = static_cast<std::size_t>(problem.kv.row_bytes());
  const auto staged_capacity = static_cast<std::size_t>(problem.staged_capacity);
  std::vector<std::int32_t> ids(lists * capacity, -1);
  std::vector<std::uint16_t> masks(lists * capacity, 0xFFFF);
  std::vector<std::int32_t> counts(lists);
  std::vector<std::byte> staged(lists * staged_capacity * row_bytes, std::byte{0xFF});
  const auto bias_heads = static_cast<std::size_t>(problem.bias_heads);
  std::vector<float> biases(lists * capacity * bias_heads, std::numeric_limits<float>::quiet_NaN());
  for (std::size_t list = 0; list < lists; ++list) {
    const auto heads = static_cast<std::size_t>(problem.kv.kv_heads);
    const auto sequence = static_cast<std::size_t>(problem.query_tokens[list / heads].sequence);
    counts[list] = static_cast<std::int32_t>(problem.selected[list].size());
    for (std::size_t i = 0; i < problem.selected[list].size(); ++i) {
      const SelectedRow& entry = problem.selected[list][i];
      ids[list * capacity + i] = entry.id;
      masks[list * capacity + i] = entry.mask;
      std::copy_n(entry.biases.begin(), bias_heads,
                  biases.begin() + static_cast<std::ptrdiff_t>((list * capacity + i) * bias_heads));
      if (i >= staged_capacity) continue;
      write_row(problem, problem.sequences[sequence], static_cast<int>(list % heads), entry.id,
                false, staged.data() + (list * staged_capacity + i) * row_bytes);
    }
  }
  placed.kept.push_back(upload(ids));
  placed.selection.ids = placed.kept.back().as<std::int32_t>();
  placed.kept.push_back(upload(masks));
  placed.selection.head_mask = placed.kept.back().as<std::uint16_t>();
  placed.kept.push_back(upload(counts));
  placed.selection.counts = placed.kept.back().as<std::int32_t>();
  placed.selection.capacity = static_cast<std::int64_t>(capacity);
  if (bias_heads > 0) {
    placed.kept.push_back(upload(biases));
    placed.selection.bias = placed.kept.back().as<float>();
    placed.selection.bias_heads = problem.bias_heads;
  }
  if (staged_capacity == 0) return;
  placed.kept.push_back(upload(staged));
  placed.selection.staged = placed.kept.back().data();
  placed.selection.staged_capacity = problem.staged_capacity;
}

AttentionTest::Placed AttentionTest::place(const Problem& problem) {
  Placed placed;
  AttendRequest& request = placed.request;
  request.kv = problem.kv;
  request.rule = problem.rule;
  request.softmax_scale = problem.softmax_scale;
  request.logit_softcap = problem.logit_softcap;
  request.pages_on_device = problem.pages_on_device;
  for (const SequenceData& data : problem.sequences) {
    place_sequence(problem, data, placed);
    request.max_length = std::max(request.max_length, data.length + 5);  // a bound, not the length
  }
  for (const transfer::QueryToken& query : problem.query_tokens) request.query_batch.push(query);
  placed.kept.push_back(upload(problem.queries));
  request.queries = placed.kept.back().as<float>();
  placed.flags = device_->allocate(Space::kPinnedHost, sizeof(transfer::StepFlags));
  request.flags = new (placed.flags.data()) transfer::StepFlags{};
  if (!problem.selected.empty()) place_selection(problem, placed);

  const std::int64_t row_elements = problem.kv.query_heads() * problem.head_stride();
  const auto element = static_cast<std::int64_t>(dtype_bytes(problem.out_dtype));
  const std::size_t rows = problem.query_tokens.size();
  placed.out = allocate<std::byte>(rows * static_cast<std::size_t>(row_elements * element));
  placed.lse = allocate<float>(rows * static_cast<std::size_t>(problem.kv.query_heads()));
  for (std::size_t r = 0; r < rows; ++r) {
    const auto query_index = static_cast<std::int64_t>(r);
    float* lse = placed.lse.as<float>() + query_index * problem.kv.query_heads();
    placed.outputs.push({.out = placed.out.data() + query_index * row_elements * element,
                         .dtype = problem.out_dtype,
                         .head_stride = problem.head_stride(),
                         .lse = problem.with_lse ? lse : nullptr,
                         .lse_stride = 1});
  }
  return placed;
}

Outcome AttentionTest::download_outcome(const Problem& problem, const Placed& placed) {
  Outcome outcome;
  const std::size_t element = dtype_bytes(problem.out_dtype);
  const std::size_t heads =
      problem.query_tokens.size() * static_cast<std::size_t>(problem.kv.query_heads());
  const std::size_t count = heads * static_cast<std::size_t>(problem.head_stride());
  outcome.bytes = download<std::byte>(placed.out.data(), count * element);
  for (std::size_t i = 0; i < count; ++i) {
    outcome.out.push_back(loaded(problem.out_dtype, outcome.bytes.data() + i * element));
  }
  outcome.lse = download<float>(placed.lse.data(), heads);
  outcome.flags = *placed.request.flags;
  return outcome;
}

Outcome AttentionTest::run(const Problem& problem) {
  const Placed placed = place(problem);
  FlashDecode flash(*device_, limits_of(problem));
  flash.attend(*stream_, placed.request, placed.selection, placed.selection.capacity,
               placed.outputs);
  return download_outcome(problem, placed);
}

void AttentionTest::expect_oracle(const Problem& problem) {
  const Outcome found = run(problem);
  const auto d = static_cast<std::size_t>(problem.kv.head_dim);
  const auto kv_heads = static_cast<std::size_t>(problem.kv.kv_heads);
  const double rounding = problem.out_dtype == DType::kFloat32   ? 0.0
                          : problem.out_dtype == DType::kFloat16 ? 0x1p-10
                                                                 : 0x1p-8;
  transfer::StepFlags flags;
  for (std::size_t query_index = 0; query_index < problem.query_tokens.size(); ++query_index) {
    const SequenceData& data =
        problem.sequences[static_cast<std::size_t>(problem.query_tokens[query_index].sequence)];
    for (int head = 0; head < problem.kv.query_heads(); ++head) {
      const auto at = query_index * static_cast<std::size_t>(problem.kv.query_heads()) +
                      static_cast<std::size_t>(head);
      const std::int64_t base = head / problem.group() * data.length * problem.kv.head_dim;
      const oracle::KvView view{data.keys.data() + base, data.values.data() + base,
                                problem.kv.head_dim, problem.kv.head_dim};
      const oracle::Attention expected = oracle::attend_with_biases(
          std::span(problem.queries).subspan(at * d, d), view, problem.attended(query_index, head),
          problem.biases(query_index, head), static_cast<double>(problem.softmax_scale),
          static_cast<double>(problem.logit_softcap));
      const auto stride = static_cast<std::size_t>(problem.head_stride());
      EXPECT_LE(oracle::relative_error(std::span(found.out).subspan(at * stride, d), expected.out),
                tolerance() + rounding)
          << "row " << query_index << ", head " << head;
      if (!problem.with_lse) continue;
      if (std::isinf(expected.lse)) {
        EXPECT_EQ(found.lse[at], -std::numeric_limits<float>::infinity());
      } else {
        EXPECT_NEAR(static_cast<double>(found.lse[at]), expected.lse, tolerance() * 2)
            << "row " << query_index << ", head " << head;
      }
    }
    for (std::size_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      std::vector<std::int64_t> in_place = problem.static_tokens(query_index);
      if (!problem.selected.empty()) {
        const auto& list = problem.selected[query_index * kv_heads + kv_head];
        if (problem.staged_capacity == 0) flags.rows_selected += list.size();
        for (std::size_t i = static_cast<std::size_t>(problem.staged_capacity); i < list.size();
             ++i) {
          in_place.push_back(list[i].id);
        }
      }
      for (const std::int64_t token : in_place) {
        ++(in_host_page(problem, data, token) ? flags.rows_fetched_host : flags.rows_resident);
      }
    }
  }
  EXPECT_EQ(found.flags.rows_fetched_host, flags.rows_fetched_host);
  EXPECT_EQ(found.flags.rows_resident, flags.rows_resident);
  EXPECT_EQ(found.flags.rows_selected, flags.rows_selected);
}

}  // namespace kvtier::attention
