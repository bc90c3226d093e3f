#include "services/tools/stress/needles.h"

#include "include/types/float16.h"
#include "include/types/log_sum_exp.h"
#include "services/evaluation/random.h"
#include "services/evaluation/threads.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <vector>

namespace kvtier::services {
namespace {

constexpr std::int64_t kBlock = 256;  // keys whose products are formed together

std::vector<std::int64_t> spread_tokens(std::int64_t begin, std::int64_t end, std::int64_t count) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    tokens[static_cast<std::size_t>(i)] = begin + (end - begin) * i / count;
  }
  return tokens;
}

/// Returns q.k / sqrt(head_dim) of queries `[num, head_dim]` and the keys of `tokens`, `[num,
/// tokens]`.
std::vector<float> logits_of(const LayerSource& source, int kv_head, std::span<const float> queries,
                             std::int64_t dim, std::span<const std::int64_t> tokens, int threads) {
  const auto num = static_cast<std::int64_t>(queries.size()) / dim;
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::vector<float> logits(static_cast<std::size_t>(num * count));
  const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
  const auto one_block = [&](std::int64_t begin) {
    const std::int64_t block = std::min(kBlock, count - begin);
    std::vector<std::uint16_t> keys(static_cast<std::size_t>(kBlock * dim));
    std::vector<float> transposed(keys.size());
    source.fill_keys(
        kv_head, tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(block)),
        keys.data());
    for (std::int64_t i = 0; i < dim; ++i) {
      for (std::int64_t t = 0; t < block; ++t) {
        transposed[static_cast<std::size_t>(i * kBlock + t)] =
            BFloat16{keys[static_cast<std::size_t>(t * dim + i)]}.to_float();
      }
    }
    for (std::int64_t row = 0; row < num; ++row) {
      std::array<float, kBlock> sums{};
      const float* const query = queries.data() + row * dim;
      for (std::int64_t i = 0; i < dim; ++i) {
        const float* const keys_i = transposed.data() + i * kBlock;
        for (std::size_t t = 0; t < kBlock; ++t) sums[t] += query[i] * keys_i[t];
      }
      float* const to = logits.data() + row * count + begin;
      for (std::int64_t t = 0; t < block; ++t) to[t] = scale * sums[static_cast<std::size_t>(t)];
    }
  };
  for_each_part(threads, (count + kBlock - 1) / kBlock, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) one_block(block * kBlock);
  });
  return logits;
}

std::vector<float> widen(std::span<const std::uint16_t> bits) {
  std::vector<float> values(bits.size());
  std::ranges::transform(bits, values.begin(),
                         [](std::uint16_t each) { return BFloat16{each}.to_float(); });
  return values;
}

/// Returns the rank-th largest value, counted from 1.
template <typename Value>
Value nth_largest(std::vector<Value> values, std::int64_t rank) {
  const auto nth = values.begin() + std::max<std::int64_t>(rank, 1) - 1;
  std::ranges::nth_element(values, nth, std::greater<>{});
  return *nth;
}

/// Logits of a query and of an independent one, from which those of any drift follow.
struct LogitPair {
  std::span<const float> first;
  std::span<const float> fresh;
};

double overlap_of(const LogitPair& pair, double correlation, std::int64_t k) {
  std::vector<float> second(pair.first.size());
  const auto keep = static_cast<float>(correlation);
  const auto renew = static_cast<float>(std::sqrt(1.0 - correlation * correlation));
  for (std::size_t i = 0; i < second.size(); ++i) {
    second[i] = keep * pair.first[i] + renew * pair.fresh[i];
  }
  const float before = nth_largest(std::vector(pair.first.begin(), pair.first.end()), k);
  const float after = nth_largest(second, k);
  std::int64_t both = 0;
  for (std::size_t i = 0; i < second.size(); ++i) {
    if (pair.first[i] >= before && second[i] >= after) ++both;
  }
  return static_cast<double>(both) / static_cast<double>(k);
}

double mean_overlap(std::span<const LogitPair> pairs, double correlation, double sparsity) {
  const auto tokens = static_cast<double>(pairs.front().first.size());
  const auto k = std::max<std::int64_t>(1, static_cast<std::int64_t>(tokens / sparsity));
  double sum = 0.0;
  for (const LogitPair& pair : pairs) sum += overlap_of(pair, correlation, k);
  return sum / static_cast<double>(pairs.size());
}

