#include "support/oracle.h"

#include "support/priority_oracle.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <sstream>

namespace kvtier::oracle {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

double dot(const double* a, const double* b, int n) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

double norm(std::span<const double> x) {
  return std::sqrt(dot(x.data(), x.data(), static_cast<int>(x.size())));
}

double clamp_norm(double x) { return std::clamp(x, 0x1p-24, 65504.0); }

// Rounds to a binary format with `digits` significand bits and smallest normal exponent
// `min_exponent`.
double round_binary(double value, int digits, int min_exponent) {
  if (value == 0.0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), min_exponent);
  const double unit = std::ldexp(1.0, exponent - digits + 1);
  return std::nearbyint(value / unit) * unit;
}

// Logit of a calibrated soft score.
double calibrated(const ScoreSpec& spec, double collisions, double mean_agreement,
                  double query_norm, const Sketch& token) {
  double cosine = 0.0;
  if (mean_agreement > 0.0 && query_norm > 0.0) {
    const double share = collisions / spec.tables * std::ldexp(1.0, spec.planes_per_table);
    const double mean = std::pow(share, 1.0 / spec.planes_per_table);
    const double angle = std::numbers::pi / 2.0 * (1.0 - (mean - 1.0) / mean_agreement);
    cosine = std::cos(std::clamp(angle, 0.0, std::numbers::pi));
  }
  return query_norm * token.key_norm * cosine * spec.softmax_scale + std::log(token.value_norm);
}

}  // namespace

double from_bf16(std::uint16_t bits) {
  return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
}

double from_fp16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double value = 0.0;
  if (exponent == 31) {
    value = mantissa == 0 ? kInfinity : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, -24);
  } else {
    value = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t to_bf16(double value) {
  const auto rounded = static_cast<float>(round_binary(value, 8, -126));
  const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(rounded) >> 16);
  return std::isnan(value) ? static_cast<std::uint16_t>(bits | 0x40) : bits;
}

std::uint16_t to_fp16(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00);
  const double magnitude = std::fabs(round_binary(value, 11, -14));
  if (magnitude > 65504.0) return static_cast<std::uint16_t>(sign | 0x7C00);
  if (magnitude < 0x1p-14) {
    return static_cast<std::uint16_t>(sign | static_cast<int>(std::ldexp(magnitude, 24)));
  }
  const int exponent = std::ilogb(magnitude);
  const int mantissa = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | ((exponent + 15) << 10) | mantissa);
}

double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::kBFloat16:
      return from_bf16(to_bf16(value));
    case DType::kFloat16:
      return from_fp16(to_fp16(value));
    case DType::kFloat32:
    case DType::kInt32:
      break;
  }
  return static_cast<double>(static_cast<float>(value));
}

Planes planes_from_bf16(std::span<const std::uint16_t> bits, int head_dim, bool orthogonal) {
  Planes planes;
  planes.num_planes = static_cast<int>(bits.size()) / head_dim;
  planes.head_dim = head_dim;
  planes.orthogonal = orthogonal;
  planes.values.reserve(bits.size());
  for (const std::uint16_t b : bits) planes.values.push_back(from_bf16(b));
  return planes;
}

Sketch sketch(const Planes& planes, std::span<const double> key, std::span<const double> value) {
  Sketch result;
  for (const double x : key) result.finite = result.finite && std::isfinite(x);
  for (const double x : value) result.finite = result.finite && std::isfinite(x);
  const double key_norm = norm(key);
  for (int i = 0; i < planes.num_planes; ++i) {
    const double* w = planes.row(i);
    const double projection = dot(w, key.data(), planes.head_dim);
    const double scale = key_norm * norm({w, index(planes.head_dim)});
    result.bits.push_back(projection >= 0.0 ? 1 : 0);
    result.margins.push_back(scale > 0.0 ? std::fabs(projection) / scale : 0.0);
  }
  result.key_norm = clamp_norm(key_norm);
  result.value_norm = clamp_norm(norm(value));
  return result;
}

