#include "selector_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <set>

namespace kvtier::scoring {

namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

double Random::normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

std::vector<std::uint8_t> random_signs(std::uint64_t seed, int count) {
  Random random(seed);
  std::vector<std::uint8_t> signs(static_cast<std::size_t>(count));
  for (std::uint8_t& sign : signs) sign = static_cast<std::uint8_t>(random.bits() & 1);
  return signs;
}

std::vector<float> random_queries(std::uint64_t seed, std::size_t count, double scale) {
  Random random(seed);
  std::vector<float> queries(count);
  for (float& x : queries) x = static_cast<float>(scale * random.normal());
  return queries;
}

TokenSet random_tokens(std::uint64_t seed, int kv_heads, std::int64_t length,
                       const std::vector<std::uint8_t>& signs) {
  Random random(seed);
  TokenSet set;
  set.length = length;
  set.heads.resize(index(kv_heads));
  for (auto& head : set.heads) {
    head.resize(index(length));
    for (oracle::Sketch& token : head) {
      const double agreement = 0.5 + 0.35 * std::pow(random.uniform(), 3.0);
      for (const std::uint8_t sign : signs) {
        token.bits.push_back(random.uniform() < agreement ? sign : std::uint8_t(1 - sign));
      }
      token.key_norm = oracle::round_to(DType::kFloat16, std::exp(random.normal() * 0.3) * 8.0);
      token.value_norm = oracle::round_to(DType::kFloat16, std::exp(random.normal() * 0.5));
    }
  }
  return set;
}

void Problem::query_each(std::uint64_t seed) {
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    query_tokens.push_back(
        {.sequence = static_cast<std::int32_t>(i), .lag = 0, .dense_from = kNoDense});
  }
  make_queries(seed);
}

void Problem::make_queries(std::uint64_t seed) {
  const auto values = static_cast<std::size_t>(query_heads() * planes->view().head_dim);
  queries = random_queries(seed, query_tokens.size() * values);
}

oracle::ScoreSpec Problem::spec() const {
  const bool norm_aware = config.estimator == Estimator::kNormAware;
  oracle::ScoreSpec spec;
  spec.estimator = config.estimator;
  spec.weighting = config.value_weighting;
  if (spec.weighting == ValueWeighting::kDefault) {
    spec.weighting = norm_aware ? ValueWeighting::kLogit : ValueWeighting::kLinear;
  }
  spec.selection = config.selection;
  spec.planes_per_table = config.planes_per_table;
  spec.tables = config.tables;
  spec.num_planes = config.num_planes;
  spec.query_bits = config.query_bits;
  if (config.code == SketchCode::kScalar) {
    spec.code_bits = config.num_planes / planes->view().head_dim;
  }
  spec.tau = static_cast<double>(config.tau);
  spec.softmax_scale = static_cast<double>(softmax_scale);
  return spec;
}

oracle::VisibleRule Problem::rule(int query_index) const {
  return {.mode = mode,
          .sink = config.sink_tokens,
          .recent = config.recent_tokens,
          .window = config.recent_tokens,
          .dense_from = query_tokens[index(query_index)].dense_from};
}

oracle::Visible Problem::visible(int query_index) const {
  const transfer::QueryToken& query = query_tokens[index(query_index)];
  return oracle::visible_tokens(rule(query_index), sequences[index(query.sequence)]->length,
                                query.lag);
}

std::int64_t Problem::k(int query_index) const {
  const oracle::Visible tokens = visible(query_index);
  return oracle::selection_size(config.top_k, config.sparsity, tokens.count,
                                static_cast<std::int64_t>(tokens.eligible.size()));
}

std::vector<std::int64_t> Selected::of(int query_index, int head,
                                       const std::vector<std::int32_t>& all) const {
  std::vector<std::int64_t> result;
  const std::int32_t* from = all.data() + (std::int64_t{query_index} * heads + head) * n;
  for (std::int64_t i = 0; i < n && from[i] != -1; ++i) result.push_back(from[i]);
  return result;
}

