#include "runtime/api/calibration.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <utility>

namespace kvtier::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using transfer::Buffer;
using transfer::Space;

constexpr std::size_t kMinRegion = 64 * MiB;
/// Rows that the gathers of one size read together: 256 MiB.
constexpr std::int64_t kRowsMeasured = std::int64_t{1} << 19;
/// Below this share of the best rate an allocation is not as good.
constexpr double kAsGood = 0.95;
constexpr std::array kAllocations{HostAllocation::kManaged, HostAllocation::kRegistered,
                                  HostAllocation::kDriver};
/// The region is the pages of one sequence; rows of 512 bytes.
constexpr transfer::KvGeometry kGeometry{.kv_heads = 8,
                                         .head_dim = 128,
                                         .page_tokens = 64,
                                         .sink_capacity = 0,
                                         .recent_capacity = 0,
                                         .dtype = DType::kBFloat16};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Device copies of host values.
class Uploader {
 public:
  explicit Uploader(transfer::Device& device) : device_(device), stream_(device.make_stream()) {}

  template <typename T>
  Buffer upload(std::span<const T> values) {
    const Buffer pinned = device_.allocate(Space::kPinnedHost, values.size_bytes());
    std::memcpy(pinned.data(), values.data(), values.size_bytes());
    Buffer copy = device_.allocate(Space::kDevice, values.size_bytes());
    const transfer::CopyRun run{copy.data(), pinned.data(), values.size_bytes()};
    stream_->copy({&run, 1});
    stream_->synchronize();
    return copy;
  }
  [[nodiscard]] transfer::Stream& stream() { return *stream_; }

 private:
  transfer::Device& device_;
  std::unique_ptr<transfer::Stream> stream_;
};

/// Selections of all gathers of one size: `[gathers, kv_heads, rows / kv_heads]` tokens, ascending;
/// no token of a head comes twice.
std::vector<std::int32_t> draw_tokens(std::int64_t tokens, std::int64_t per_head,
                                      std::int64_t gathers) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(gathers * kGeometry.kv_heads * per_head));
  std::vector<std::int32_t> all(static_cast<std::size_t>(tokens));
  std::iota(all.begin(), all.end(), 0);
  std::mt19937_64 random(1);
  for (int head = 0; head < kGeometry.kv_heads; ++head) {
    for (std::int64_t i = 0; i < gathers * per_head; ++i) {
      const auto other = static_cast<std::size_t>(
          i + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tokens - i)));
      std::swap(all[static_cast<std::size_t>(i)], all[other]);
    }
    for (std::int64_t gather = 0; gather < gathers; ++gather) {
      const auto first = all.begin() + gather * per_head;
      const auto to = ids.begin() + (gather * kGeometry.kv_heads + head) * per_head;
      std::copy(first, first + per_head, to);
      std::sort(to, to + per_head);
    }
  }
  return ids;
}

/// The region as the pages of a sequence.
class Gathers {
 public:
  Gathers(transfer::Device& device, const Buffer& region)
      : device_(device), upload_(device), tokens_(tokens_in(region)) {
    std::vector<const std::byte*> pages;
    for (std::int64_t i = 0; i * kGeometry.page_tokens < tokens_; ++i) {
      pages.push_back(region.data() + i * kGeometry.page_bytes());
    }
    pages_ = upload_.upload(std::span<const std::byte* const>(pages));
    const transfer::SequenceCounters counters{
        .length = tokens_, .resident_begin = tokens_, .capacity = tokens_, .overflow = 0};
    counters_ = upload_.upload(std::span(&counters, 1));
    sequences_.count = 1;
    sequences_[0] = {.pages = pages_.as<const std::byte* const>(),
                     .counters = counters_.as<transfer::SequenceCounters>()};
    queries_.count = 1;
    queries_[0] = {};
  }

  /// GB/s of gathers of `rows` rows.
  double rate(int rows) {
    const std::int64_t per_head = rows / kGeometry.kv_heads;
    const std::int64_t gathers = std::min(kRowsMeasured / rows, tokens_ / per_head);
    const std::vector<std::int32_t> drawn = draw_tokens(tokens_, per_head, gathers);
    const Buffer ids = upload_.upload(std::span<const std::int32_t>(drawn));
    const std::vector<std::int32_t> each(static_cast<std::size_t>(kGeometry.kv_heads),
                                         static_cast<std::int32_t>(per_head));
    const Buffer counts = upload_.upload(std::span<const std::int32_t>(each));
    const Buffer staged =
        device_.allocate(Space::kDevice, static_cast<std::size_t>(rows * kGeometry.row_bytes()));
    transfer::Stream& stream = upload_.stream();
    const auto gather = [&](std::int64_t index, std::int64_t capacity) {
      const transfer::SelectionView selection{.ids = ids.as<std::int32_t>() + index * rows,
                                              .counts = counts.as<std::int32_t>(),
                                              .capacity = per_head,
                                              .staged = staged.data(),
                                              .staged_capacity = capacity};
      transfer::gather_rows(stream, kGeometry, sequences_, queries_, selection, false, nullptr);
    };
    gather(0, 1);  // the first launch of a kernel loads its code
    stream.synchronize();
    const Clock::time_point start = Clock::now();
    for (std::int64_t i = 0; i < gathers; ++i) gather(i, per_head);
    stream.synchronize();
    return static_cast<double>(gathers * rows * kGeometry.row_bytes()) / seconds_since(start) *
           1e-9;
  }