std::vector<double> bucket_probabilities(const Planes& planes, std::span<const double> query,
                                         int table, int planes_per_table, double tau) {
  const int corners = 1 << planes_per_table;
  std::vector<double> p(index(corners));
  std::vector<double> u;
  for (int i = 0; i < planes_per_table; ++i) {
    const double* w = planes.row(table * planes_per_table + i);
    u.push_back(std::tanh(dot(w, query.data(), planes.head_dim)) / std::sqrt(planes.head_dim));
  }
  double largest = -kInfinity;
  for (int r = 0; r < corners; ++r) {
    double agreement = 0.0;
    for (int i = 0; i < planes_per_table; ++i) {
      const bool set = ((r >> (planes_per_table - 1 - i)) & 1) != 0;
      agreement += set ? u[index(i)] : -u[index(i)];
    }
    p[index(r)] = agreement / tau;
    largest = std::max(largest, p[index(r)]);
  }
  double sum = 0.0;
  for (double& x : p) sum += x = std::exp(x - largest);
  for (double& x : p) x /= sum;
  return p;
}

int bucket(std::span<const std::uint8_t> bits, int table, int planes_per_table) {
  int id = 0;
  for (int i = 0; i < planes_per_table; ++i) {
    id = 2 * id + bits[index(table * planes_per_table + i)];
  }
  return id;
}

QueryWeights query_weights(const Planes& planes, std::span<const double> query, int num_planes,
                           int query_bits) {
  QueryWeights weights;
  double largest = 0.0;
  for (int i = 0; i < num_planes; ++i) {
    weights.values.push_back(dot(planes.row(i), query.data(), planes.head_dim));
    largest = std::max(largest, std::fabs(weights.values.back()));
  }
  if (query_bits == 0) return weights;
  const double levels = std::ldexp(1.0, query_bits - 1) - 1.0;
  weights.step = largest / levels;
  for (double& w : weights.values) {
    const double exact = largest > 0.0 ? levels * w / largest : 0.0;
    if (std::fabs(std::fabs(exact - std::trunc(exact)) - 0.5) < 1e-3) ++weights.uncertain;
    w = std::nearbyint(exact);
  }
  return weights;
}

HeadScores scores(const ScoreSpec& spec, const Planes& planes, std::span<const double> query,
                  std::span<const Sketch> tokens) {
  HeadScores result;
  result.values.assign(tokens.size(), -kInfinity);
  const int p = spec.planes_per_table;
  if (spec.estimator == Estimator::kNormAware) {
    const bool scalar = spec.code_bits > 0;
    const int coordinates = scalar ? spec.num_planes / spec.code_bits : spec.num_planes;
    const QueryWeights weights = query_weights(planes, query, coordinates, spec.query_bits);
    double c = std::sqrt(std::numbers::pi / 2.0) / spec.num_planes;
    if (planes.orthogonal) c /= 1.0 + 1.0 / (4.0 * planes.head_dim);
    if (scalar) c = quantiser_step(spec.code_bits) / (2.0 * planes.head_dim);
    double largest_norm = 0.0;
    double weight_sum = 0.0;
    const double most = scalar ? std::exp2(spec.code_bits) - 1.0 : 1.0;  // 2^(B-1) + .. + 1
    for (const double w : weights.values) weight_sum += most * std::fabs(w);
    for (std::size_t j = 0; j < tokens.size(); ++j) {
      const Sketch& token = tokens[j];
      if (!token.finite) continue;
      double s = 0.0;
      for (int i = 0; i < spec.num_planes; ++i) {
        const double sign = token.bits[index(i)] != 0 ? 1.0 : -1.0;
        const double bit_weight = scalar ? std::exp2(spec.code_bits - 1 - i / coordinates) : 1.0;
        s += sign * bit_weight * weights.values[index(i % coordinates)];
      }
      result.values[j] = c * weights.step * s * token.key_norm * spec.softmax_scale;
      if (spec.weighting == ValueWeighting::kLogit) result.values[j] += std::log(token.value_norm);
      largest_norm = std::max(largest_norm, token.key_norm);
      result.magnitude = std::max(
          result.magnitude, c * weights.step * weight_sum * token.key_norm * spec.softmax_scale +
                                std::fabs(std::log(token.value_norm)));
    }
    result.slack = weights.uncertain * most * c * weights.step * largest_norm * spec.softmax_scale;
    return result;
  }

  std::vector<double> sums(tokens.size(), 0.0);
  for (int table = 0; table < spec.tables; ++table) {
    std::vector<double> probability;
    if (spec.estimator == Estimator::kSoftCollision) {
      probability = bucket_probabilities(planes, query, table, p, spec.tau);
    } else {
      probability.assign(std::size_t{1} << p, 0.0);
      std::vector<std::uint8_t> signs;
      for (int i = 0; i < p * spec.tables; ++i) {
        signs.push_back(dot(planes.row(i), query.data(), planes.head_dim) >= 0.0 ? 1 : 0);
      }
      probability[index(bucket(signs, table, p))] = 1.0;
    }
    for (std::size_t j = 0; j < tokens.size(); ++j) {
      if (tokens[j].finite) sums[j] += probability[index(bucket(tokens[j].bits, table, p))];
    }
  }
  double agreement = 0.0;
  for (int i = 0; i < p * spec.tables; ++i) {
    const double u =
        std::tanh(dot(planes.row(i), query.data(), planes.head_dim)) / std::sqrt(planes.head_dim);
    agreement += std::fabs(std::tanh(u / spec.tau)) / (p * spec.tables);
  }
  for (std::size_t j = 0; j < tokens.size(); ++j) {
    if (!tokens[j].finite) continue;
    if (spec.weighting == ValueWeighting::kCalibrated) {
      result.values[j] = calibrated(spec, sums[j], agreement, norm(query), tokens[j]);
      result.magnitude =
          std::max(result.magnitude, norm(query) * tokens[j].key_norm * spec.softmax_scale +
                                         std::fabs(std::log(tokens[j].value_norm)));
    } else {
      result.values[j] =
          spec.weighting == ValueWeighting::kLinear ? sums[j] * tokens[j].value_norm : sums[j];
      result.magnitude = std::max(result.magnitude, result.values[j]);
    }
  }
  return result;
}