oracle::HeadScores expected_scores(const Problem& problem, int query_index, int head) {
  const int dim = problem.planes->view().head_dim;
  const oracle::Planes planes = oracle::planes_from_bf16(
      problem.planes->host_bits(), dim, problem.planes->config().kind == PlaneKind::kOrthogonal);
  const TokenSet& tokens =
      *problem.sequences[index(problem.query_tokens[index(query_index)].sequence)];
  const std::vector<std::int64_t> eligible = problem.visible(query_index).eligible;
  if (eligible.empty()) return {};

  std::vector<std::vector<double>> heads;
  double slack = 0.0;
  double magnitude = 0.0;
  const int sharing = problem.query_heads() / problem.num_sets();
  for (int query_head = head * sharing; query_head < (head + 1) * sharing; ++query_head) {
    std::vector<oracle::Sketch> sketches;
    const auto& all = tokens.heads[index(query_head / problem.group)];
    for (const std::int64_t t : eligible) sketches.push_back(all[index(t)]);
    const float* from = problem.queries.data() +
                        (std::int64_t{query_index} * problem.query_heads() + query_head) * dim;
    const std::vector<double> query(from, from + dim);
    oracle::HeadScores scores = oracle::scores(problem.spec(), planes, query, sketches);
    slack = std::max(slack, scores.slack);
    magnitude = std::max(magnitude, scores.magnitude);
    heads.push_back(std::move(scores.values));
  }
  if (problem.config.selection == Selection::kPerQueryHead) return {heads[0], slack, magnitude};
  oracle::HeadScores combined{oracle::combine(problem.spec(), heads), 2.0 * slack, 0.0};
  if (problem.spec().logit_like()) {
    // A change of all logits by x changes a log-sum-exp by at most x, so a difference by 2 x.
    combined.magnitude = 2.0 * magnitude;
  } else {
    for (const double s : combined.values) combined.magnitude = std::max(combined.magnitude, s);
  }
  return combined;
}

std::unique_ptr<hashing::Planes> SelectorTest::make_planes(PlaneKind kind, int num_planes,
                                                           int head_dim) {
  return std::make_unique<hashing::Planes>(
      *device_, SketchConfig{.kind = kind, .num_planes = num_planes, .seed = 11}, head_dim);
}

namespace {

// Writes the sketch of a token of one KV head to a block.
void put_sketch(const hashing::SketchGeometry& geometry, int head, int at,
                const oracle::Sketch& token, std::byte* block) {
  std::vector<std::uint32_t> words(index(geometry.chunks() * 4), 0);
  for (std::size_t i = 0; i < token.bits.size() && token.finite; ++i) {
    if (token.bits[i] != 0) words[i / 32] |= std::uint32_t{1} << (31 - i % 32);
  }
  for (int chunk = 0; chunk < geometry.chunks(); ++chunk) {
    std::memcpy(block + geometry.chunk_offset(head, chunk, at),
                words.data() + std::ptrdiff_t{4} * chunk, 16);
  }
  const std::uint16_t key = token.finite ? oracle::to_fp16(token.key_norm) : 0x7C00;
  const std::uint16_t value = token.finite ? oracle::to_fp16(token.value_norm) : 0x7C00;
  std::memcpy(block + geometry.key_norm_offset(head, at), &key, 2);
  std::memcpy(block + geometry.value_norm_offset(head, at), &value, 2);
}

}  // namespace