double spread_of(std::span<const float> values) {
  double sum = 0.0;
  double squares = 0.0;
  for (const float value : values) {
    sum += static_cast<double>(value);
    squares += static_cast<double>(value) * static_cast<double>(value);
  }
  const auto n = static_cast<double>(values.size());
  return std::sqrt(std::max(squares / n - sum / n * sum / n, 0.0));
}

/// The query heads of one KV head at one step, over a sample of the tokens.
class GroupRanking {
 public:
  GroupRanking(std::span<const float> queries, std::int64_t dim, std::span<const float> logits,
               std::int64_t count)
      : queries_(queries), dim_(dim), weights_(static_cast<std::size_t>(count), 0.0) {
    const std::int64_t group = static_cast<std::int64_t>(queries.size()) / dim;
    for (std::int64_t head = 0; head < group; ++head) {
      const auto own =
          logits.subspan(static_cast<std::size_t>(head * count), static_cast<std::size_t>(count));
      log_sums_.push_back(log_sum_exp(own));
      for (std::size_t t = 0; t < weights_.size(); ++t) {
        weights_[t] += std::exp(static_cast<double>(own[t]) - log_sums_.back());
      }
    }
  }

  /// Returns the rank-th largest sum of softmax weights.
  [[nodiscard]] double weight_at(std::int64_t rank) const { return nth_largest(weights_, rank); }

  /// Returns the key `base` moved along the mean query until its weight is `wanted`.
  [[nodiscard]] std::vector<std::uint16_t> key_with(std::span<const float> base,
                                                    double wanted) const {
    std::vector<double> direction(static_cast<std::size_t>(dim_), 0.0);
    double squares = 0.0;
    for (std::size_t i = 0; i < queries_.size(); ++i) {
      direction[i % direction.size()] += static_cast<double>(queries_[i]);
    }
    for (const double x : direction) squares += x * x;
    for (double& x : direction) x /= std::sqrt(squares);

    const double start = std::sqrt(static_cast<double>(dim_));
    double low = -20.0 * start;
    double high = 20.0 * start;
    for (int i = 0; i < 60; ++i) {
      const double middle = 0.5 * (low + high);
      (weight(base, direction, middle) < wanted ? low : high) = middle;
    }
    std::vector<std::uint16_t> key(direction.size());
    for (std::size_t i = 0; i < key.size(); ++i) {
      key[i] = BFloat16::from_float(
                   static_cast<float>(static_cast<double>(base[i]) + high * direction[i]))
                   .bits;
    }
    return key;
  }

 private:
  [[nodiscard]] double weight(std::span<const float> base, std::span<const double> direction,
                              double shift) const {
    const auto dim = static_cast<std::size_t>(dim_);
    double sum = 0.0;
    for (std::size_t head = 0; head < log_sums_.size(); ++head) {
      double dot = 0.0;
      for (std::size_t i = 0; i < dim; ++i) {
        dot += static_cast<double>(queries_[head * dim + i]) *
               (static_cast<double>(base[i]) + shift * direction[i]);
      }
      sum += std::exp(dot / std::sqrt(static_cast<double>(dim)) - log_sums_[head]);
    }
    return sum;
  }

  std::span<const float> queries_;
  std::int64_t dim_;
  std::vector<double> log_sums_;
  std::vector<double> weights_;
};

}  // namespace

DriftFit calibrate_drift(const SyntheticShape& shape, const LayerSource& source, int threads,
                         DriftModel model, std::optional<double> per_33) {
  constexpr std::int64_t kSample = 16384;
  constexpr int kPairs = 24;
  const std::int64_t dim = shape.head_dim;
  const std::vector<std::int64_t> tokens =
      spread_tokens(0, shape.tokens, std::min(shape.tokens, kSample));

  const int heads = std::min(shape.kv_heads, kPairs);
  std::vector<std::vector<float>> logits;  // of a KV head's queries, two per pair
  for (int head = 0; head < heads; ++head) {
    std::vector<float> queries;
    // Without correlation every step's query is independent.
    QuerySource source_of_queries(shape, 0, 0, {.correlation = 0.0, .norm = 1.0});
    for (int i = 0; i < 2 * kPairs / heads; ++i) {
      const std::vector<float> all = widen(source_of_queries.next());
      const auto own = all.begin() + head * shape.group() * dim;
      queries.insert(queries.end(), own, own + dim);
    }
    logits.push_back(logits_of(source, head, queries, dim, tokens, threads));
  }

  DriftFit found;
  std::vector<LogitPair> pairs;
  double spread = 0.0;
  for (const std::vector<float>& values : logits) {
    for (std::size_t at = 0; at + 2 * tokens.size() <= values.size(); at += 2 * tokens.size()) {
      const LogitPair pair{std::span(values).subspan(at, tokens.size()),
                           std::span(values).subspan(at + tokens.size(), tokens.size())};
      spread += 0.5 * (spread_of(pair.first) + spread_of(pair.fresh));
      pairs.push_back(pair);
    }
  }
  found.drift.norm = kTraceLogitSpread / (spread / static_cast<double>(pairs.size()));
  const StepOverlap of_model = overlap_of(model);
  const double wanted = per_33.value_or(of_model.per_100 + of_model.per_33);
  double low = 0.0;
  double high = 1.0;
  for (int i = 0; i < 12; ++i) {
    const double middle = 0.5 * (low + high);
    double reached = mean_overlap(pairs, middle, 33.0);
    if (!per_33) reached += mean_overlap(pairs, middle, 100.0);
    (reached < wanted ? low : high) = middle;
  }
  found.drift.correlation = high;
  found.overlap = {.per_100 = mean_overlap(pairs, high, 100.0),
                   .per_33 = mean_overlap(pairs, high, 33.0)};
  return found;
}