std::vector<double> combine(const ScoreSpec& spec, std::span<const std::vector<double>> heads) {
  const std::size_t tokens = heads.empty() ? 0 : heads[0].size();
  const auto num_heads = static_cast<double>(heads.size());
  // Of each head: the log-sum-exp of its logits, or the sum of its collisions.
  std::vector<double> totals;
  for (const auto& head : heads) {
    double largest = -kInfinity;
    for (const double s : head) largest = std::max(largest, s);
    double total = 0.0;
    for (const double s : head) {
      if (s == -kInfinity) continue;
      total += spec.logit_like() ? std::exp(s - largest) : s;
    }
    totals.push_back(spec.logit_like() ? largest + std::log(total) : total);
  }
  std::vector<double> combined(tokens, -kInfinity);
  for (std::size_t j = 0; j < tokens; ++j) {
    double largest = -kInfinity;
    for (std::size_t h = 0; h < heads.size(); ++h) {
      if (heads[h][j] > -kInfinity) largest = std::max(largest, heads[h][j] - totals[h]);
    }
    if (largest == -kInfinity) continue;  // finite for no head
    double sum = 0.0;
    for (std::size_t h = 0; h < heads.size(); ++h) {
      if (heads[h][j] == -kInfinity) continue;
      if (spec.logit_like()) {
        sum += std::exp(heads[h][j] - totals[h] - largest);
      } else if (totals[h] > 0.0) {
        sum += heads[h][j] / totals[h];
      }
    }
    combined[j] = spec.logit_like() ? largest + std::log(sum / num_heads) : sum / num_heads;
  }
  return combined;
}

Visible visible_tokens(const VisibleRule& rule, std::int64_t length, std::int64_t lag) {
  Visible result;
  result.count = std::max<std::int64_t>(length - lag, 0);
  for (std::int64_t t = 0; t < result.count; ++t) {
    const bool recent = t >= result.count - rule.recent || t >= rule.dense_from;
    switch (rule.mode) {
      case LayerMode::kDense:
        result.static_tokens.push_back(t);
        break;
      case LayerMode::kSlidingWindow:
        if (t >= result.count - rule.window) result.static_tokens.push_back(t);
        break;
      case LayerMode::kSparse:
        (t < rule.sink || recent ? result.static_tokens : result.eligible).push_back(t);
        break;
    }
  }
  return result;
}

