#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"
#include "services/page_cache/page_store.h"
#include "services/page_cache/tenant_pages.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtier::bench {
namespace {

using services::PageLease;
using services::PageStore;
using services::Tenant;

constexpr std::int64_t kPageBytes = 4096;
constexpr std::size_t kStored = 1000;
constexpr std::size_t kPrefix = 8;        // hashes of a lookup, as of a prompt of so many pages
constexpr std::size_t kSamples = 10'000;  // of each kind

/// How well the times of lookups separate one kind of hash from another: the probability that one
/// of the first kind takes longer than one of the second, and the interval of 95 % around it.
struct Separation {
  double auc = 0, half_width = 0;
  double first_p50 = 0, second_p50 = 0;  ///< Seconds.
};

/// Of times that differ in length, ties count half (Mann and Whitney); the interval is that of
/// Hanley and McNeil.
Separation separation_of(std::vector<double> first, std::vector<double> second) {
  std::vector<std::pair<double, bool>> all;
  for (const double time : first) all.emplace_back(time, true);
  for (const double time : second) all.emplace_back(time, false);
  std::sort(all.begin(), all.end());
  double ranks = 0;  // of the first
  for (std::size_t i = 0; i < all.size();) {
    std::size_t end = i;
    while (end < all.size() && all[end].first == all[i].first) ++end;
    const double rank = (static_cast<double>(i + 1) + static_cast<double>(end)) / 2;
    for (; i < end; ++i) ranks += all[i].second ? rank : 0;
  }
  const auto m = static_cast<double>(first.size());
  const auto n = static_cast<double>(second.size());
  const double auc = (ranks - m * (m + 1) / 2) / (m * n);
  const double q1 = auc / (2 - auc);
  const double q2 = 2 * auc * auc / (1 + auc);
  const double variance =
      (auc * (1 - auc) + (m - 1) * (q1 - auc * auc) + (n - 1) * (q2 - auc * auc)) / (m * n);
  return {.auc = auc,
          .half_width = 1.96 * std::sqrt(std::max(0.0, variance)),
          .first_p50 = median(std::move(first)),
          .second_p50 = median(std::move(second))};
}

std::string hash_of(const char* kind, std::size_t i) {
  std::string hash = std::string(kind) + std::to_string(i);
  hash.resize(32, '.');  // one length for all
  return hash;
}

/// Looks for hashes that the owner has stored, and for others, in an order drawn at random.
Separation probe(PageLease& prober) {
  std::mt19937_64 random(1);
  std::vector<bool> kinds(2 * kSamples);
  std::fill(kinds.begin(), kinds.begin() + kSamples, true);
  std::shuffle(kinds.begin(), kinds.end(), random);
  const std::uint32_t layer = 0;
  std::vector<double> stored, unknown;
  for (const bool is_stored : kinds) {
    std::array<std::string, kPrefix> hashes;
    for (std::string& hash : hashes) {
      hash = hash_of(is_stored ? "stored" : "absent", random() % kStored);
    }
    const std::vector<std::string_view> wanted(hashes.begin(), hashes.end());
    const double time = seconds_of([&] {
      static_cast<void>(prober.pages.lookup(prober, {{&layer, 1}, wanted, true}));
    });
    (is_stored ? stored : unknown).push_back(time);
  }
  return separation_of(std::move(stored), std::move(unknown));
}

}  // namespace

nlohmann::json isolation_rows(const ServerProcess& /*server*/, const Settings& /*settings*/) {
  services::PageStoreOptions options;
  options.arena_bytes = std::int64_t{64} << 20;
  PageStore store(options);
  Tenant owner{0, {"owner", "", "", {}}};
  Tenant other{1, {"other", "", "", {}}};
  const auto open = [&](Tenant& tenant) {
    return store.open(tenant, {.model = "m", .page_bytes = kPageBytes});
  };
  const auto owners = open(owner);
  const auto others = open(other);
  const std::vector<std::byte> bytes(static_cast<std::size_t>(kPageBytes));
  for (PageLease* lease : {owners.get(), others.get()}) {
    for (std::size_t i = 0; i < kStored; ++i) {
      const std::string hash = hash_of(lease == owners.get() ? "stored" : "others", i);
      const std::string handle = lease->pages.reserve(*lease, {.hash = hash}).handle;
      static_cast<void>(lease->pages.commit(*lease, handle, bytes));
    }
  }
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [by, lease] :
       {std::pair("another tenant", others.get()), std::pair("the same tenant", owners.get())}) {
    const Separation times = probe(*lease);
    rows.push_back({{"what", "lookup_timing"},
                    {"by", by},
                    {"samples", kSamples},
                    {"auc", times.auc},
                    {"auc_least", times.auc - times.half_width},
                    {"auc_most", times.auc + times.half_width},
                    {"p50_us", times.first_p50 * 1e6},
                    {"baseline_p50_us", times.second_p50 * 1e6}});
  }
  return rows;
}

}  // namespace kvtier::bench
