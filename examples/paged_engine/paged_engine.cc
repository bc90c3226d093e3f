// An engine with a paged KV cache of its own, and kvtier for the attention of its decode steps:
// blocks, block tables and sequences are the engine's, the sketches of its slots are kvtier's.
// Sequences come and go, their blocks are used again, and each step of the batch is compared with
// attention over all tokens. On the CPU; docs/engines/paged.md says what differs on a GPU.

#include "kvtier/error.h"
#include "kvtier/paged.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kBlock = 16, kBlocks = 1024, kBatch = 4;
constexpr std::int64_t kMaxTokens = 4096, kRow = kKvHeads * kDim, kMaxBlocks = kMaxTokens / kBlock;

std::uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}
float from_bf16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

/// The engine: one layer of attention.
class PagedEngine {
 public:
  PagedEngine()
      : keys_(kBlocks * kBlock * kRow),
        values_(keys_.size()),
        free_(kBlocks),
        tables_(kBatch * kMaxBlocks),
        lengths_(kBatch),
        sketches_(config()) {
    std::iota(free_.begin(), free_.end(), 0);
    std::shuffle(free_.begin(), free_.end(), random_);
  }

  /// Puts a new sequence in place `s`, and gives the blocks of the one before back.
  void admit(std::size_t s, int tokens) {
    for (std::int32_t i = 0; i < (lengths_[s] + kBlock - 1) / kBlock; ++i) {
      free_.push_back(table(s)[i]);
    }
    lengths_[s] = 0;
    append(std::vector<std::size_t>(static_cast<std::size_t>(tokens), s));
  }

  /// One token of every sequence, then attention; returns the largest error against dense.
  double step() {
    std::vector<std::size_t> places(kBatch);
    std::iota(places.begin(), places.end(), 0U);
    append(places);
    std::vector<float> query(kBatch * kHeads * kDim), out(query.size());
    for (std::size_t i = 0; i < query.size(); ++i) {  // like the key of a token of long ago
      const std::size_t s = i / (kHeads * kDim), head = i / kDim % kHeads;
      const std::size_t at = row(s, lengths_[s] / 3) + head / (kHeads / kKvHeads) * kDim + i % kDim;
      query[i] = 2.0F * from_bf16(keys_[at]) + 0.3F * normal_(random_);
    }
    const auto bf16 = kvtier::DType::kBFloat16;
    const kvtier::PagedLayer cache{
        .keys = {keys_.data(), bf16, {kBlocks, kBlock, kKvHeads, kDim}},
        .values = {values_.data(), bf16, {kBlocks, kBlock, kKvHeads, kDim}}};
    const kvtier::PagedBatch batch{
        .blocks = {tables_.data(), kvtier::DType::kInt32, {kBatch, kMaxBlocks}},
        .lengths = {lengths_.data(), kvtier::DType::kInt32, {kBatch}}};
    const auto fp32 = kvtier::DType::kFloat32;
    sketches_.attend(0, batch, {query.data(), fp32, {kBatch, kHeads, kDim}}, cache,
                     {.out = {out.data(), fp32, {kBatch, kHeads, kDim}}, .lse = {}});
    double worst = 0.0;
    for (std::size_t s = 0; s < kBatch; ++s) {
      for (std::size_t head = 0; head < kHeads; ++head) {
        worst = std::max(worst, error_of(s, head, query, out));
      }
    }
    return worst;
  }

 private:
  static kvtier::PagedConfig config() {
    kvtier::PagedConfig config;
    config.backend = kvtier::Backend::kCpu;
    config.model = {.query_heads = kHeads, .kv_heads = kKvHeads, .head_dim = kDim};
    config.retrieval.top_k = 256;
    config.num_blocks = kBlocks;
    config.block_tokens = kBlock;
    config.max_tokens = kMaxTokens;
    return config;
  }
  std::int32_t* table(std::size_t s) { return tables_.data() + s * kMaxBlocks; }
  /// Where a token's row begins in the cache.
  std::size_t row(std::size_t s, std::int32_t token) {
    return static_cast<std::size_t>((table(s)[token / kBlock] * kBlock + token % kBlock) * kRow);
  }

  /// Writes a random token to each sequence named, and sketches all of them in one call.
  void append(const std::vector<std::size_t>& sequences) {
    const auto tokens = static_cast<std::int64_t>(sequences.size());
    std::vector<std::uint16_t> keys, values;
    std::vector<std::int32_t> slots;
    for (const std::size_t s : sequences) {
      const std::int32_t token = lengths_[s]++;
      if (token % kBlock == 0) {
        table(s)[token / kBlock] = free_.back();
        free_.pop_back();
      }
      slots.push_back(static_cast<std::int32_t>(row(s, token)) / static_cast<std::int32_t>(kRow));
      for (std::int64_t i = 0; i < kRow; ++i) {
        const std::size_t at = row(s, token) + static_cast<std::size_t>(i);
        keys.push_back(keys_[at] = to_bf16(normal_(random_)));
        values.push_back(values_[at] = to_bf16(normal_(random_)));
      }
    }
    const auto bf16 = kvtier::DType::kBFloat16;
    sketches_.store(0, {keys.data(), bf16, {tokens, kKvHeads, kDim}},
                    {values.data(), bf16, {tokens, kKvHeads, kDim}},
                    {slots.data(), kvtier::DType::kInt32, {tokens}});
  }

  /// ||out - dense|| / ||dense|| of one head.
  double error_of(std::size_t s, std::size_t head, const std::vector<float>& query,
                  const std::vector<float>& out) {
    const std::size_t from = (s * kHeads + head) * kDim;
    const std::size_t of_head = head / (kHeads / kKvHeads) * kDim;
    std::vector<double> dense(kDim);
    double total = 0.0;
    for (std::int32_t token = 0; token < lengths_[s]; ++token) {
      const std::size_t at = row(s, token) + of_head;
      double logit = 0.0;
      for (std::size_t i = 0; i < kDim; ++i) {
        logit +=
            static_cast<double>(query[from + i]) * static_cast<double>(from_bf16(keys_[at + i]));
      }
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(kDim)));
      total += weight;
      for (std::size_t i = 0; i < kDim; ++i) {
        dense[i] += weight * static_cast<double>(from_bf16(values_[at + i]));
      }
    }
    double difference = 0.0, norm = 0.0;
    for (std::size_t i = 0; i < kDim; ++i) {
      difference += std::pow(static_cast<double>(out[from + i]) - dense[i] / total, 2);
      norm += std::pow(dense[i] / total, 2);
    }
    return std::sqrt(difference / norm);
  }

  std::vector<std::uint16_t> keys_, values_;  // [blocks][tokens][KV heads][dim]
  std::vector<std::int32_t> free_;
  std::vector<std::int32_t> tables_, lengths_;
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
  kvtier::PagedSketches sketches_;
};

}  // namespace

int main() try {
  PagedEngine engine;
  for (std::size_t s = 0; s < kBatch; ++s) engine.admit(s, 500 + 900 * static_cast<int>(s));
  double worst = 0.0;
  for (int step = 0; step < 24; ++step) {
    if (step % 8 == 7) engine.admit(static_cast<std::size_t>(step / 8), 2600);  // one is done
    worst = std::max(worst, engine.step());
  }
  std::printf("24 steps of %d sequences, 256 of up to 3,300 tokens selected: largest error %.4f\n",
              kBatch, worst);
  return worst < 0.1 ? 0 : 1;
} catch (const kvtier::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