std::int64_t selection_size(int top_k, double sparsity, std::int64_t visible,
                            std::int64_t eligible) {
  std::int64_t k = top_k;
  if (sparsity > 0.0) {
    k = std::max<std::int64_t>(
        1, static_cast<std::int64_t>(std::floor(static_cast<double>(visible) / sparsity)));
  }
  return std::min(k, eligible);
}

std::vector<std::int64_t> top_k(std::span<const double> scores, std::int64_t k) {
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return scores[index(a)] > scores[index(b)];
  });
  order.resize(std::min(order.size(), index(k)));
  std::sort(order.begin(), order.end());
  return order;
}

std::string compare_selection(std::span<const double> scores, std::span<const std::int64_t> found,
                              std::int64_t k, double slack) {
  std::ostringstream problem;
  const std::vector<std::int64_t> expected = top_k(scores, k);
  if (found.size() != expected.size()) {
    problem << "expected " << expected.size() << " tokens, found " << found.size();
    return problem.str();
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] < 0 || found[i] >= static_cast<std::int64_t>(scores.size()) ||
        (i > 0 && found[i] <= found[i - 1])) {
      problem << "ids are not ascending eligible tokens at position " << i << ": " << found[i];
      return problem.str();
    }
  }
  if (expected.empty()) return {};

  double kth = kInfinity;
  for (const std::int64_t j : expected) kth = std::min(kth, scores[index(j)]);
  double lowest = kInfinity;
  double highest = -kInfinity;
  for (const double s : scores) {
    if (!std::isfinite(s)) continue;
    lowest = std::min(lowest, s);
    highest = std::max(highest, s);
  }
  const double near = (highest - lowest) * 0x1p-9 + slack;
  std::vector<std::int64_t> different;
  std::set_symmetric_difference(found.begin(), found.end(), expected.begin(), expected.end(),
                                std::back_inserter(different));
  for (const std::int64_t j : different) {
    const double distance = std::fabs(scores[index(j)] - kth);
    if (scores[index(j)] == kth || distance <= near) continue;
    problem << "token " << j << " with score " << scores[index(j)] << " differs; the k-th score is "
            << kth << ", near-ties are within " << near;
    return problem.str();
  }
  return {};
}

Attention attend(std::span<const float> query, const KvView& kv,
                 std::span<const std::int64_t> tokens, double softmax_scale, double softcap) {
  const int d = kv.head_dim;
  Attention result;
  result.out.assign(index(d), 0.0);
  result.lse = -kInfinity;
  std::vector<double> logits;
  double largest = -kInfinity;
  for (const std::int64_t t : tokens) {
    double logit = 0.0;
    for (int i = 0; i < d; ++i) {
      logit += static_cast<double>(query[index(i)]) *
               static_cast<double>(kv.keys[t * kv.token_stride + i]);
    }
    logit *= softmax_scale;
    if (softcap > 0.0) logit = softcap * std::tanh(logit / softcap);
    logits.push_back(logit);
    largest = std::max(largest, logit);
  }
  if (tokens.empty()) return result;
  double sum = 0.0;
  for (std::size_t n = 0; n < tokens.size(); ++n) {
    const double weight = std::exp(logits[n] - largest);
    sum += weight;
    for (int i = 0; i < d; ++i) {
      result.out[index(i)] +=
          weight * static_cast<double>(kv.values[tokens[n] * kv.token_stride + i]);
    }
  }
  for (double& x : result.out) x /= sum;
  result.lse = largest + std::log(sum);
  return result;
}

double relative_error(std::span<const float> a, std::span<const double> b) {
  double difference = 0.0;
  double reference = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double delta = static_cast<double>(a[i]) - b[i];
    difference += delta * delta;
    reference += b[i] * b[i];
  }
  return std::sqrt(reference > 0.0 ? difference / reference : difference);
}

}  // namespace kvtier::oracle