 private:
  static std::int64_t tokens_in(const Buffer& region) {
    return static_cast<std::int64_t>(region.bytes()) / kGeometry.page_bytes() *
           kGeometry.page_tokens;
  }

  transfer::Device& device_;
  Uploader upload_;
  std::int64_t tokens_;
  Buffer pages_;
  Buffer counters_;
  transfer::SequenceBatch sequences_;
  transfer::QueryBatch queries_;
};

CalibrationEntry measure(transfer::Device& device, const CalibrationOptions& options,
                         HostAllocation allocation) {
  CalibrationEntry entry{.allocation = allocation};
  try {
    const Clock::time_point start = Clock::now();
    const Buffer region =
        device.allocate(Space::kPinnedHost, options.region_bytes,
                        {.allocation = allocation, .only = true, .threads = options.pin_threads});
    entry.obtain_seconds = seconds_since(start);
    Gathers gathers(device, region);
    for (std::size_t i = 0; i < kCalibrationRows.size(); ++i) {
      entry.gb_per_s[i] = gathers.rate(kCalibrationRows[i]);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted &&
        error.code() != ErrorCode::kUnimplemented) {
      throw;
    }
    entry = {.allocation = allocation, .refused = error.what()};
    std::replace(entry.refused.begin(), entry.refused.end(), '\n', ' ');
  }
  return entry;
}

CalibrationEntry beyond_device_memory(transfer::Device& device, HostAllocation allocation) {
  return {.allocation = allocation,
          .refused = "more than the " + std::to_string(device.memory().total_bytes) +
                     " bytes that the device has, and not asked for by name"};
}

void check(const CalibrationOptions& options) {
  if (options.region_bytes < kMinRegion) {
    throw_invalid("region_bytes", join("at least ", kMinRegion), options.region_bytes);
  }
  if (options.pin_threads < 0) throw_invalid("pin_threads", "at least 0", options.pin_threads);
  for (auto it = options.allocations.begin(); it != options.allocations.end(); ++it) {
    const bool known =
        std::find(kAllocations.begin(), kAllocations.end(), *it) != kAllocations.end();
    if (!known || std::find(options.allocations.begin(), it, *it) != it) {
      throw_invalid("allocations", "managed, registered and driver, each once at most",
                    join(host_allocation_name(*it), known ? " again" : ""));
    }
  }
}

}  // namespace

HostAllocation best_allocation(const std::vector<CalibrationEntry>& entries) {
  constexpr std::size_t kDecides = 1;
  static_assert(kCalibrationRows[kDecides] == 16384);
  const CalibrationEntry* best = nullptr;
  double highest = 0.0;
  for (const CalibrationEntry& entry : entries) {
    if (entry.refused.empty()) highest = std::max(highest, entry.gb_per_s[kDecides]);
  }
  for (const CalibrationEntry& entry : entries) {
    if (!entry.refused.empty() || entry.gb_per_s[kDecides] < kAsGood * highest) continue;
    if (best == nullptr || entry.obtain_seconds < best->obtain_seconds) best = &entry;
  }
  assert(best != nullptr);
  return best->allocation;
}

Calibration calibrate(transfer::Device& device, const CalibrationOptions& options) {
  check(options);
  Calibration calibration{.device = std::string(device.name()),
                          .region_bytes = options.region_bytes};
  std::vector<HostAllocation> wanted = options.allocations;
  if (wanted.empty()) wanted.assign(kAllocations.begin(), kAllocations.end());
  std::string reasons;
  bool measured = false;
  for (const HostAllocation allocation : wanted) {
    const bool skipped = options.allocations.empty() && allocation == HostAllocation::kManaged &&
                         options.region_bytes > device.memory().total_bytes;
    CalibrationEntry entry =
        skipped ? beyond_device_memory(device, allocation) : measure(device, options, allocation);
    measured |= entry.refused.empty();
    reasons += "\n  " + std::string(host_allocation_name(allocation)) + ": " + entry.refused;
    if (options.progress) options.progress(entry);
    calibration.entries.push_back(std::move(entry));
  }
  if (!measured) {
    throw_error(ErrorCode::kResourceExhausted, "calibration: expected an allocation of ",
                options.region_bytes, " bytes, found that all are refused:", reasons);
  }
  calibration.best = best_allocation(calibration.entries);
  return calibration;
}

}  // namespace kvtier::runtime

namespace kvtier {

Calibration calibrate(const CalibrationOptions& options) {
  return runtime::calibrate(*transfer::make_device(options.backend), options);
}

}  // namespace kvtier