void SelectorTest::place_in_slots(const Problem& problem, SelectRequest& request) {
  const int block_tokens = problem.slot_block;
  std::int64_t widest = 1, used = 0;
  for (const TokenSet* tokens : problem.sequences) {
    const std::int64_t blocks = (tokens->length + block_tokens - 1) / block_tokens;
    widest = std::max(widest, blocks);
    used += blocks;
  }
  // Each block of the cache but one, from the last on, of one sequence after the other.
  const std::int64_t cache = (used + 1) * block_tokens;
  const std::int64_t sketch_blocks = (cache + hashing::kBlockTokens - 1) / hashing::kBlockTokens;
  std::vector<std::byte> host(index(sketch_blocks * request.sketch.block_bytes()), std::byte{0x5A});
  std::vector<std::int32_t> tables(problem.sequences.size() * index(widest), -1);
  std::int64_t next = used;
  for (std::int64_t i = 0; i < widest; ++i) {
    for (std::size_t s = 0; s < problem.sequences.size(); ++s) {
      const TokenSet& tokens = *problem.sequences[s];
      if (i * block_tokens >= tokens.length) continue;
      tables[s * index(widest) + index(i)] = static_cast<std::int32_t>(next);
      const std::int64_t first = i * block_tokens;
      for (std::int64_t t = first; t < std::min(first + block_tokens, tokens.length); ++t) {
        const std::int64_t slot = next * block_tokens + t - first;
        for (int head = 0; head < problem.kv_heads; ++head) {
          put_sketch(request.sketch, head, static_cast<int>(slot % hashing::kBlockTokens),
                     tokens.heads[index(head)][index(t)],
                     host.data() + slot / hashing::kBlockTokens * request.sketch.block_bytes());
        }
      }
      --next;
    }
  }
  kept_.push_back(upload(tables));
  request.slots = {
      .blocks = kept_.back().as<std::int32_t>(), .stride = widest, .block_tokens = block_tokens};
  transfer::Buffer blocks = upload(host);
  std::vector<std::byte*> addresses;
  for (std::int64_t block = 0; block < sketch_blocks; ++block) {
    addresses.push_back(blocks.data() + block * request.sketch.block_bytes());
  }
  kept_.push_back(std::move(blocks));
  kept_.push_back(upload(addresses));
  for (int s = 0; s < request.sketches.count; ++s) {
    request.sketches[s] = kept_.back().as<std::byte*>();
  }
}

DeviceTokens SelectorTest::place(const TokenSet& tokens, const hashing::SketchGeometry& geometry) {
  const std::int64_t count = (tokens.length + hashing::kBlockTokens - 1) / hashing::kBlockTokens;
  // Blocks are placed in reverse, so that a reader that ignores the table is noticed.
  std::vector<std::byte> host(index(count * geometry.block_bytes()), std::byte{0x5A});
  for (int head = 0; head < geometry.kv_heads; ++head) {
    for (std::int64_t t = 0; t < tokens.length; ++t) {
      const std::int64_t block = count - 1 - t / hashing::kBlockTokens;
      put_sketch(geometry, head, static_cast<int>(t % hashing::kBlockTokens),
                 tokens.heads[index(head)][index(t)], host.data() + block * geometry.block_bytes());
    }
  }
  DeviceTokens placed;
  placed.blocks = upload(host);
  std::vector<std::byte*> table;
  for (std::int64_t block = 0; block < count; ++block) {
    table.push_back(placed.blocks.data() + (count - 1 - block) * geometry.block_bytes());
  }
  placed.table = upload(table);
  const transfer::SequenceCounters counters{.length = tokens.length, .capacity = tokens.length};
  placed.counters = upload(std::span<const transfer::SequenceCounters>(&counters, 1));
  return placed;
}

