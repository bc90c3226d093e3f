#include "benchmarks/service/measure.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kvtier::bench {

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double cpu_seconds(clockid_t clock) {
  timespec now{};
  if (::clock_gettime(clock, &now) != 0) {
    throw std::runtime_error("expected a clock of CPU time, found none");
  }
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

double cpu_seconds_of(pid_t process) {
  clockid_t clock{};
  if (::clock_getcpuclockid(process, &clock) != 0) {
    throw std::runtime_error("expected the clock of process " + std::to_string(process) +
                             ", found none");
  }
  return cpu_seconds(clock);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Comparison compare(int rounds, const std::function<void()>& first,
                   const std::function<void()>& second, const std::function<double()>& cpu) {
  first();  // both warm
  second();
  std::vector<double> firsts, seconds, ratios, first_cpus, second_cpus, cpu_ratios;
  const auto run = [&cpu](const std::function<void()>& work, std::vector<double>& times,
                          std::vector<double>& cpu_times) {
    const double before = cpu();
    times.push_back(seconds_of(work));
    cpu_times.push_back(cpu() - before);
  };
  for (int round = 0; round < rounds; ++round) {
    run(first, firsts, first_cpus);
    run(second, seconds, second_cpus);
    ratios.push_back(firsts.back() / seconds.back());
    cpu_ratios.push_back(first_cpus.back() / std::max(second_cpus.back(), 1e-9));
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  return {.first = median(firsts),
          .second = median(seconds),
          .ratio = median(ratios),
          .least = *least,
          .most = *most,
          .first_cpu = median(first_cpus),
          .second_cpu = median(second_cpus),
          .cpu_ratio = median(cpu_ratios)};
}

}  // namespace kvtier::bench
