#include "benchmarks/service/measure.h"

#include <algorithm>

namespace kvtier::bench {

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Comparison compare(int rounds, const std::function<void()>& first,
                   const std::function<void()>& second) {
  first();  // both warm
  second();
  std::vector<double> firsts, seconds, ratios;
  for (int round = 0; round < rounds; ++round) {
    firsts.push_back(seconds_of(first));
    seconds.push_back(seconds_of(second));
    ratios.push_back(firsts.back() / seconds.back());
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  return {median(firsts), median(seconds), median(ratios), *least, *most};
}

}  // namespace kvtier::bench