SelectRequest SelectorTest::make_request(const Problem& problem) {
  const hashing::PlanesView planes = problem.planes->view();
  SelectRequest request;
  request.params = score_params(problem.config, planes.head_dim, problem.softmax_scale);
  request.rule = {.mode = problem.mode,
                  .sink_tokens = problem.config.sink_tokens,
                  .recent_tokens = problem.config.recent_tokens,
                  .window_tokens = problem.config.recent_tokens};
  request.kv = {.kv_heads = problem.kv_heads,
                .group = problem.query_heads() / problem.kv_heads,
                .head_dim = planes.head_dim,
                .page_tokens = 64};
  request.sketch = {.kv_heads = problem.kv_heads, .num_planes = planes.sketch_bits()};
  request.planes = planes;
  for (const TokenSet* tokens : problem.sequences) {
    DeviceTokens placed = place(*tokens, request.sketch);
    request.sequences.push({.counters = placed.counters.as<transfer::SequenceCounters>()});
    request.sketches.push(placed.table.as<std::byte*>());
    request.max_length = std::max(request.max_length, tokens->length);
    kept_.push_back(std::move(placed.blocks));
    kept_.push_back(std::move(placed.table));
    kept_.push_back(std::move(placed.counters));
  }
  if (problem.slot_block > 0) place_in_slots(problem, request);
  request.max_length = std::max(request.max_length, problem.longest);
  for (const transfer::QueryToken& query : problem.query_tokens) request.query_batch.push(query);
  kept_.push_back(upload(problem.queries));
  request.queries = kept_.back().as<const float>();
  kept_.push_back(device_->allocate(transfer::Space::kPinnedHost, sizeof(transfer::StepFlags)));
  request.flags = ::new (kept_.back().data()) transfer::StepFlags;
  return request;
}

SelectorLimits SelectorTest::make_limits(const Problem& problem, std::int64_t max_selected) {
  SelectorLimits limits;
  limits.num_queries = static_cast<int>(problem.query_tokens.size());
  limits.query_heads = problem.query_heads();
  limits.kv_heads = problem.kv_heads;
  for (const TokenSet* tokens : problem.sequences) {
    limits.max_tokens = std::max(limits.max_tokens, tokens->length);
  }
  limits.max_tokens = std::max<std::int64_t>({limits.max_tokens, problem.longest, 1});
  limits.max_selected = std::min(max_selected, limits.max_tokens);
  return limits;
}

Selected SelectorTest::download_selection(const Problem& problem, const SelectRequest& request,
                                          Selector& selector, const transfer::SelectionView& view,
                                          int heads, std::int64_t n, bool with_scores) {
  const std::size_t rows = problem.query_tokens.size();
  const std::size_t size = rows * index(heads) * index(n);
  transfer::Buffer ids = allocate<std::int32_t>(size);
  transfer::Buffer scores = allocate<float>(size);
  const IdTensor tensor{.data = ids.as<std::int32_t>(),
                        .query_stride = heads * n,
                        .head_stride = n,
                        .heads = heads,
                        .n = n};
  selector.export_ids(*stream_, request, tensor);
  if (with_scores) {
    selector.export_scores(
        *stream_, request, tensor,
        {.data = scores.as<float>(), .query_stride = heads * n, .head_stride = n});
  }
  Selected found;
  found.heads = heads;
  found.n = n;
  found.ids = download<std::int32_t>(ids.data(), size);
  if (with_scores) found.scores = download<float>(scores.data(), size);
  const std::size_t groups = rows * index(problem.kv_heads);
  found.capacity = view.capacity;
  found.counts = download<std::int32_t>(view.counts, groups);
  found.union_ids = download<std::int32_t>(view.ids, groups * index(view.capacity));
  found.masks = download<std::uint16_t>(view.head_mask, groups * index(view.capacity));
  found.tokens_scored = request.flags->tokens_scored;
  return found;
}

