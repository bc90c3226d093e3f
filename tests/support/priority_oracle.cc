#include "support/priority_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>

namespace kvtier::oracle {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// 32-bit arithmetic in 64 bits, one operation at a time.
std::uint64_t low_half(std::uint64_t x) { return x % 0x1'0000'0000U; }
std::uint64_t mixed(std::uint64_t x) {
  x = low_half(x);
  x = x ^ x / 65536U;
  x = low_half(x * 569420461U);
  x = x ^ x / 32768U;
  x = low_half(x * 3545902487U);
  return x ^ x / 32768U;
}
constexpr std::uint64_t kGolden = 2654435769U;  // 2^32 over the golden ratio

}  // namespace

double quantiser_step(int bits) {
  const std::vector<double> steps{1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308};
  return steps[index(bits - 1)];
}

std::vector<double> rotated(const Planes& rotation, std::span<const double> key) {
  double squares = 0.0;
  for (const double x : key) squares += x * x;
  std::vector<double> y(index(rotation.head_dim), 0.0);
  if (squares == 0.0) return y;
  for (int i = 0; i < rotation.head_dim; ++i) {
    for (int x = 0; x < rotation.head_dim; ++x) y[index(i)] += rotation.row(i)[x] * key[index(x)];
    y[index(i)] /= std::sqrt(squares);
  }
  return y;
}

ScalarCode quantise(double y, int bits) {
  const double step = quantiser_step(bits);
  const int levels = 1 << bits;
  // Level n reaches from boundary n to boundary n + 1, but for the first and the last.
  const auto boundary = [&](int n) { return (n - levels / 2) * step; };
  ScalarCode result;
  while (result.code < levels - 1 && y >= boundary(result.code + 1)) ++result.code;
  result.margin = kInfinity;
  for (int n = 1; n < levels; ++n)
    result.margin = std::min(result.margin, std::fabs(y - boundary(n)));
  return result;
}

double code_factor(std::span<const double> y, std::span<const int> codes, int bits,
                   double key_norm) {
  double sum = 0.0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    sum += (codes[i] + 0.5 - (1 << bits) / 2.0) * quantiser_step(bits) * y[i];
  }
  return std::clamp(sum > 0.0 ? key_norm * static_cast<double>(y.size()) / sum : key_norm, 0x1p-24,
                    65504.0);
}

double priority_uniform(const PrioritySetName& set, std::int64_t token) {
  const std::uint64_t of_layer = mixed(static_cast<std::uint64_t>(set.layer) + 1);
  std::uint64_t of_seed = mixed(low_half(set.seed) ^ mixed((set.seed >> 32) ^ of_layer));
  if (set.second) of_seed = mixed(of_seed ^ 2246822507U);
  const std::uint64_t key = mixed(of_seed + static_cast<std::uint64_t>(set.head) * kGolden);
  const std::uint64_t bits = mixed(low_half(static_cast<std::uint64_t>(token) * kGolden) ^ key);
  return std::ldexp(static_cast<double>(bits) + 1.0, -32);
}

PrioritySelection select_by_priority(std::span<const double> log_shares,
                                     std::span<const double> uniforms, std::int64_t k,
                                     double log_least) {
  PrioritySelection result;
  for (std::size_t i = 0; i < log_shares.size(); ++i) {
    result.priorities.push_back(log_shares[i] - std::log(uniforms[i]));
  }
  std::vector<std::int64_t> order(log_shares.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return result.priorities[index(a)] > result.priorities[index(b)];
  });
  result.cut = log_least;
  for (const std::int64_t i : order) {
    if (result.priorities[index(i)] < log_least) break;
    if (std::ssize(result.positions) == k) {
      result.cut = result.priorities[index(i)];
      break;
    }
    result.positions.push_back(i);
  }
  std::sort(result.positions.begin(), result.positions.end());
  for (const std::int64_t i : result.positions) {
    const double share = log_shares[index(i)];
    result.biases.push_back(std::isfinite(share) ? std::max(0.0, result.cut - share) : 0.0);
  }
  return result;
}

std::string compare_priority(const PrioritySelection& expected, std::span<const std::int64_t> found,
                             double slack) {
  std::ostringstream problem;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] < 0 || found[i] >= std::ssize(expected.priorities) ||
        (i > 0 && found[i] <= found[i - 1])) {
      problem << "ids are not ascending eligible tokens at position " << i << ": " << found[i];
      return problem.str();
    }
  }
  double lowest = kInfinity;
  double highest = -kInfinity;
  for (const double r : expected.priorities) {
    if (!std::isfinite(r)) continue;
    lowest = std::min(lowest, r);
    highest = std::max(highest, r);
  }
  const double near = (highest - lowest) * 0x1p-9 + slack;
  std::vector<std::int64_t> different;
  std::set_symmetric_difference(found.begin(), found.end(), expected.positions.begin(),
                                expected.positions.end(), std::back_inserter(different));
  for (const std::int64_t i : different) {
    const double r = expected.priorities[index(i)];
    if (std::fabs(r - expected.cut) <= near) continue;
    problem << "token " << i << " with priority " << r << " differs; the cut is " << expected.cut
            << ", near-ties are within " << near << "; expected " << expected.positions.size()
            << " tokens, found " << found.size();
    return problem.str();
  }
  return {};
}

double log_add(double a, double b) {
  const double larger = std::max(a, b);
  if (larger == -kInfinity) return larger;
  return larger + std::log(std::exp(a - larger) + std::exp(b - larger));
}

Attention attend_with_biases(std::span<const float> query, const KvView& kv,
                             std::span<const std::int64_t> tokens, std::span<const double> biases,
                             double softmax_scale, double softcap) {
  Attention result;
  result.out.assign(index(kv.head_dim), 0.0);
  result.lse = -kInfinity;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    // One token after another: the result so far, and the token, are merged by log-sum-exp.
    const Attention one = attend(query, kv, tokens.subspan(i, 1), softmax_scale, softcap);
    const double weighted = one.lse + biases[i];
    const double total = log_add(result.lse, weighted);
    for (std::size_t x = 0; x < result.out.size(); ++x) {
      result.out[x] =
          result.out[x] * std::exp(result.lse - total) + one.out[x] * std::exp(weighted - total);
    }
    result.lse = total;
  }
  return result;
}

}  // namespace kvtier::oracle