void plant_needles(const SyntheticShape& shape, const NeedleRequest& request, int threads,
                   const std::function<bool()>& interrupted, LayerSource& source) {
  constexpr std::int64_t kSample = 65536;
  constexpr std::int64_t kMaxSample = 4 * kSample;
  const std::int64_t dim = shape.head_dim;
  const std::int64_t group_values = shape.group() * dim;
  const std::int64_t eligible = request.eligible_end - request.eligible_begin;
  if (request.steps == 0 || eligible < request.steps) return;

  std::vector<std::vector<float>> queries;  // of each step
  QuerySource query_source(shape, request.sequence, request.layer, request.drift);
  for (int step = 0; step < request.first_step; ++step) static_cast<void>(query_source.next());
  for (int step = 0; step < request.steps; ++step) queries.push_back(widen(query_source.next()));

  // Enough tokens for the k / 4-th to be among the sample's 32 first, when there are so many.
  const std::int64_t wanted = 128 * (eligible / std::max<std::int64_t>(request.top_k, 1));
  const std::int64_t count = std::min(eligible, std::clamp(wanted, kSample, kMaxSample));
  const std::vector<std::int64_t> tokens =
      spread_tokens(request.eligible_begin, request.eligible_end, count);
  const auto rank = static_cast<std::int64_t>(
      std::lround(0.25 * static_cast<double>(request.top_k) * static_cast<double>(count) /
                  static_cast<double>(eligible)));
  const std::uint64_t places =
      random_key(shape.seed, (static_cast<std::uint64_t>(request.sequence) << 32U) + 0x4E000000U +
                                 static_cast<std::uint64_t>(request.layer));

  for (int head = 0; head < shape.kv_heads && !interrupted(); ++head) {
    std::vector<float> own;  // `[steps, group, dim]`
    for (const std::vector<float>& all : queries) {
      own.insert(own.end(), all.begin() + head * group_values,
                 all.begin() + (head + 1) * group_values);
    }
    const std::vector<float> logits = logits_of(source, head, own, dim, tokens, threads);
    std::vector<Needle> planted(queries.size());
    for_each_part(threads, request.steps, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t step = first; step < last; ++step) {
        const GroupRanking ranking(
            {own.data() + step * group_values, static_cast<std::size_t>(group_values)}, dim,
            {logits.data() + step * shape.group() * count,
             static_cast<std::size_t>(shape.group() * count)},
            count);
        // One needle in each of as many equal parts of the context as there are steps.
        const std::int64_t part = (step + std::int64_t{5} * head) % request.steps;
        const std::int64_t begin = request.eligible_begin + eligible * part / request.steps;
        const std::int64_t end = request.eligible_begin + eligible * (part + 1) / request.steps;
        const std::uint64_t bits =
            random_bits(places, static_cast<std::uint64_t>(head * request.steps + step));
        const std::int64_t token =
            begin + static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(end - begin));
        std::vector<std::uint16_t> base(static_cast<std::size_t>(dim));
        source.fill_keys(head, {&token, 1}, base.data());
        planted[static_cast<std::size_t>(step)] = {
            .kv_head = head,
            .step = request.first_step + static_cast<int>(step),
            .token = token,
            .key = ranking.key_with(widen(base), ranking.weight_at(rank))};
      }
    });
    for (Needle& needle : planted) source.plant(std::move(needle));
  }
}

}  // namespace kvtier::services