Selected SelectorTest::run(const Problem& problem) {
  std::int64_t k = 1;
  for (std::size_t query_index = 0; query_index < problem.query_tokens.size(); ++query_index) {
    k = std::max(k, problem.k(static_cast<int>(query_index)));
  }
  SelectRequest request = make_request(problem);
  const bool shared = problem.config.selection != Selection::kPerQueryHead;
  Selector selector(*device_, make_limits(problem, shared ? k : k * problem.group));
  const int heads = problem.num_sets();
  request.keep_scores = problem.slot_block > 0;
  const transfer::SelectionView filtered = selector.select(*stream_, request);
  const Selected without_scores =
      download_selection(problem, request, selector, filtered, heads, k + 3, false);
  *request.flags = {};
  request.keep_scores = true;
  const transfer::SelectionView view = selector.select(*stream_, request);
  Selected found = download_selection(problem, request, selector, view, heads, k + 3, true);
  found.ids_without_scores = without_scores.ids;
  EXPECT_EQ(without_scores.tokens_scored, found.tokens_scored);
  return found;
}

void SelectorTest::expect_oracle(const Problem& problem, const Selected& found) {
  std::uint64_t scored = 0;
  for (int query_index = 0; query_index < static_cast<int>(problem.query_tokens.size());
       ++query_index) {
    const oracle::Visible visible = problem.visible(query_index);
    scored += visible.eligible.size() * index(problem.kv_heads);
    const std::int64_t k = problem.k(query_index);
    std::vector<std::set<std::int64_t>> chosen(index(problem.kv_heads));
    for (int head = 0; head < found.heads; ++head) {
      SCOPED_TRACE(::testing::Message() << "row " << query_index << ", head " << head);
      const oracle::HeadScores expected = expected_scores(problem, query_index, head);
      const std::vector<std::int64_t> ids = found.of(query_index, head);
      const std::int64_t offset = visible.eligible.empty() ? 0 : visible.eligible.front();
      std::vector<std::int64_t> positions;
      for (const std::int64_t id : ids) positions.push_back(id - offset);
      EXPECT_EQ(oracle::compare_selection(expected.values, positions, k, expected.slack), "");
      if (!found.ids_without_scores.empty()) {
        std::vector<std::int64_t> others;
        for (const std::int64_t id : found.of(query_index, head, found.ids_without_scores)) {
          others.push_back(id - offset);
        }
        EXPECT_EQ(oracle::compare_selection(expected.values, others, k, expected.slack), "")
            << "without scores";
      }
      chosen[index(head * problem.kv_heads / found.heads)].insert(ids.begin(), ids.end());

      // fp32 sums of at most 1024 terms: 1024 * 2^-24 of the sum of their magnitudes.
      const double tolerance = expected.magnitude * 0x1p-14 + expected.slack;
      const float* scores =
          found.scores.data() + (std::int64_t{query_index} * found.heads + head) * found.n;
      for (std::int64_t i = 0; i < found.n; ++i) {
        if (i >= static_cast<std::int64_t>(ids.size())) {
          ASSERT_EQ(scores[i], -std::numeric_limits<float>::infinity());
          continue;
        }
        const std::int64_t position = positions[index(i)];
        if (position < 0 || position >= std::ssize(expected.values)) continue;
        if (!std::isfinite(expected.values[index(position)])) {
          ASSERT_EQ(scores[i], kLowestScore) << "token " << ids[index(i)];
        } else {
          ASSERT_NEAR(static_cast<double>(scores[i]), expected.values[index(position)], tolerance)
              << "token " << ids[index(i)];
        }
      }
    }
    for (int kv_head = 0; kv_head < problem.kv_heads; ++kv_head) {
      const std::int64_t slot = std::int64_t{query_index} * problem.kv_heads + kv_head;
      const std::int32_t* ids = found.union_ids.data() + slot * found.capacity;
      const auto& expected = chosen[found.heads == 1 ? 0 : index(kv_head)];
      ASSERT_EQ(std::vector<std::int64_t>(ids, ids + found.counts[index(slot)]),
                std::vector<std::int64_t>(expected.begin(), expected.end()))
          << "row " << query_index << ", kv head " << kv_head;
    }
  }
  EXPECT_EQ(found.tokens_scored, scored);
}

}  // namespace kvtier::scoring
