#include "kvtier/engine.h"

#include "benchmarks/service/measure.h"
#include "benchmarks/tiers/bench_folder.h"
#include "benchmarks/tiers/benchmarks.h"
#include "benchmarks/tiers/fio.h"
#include "transfer/tiers/file_ops.h"
#include "transfer/tiers/file_tier.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <iterator>
#include <random>
#include <stdexcept>
#include <unistd.h>

namespace kvtier::bench {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBatchBytes = 128 * MiB;  // of pages that a get asks for, as for a session
constexpr std::size_t kReadBytes = 256 * KiB;   // of one transfer of the tier, at most
constexpr std::size_t kHead = 4096;             // of a record, before its page
constexpr std::chrono::seconds kLong(60);

std::size_t median_rate(std::vector<double> rates) {
  return static_cast<std::size_t>(median(std::move(rates)));
}

/// A tier full of pages of one size, and the keys in a random order.
class FullTier {
 public:
  FullTier(const fs::path& folder, std::size_t page_bytes, std::size_t bytes)
      : folder_(folder),
        page_bytes_(page_bytes),
        options_(options_of(folder, page_bytes, bytes)),
        tier_(options_) {
    std::mt19937_64 random(1);
    std::vector<std::byte> page(page_bytes);
    for (std::size_t i = 0; i < page_bytes; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(&page[i], &word, 8);
    }
    for (std::size_t done = 0; done < bytes; done += page_bytes) {
      PageKey key{};
      for (auto& byte : key) byte = static_cast<std::uint8_t>(random());
      std::memcpy(page.data(), key.data(), key.size());
      TierPut put{.key = key, .bytes = page};
      tier_.put({&put, 1}, std::chrono::steady_clock::now() + kLong);
      if (put.status != TierStatus::kOk) throw std::runtime_error(tier_.describe() + ": is full");
      keys_.push_back(key);
    }
    ::sync();  // what is read is on the disk, and the disk is idle
  }

  struct Rate {
    double bytes_per_second = 0;
    double cpu = 0;  ///< Share of the time in which a core of this process has worked.
  };
  /// Gets `bytes` of pages, each once at most, and returns how fast.
  Rate read(std::size_t bytes) {
    std::shuffle(keys_.begin(), keys_.end(), order_);
    const std::size_t count = std::min(bytes / page_bytes_, keys_.size());
    const std::clock_t before = std::clock();
    const double seconds = seconds_of([&] {
      std::vector<TierGet> gets;
      const std::size_t batch = kBatchBytes / page_bytes_;
      for (std::size_t at = 0; at < count; at += batch) {
        gets.clear();
        for (std::size_t i = at; i < std::min(at + batch, count); ++i) {
          gets.push_back({.key = keys_[i],
                          .bytes = batch_.bytes().subspan((i - at) * page_bytes_, page_bytes_)});
        }
        tier_.get(gets, std::chrono::steady_clock::now() + kLong);
        for (const TierGet& get : gets) {
          if (get.status != TierStatus::kOk) throw std::runtime_error("a page did not come back");
        }
      }
    });
    const double cpu = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
    return {static_cast<double>(count * page_bytes_) / seconds, cpu / seconds};
  }

  [[nodiscard]] FioSettings fio() const {
    FioSettings settings;
    for (const auto& file : fs::directory_iterator(folder_)) {
      if (file.path().extension() == ".segment") settings.files.push_back(file.path());
    }
    // The newest is not full: what was not written is not read from the disk.
    std::sort(settings.files.begin(), settings.files.end());
    if (settings.files.size() > 1) settings.files.pop_back();
    settings.block_bytes = std::min(page_bytes_, kReadBytes);
    settings.uring = tier_.describe().find(": io_uring") != std::string::npos;
    settings.direct = tier_.describe().find(", O_DIRECT") != std::string::npos;
    settings.depth = settings.uring ? options_.queue_depth : 8;
    return settings;
  }
  [[nodiscard]] std::string describe() const { return tier_.describe(); }

 private:
  static tiers::FileTierOptions options_of(const fs::path& folder, std::size_t page_bytes,
                                           std::size_t bytes) {
    tiers::FileTierOptions options;
    options.folder = folder;
    options.max_page_bytes = page_bytes;
    options.segment_bytes = std::max<std::size_t>(bytes / 16, 64 * MiB) / kHead * kHead;
    options.capacity_bytes =
        2 * bytes / page_bytes * (page_bytes + kHead) + 4 * options.segment_bytes;
    options.sync = false;
    options.retain = true;
    return options;
  }

  fs::path folder_;
  std::size_t page_bytes_;
  tiers::FileTierOptions options_;
  tiers::FileTier tier_;
  std::vector<PageKey> keys_;
  tiers::AlignedBuffer batch_{kBatchBytes};  // as frames of a pool are
  std::mt19937_64 order_{2};
};

nlohmann::json restore_row(const TierSettings& settings, std::size_t page_bytes) {
  const BenchFolder folder(settings.folder);
  FullTier tier(folder.path() / "tier", page_bytes, settings.bytes);
  // A virtual disk's rate changes from second to second, so each round is short, and whichever was
  // second in the last is first in the next.
  const std::size_t slice = settings.bytes / 4;
  FioSettings fio = tier.fio();
  fio.total_bytes = slice;
  std::vector<double> ours, theirs, shares, cpu;
  (void)tier.read(settings.bytes);
  for (int round = 0; round < 4 * settings.rounds; ++round) {
    if (round % 2 == 0) theirs.push_back(fio_read(fio));
    const auto [rate, busy] = tier.read(slice);
    ours.push_back(rate);
    cpu.push_back(busy);
    if (round % 2 == 1) theirs.push_back(fio_read(fio));
    shares.push_back(ours.back() / theirs.back());
  }
  const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
  return {{"what", "file_tier_over_fio"},
          {"page_bytes", page_bytes},
          {"gbps", static_cast<double>(median_rate(ours)) / 1e9},
          {"baseline_gbps", static_cast<double>(median_rate(theirs)) / 1e9},
          {"share", median(shares)},
          {"share_least", *least},
          {"share_most", *most},
          {"cpu", median(cpu)},
          {"depth", fio.depth},
          {"path", tier.describe()}};
}

/// Pages of 256 KiB that come back because a call wants one row of each.
nlohmann::json call_row(const TierSettings& settings) {
  const BenchFolder folder(settings.folder);
  Config config;
  config.backend = Backend::kCpu;
  config.model = {.layers = 1, .query_heads = 8, .kv_heads = 8, .head_dim = 128};
  constexpr std::size_t kPageBytes = 256 * KiB;
  const auto tokens = static_cast<std::int64_t>(settings.bytes / kPageBytes) * 64;
  config.memory.max_session_tokens = tokens;
  config.memory.host_bytes = std::max(settings.bytes / 8, 64 * MiB);
  config.memory.device_bytes = 2 * GiB;
  config.memory.disk_cache = (folder.path() / "cache").string();
  config.memory.disk_cache_bytes = 2 * settings.bytes;
  config.retrieval.estimator = Estimator::kNormAware;
  config.retrieval.num_planes = 64;
  Engine engine(config);
  Session session = engine.open();
  constexpr std::int64_t kPiece = 8192;
  std::mt19937_64 random(3);
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(kPiece * 8 * 128));
  for (auto& bits : rows) bits = static_cast<std::uint16_t>(0x3F80U | (random() & 0x807FU));
  for (std::int64_t done = 0; done < tokens; done += kPiece) {
    const TensorView view(rows.data(), DType::kBFloat16, {std::min(kPiece, tokens - done), 8, 128});
    session.append(0, view, view);
  }
  ::sync();

  // A piece of `fetch` reads at most what the frames hold: a row of as many pages as are a quarter.
  const auto pages = static_cast<std::int64_t>(config.memory.host_bytes / kPageBytes / 4);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(8 * pages));
  std::vector<std::uint16_t> keys(ids.size() * 128), values(ids.size() * 128);
  std::int64_t next = 0;
  std::vector<double> rates;
  for (int round = -1; round < settings.rounds; ++round) {
    const Stats before = engine.stats();
    const double seconds = seconds_of([&] {
      for (std::int64_t done = 0; done < tokens / 64; done += pages) {
        for (std::int64_t i = 0; i < pages; ++i) {
          const std::int64_t page = (next + i) % (tokens / 64);
          for (std::int64_t head = 0; head < 8; ++head) {
            ids[static_cast<std::size_t>(head * pages + i)] = static_cast<std::int32_t>(page * 64);
          }
        }
        next += pages;
        std::vector<std::int32_t> sorted = ids;
        for (std::int64_t head = 0; head < 8; ++head) {
          std::sort(sorted.begin() + head * pages, sorted.begin() + (head + 1) * pages);
        }
        session.fetch(0, {sorted.data(), DType::kInt32, {8, pages}},
                      {{keys.data(), DType::kBFloat16, {8, pages, 128}},
                       {values.data(), DType::kBFloat16, {8, pages, 128}}});
      }
    });
    const Stats::Cumulative moved = engine.stats().cumulative - before.cumulative;
    if (round >= 0) rates.push_back(static_cast<double>(moved.tier_bytes_read) / seconds);
  }
  return {{"what", "call_restore"},
          {"page_bytes", kPageBytes},
          {"gbps", static_cast<double>(median_rate(rates)) / 1e9}};
}

}  // namespace

nlohmann::json file_rows(const TierSettings& settings) {
  nlohmann::json rows = nlohmann::json::array();
  for (const std::size_t page_bytes : {64 * KiB, 256 * KiB, MiB}) {
    rows.push_back(restore_row(settings, page_bytes));
  }
  rows.push_back(call_row(settings));
  // Of fio's blocks of as many bytes, in the same run.
  const double fio = rows[1]["baseline_gbps"];
  rows.back()["baseline_gbps"] = fio;
  rows.back()["share"] = rows.back()["gbps"].get<double>() / fio;
  return rows;
}

}  // namespace kvtier::bench
