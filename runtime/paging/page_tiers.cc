#include "runtime/paging/page_tiers.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/segment.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace kvtier::runtime {
namespace {

/// SplitMix64's finaliser: keys begin with well-mixed bits, which tiers use as a hash.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31U);
}

/// Segments that a disk cache is made of: space comes back a segment at a time, and each is an open
/// file.
constexpr std::uint64_t kCacheSegments = 256;
constexpr std::uint64_t kMinSegmentPages = 16;

tiers::FileTierOptions disk_cache_options(const MemoryConfig& config, std::uint64_t page_bytes) {
  constexpr std::uint64_t kBlock = 4096;
  const std::uint64_t record = (page_bytes + kBlock - 1) / kBlock * kBlock + kBlock;
  const std::uint64_t least = kMinSegmentPages * record + 2 * kBlock;
  const std::uint64_t segment = std::max(config.disk_cache_bytes / kCacheSegments, least);
  tiers::FileTierOptions options;
  options.folder = config.disk_cache;
  options.capacity_bytes = config.disk_cache_bytes;
  options.segment_bytes = segment / kBlock * kBlock;
  options.max_page_bytes = page_bytes;
  options.sync = false;  // nothing in it outlives the process
  options.retain = true;
  return options;
}

}  // namespace

/// Adds the time until the end of its scope to that which calls have waited.
class PageTiers::Clock {
 public:
  explicit Clock(PageTiers& tiers) : tiers_(tiers) {}
  ~Clock() {
    const auto spent = std::chrono::steady_clock::now() - start_;
    const std::lock_guard lock(tiers_.mutex_);
    tiers_.wait_nanoseconds_ += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  }
  Clock(const Clock&) = delete;  // adds once
  Clock& operator=(const Clock&) = delete;

 private:
  PageTiers& tiers_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

PageTiers::PageTiers(std::vector<std::shared_ptr<PageTier>> tiers, std::size_t page_bytes,
                     std::chrono::milliseconds deadline, Log log)
    : tiers_(std::move(tiers)),
      deadline_(deadline),
      log_(std::move(log)),
      nonce_(tiers::random_nonce()),
      uses_(tiers_.size()) {
  if (!tiers_.front()->retains()) {
    throw_error(ErrorCode::kInvalidArgument,
                "memory.tiers: expected the first to keep what it has accepted, found ",
                tiers_.front()->describe());
  }
  for (const auto& tier : tiers_) {
    if (tier->max_page_bytes() >= page_bytes) continue;
    throw_error(ErrorCode::kInvalidArgument, "memory.tiers: expected pages of ", page_bytes,
                " bytes to be taken, found at most ", tier->max_page_bytes(), " by ",
                tier->describe());
  }
}

std::unique_ptr<PageTiers> make_page_tiers(const MemoryConfig& config, std::size_t page_bytes,
                                           const PageTiers::Log& log) {
  std::vector<std::shared_ptr<PageTier>> all = config.tiers;
  if (!config.disk_cache.empty()) {
    all.insert(all.begin(),
               std::make_shared<tiers::FileTier>(disk_cache_options(config, page_bytes)));
  }
  if (all.empty()) return nullptr;
  return std::make_unique<PageTiers>(std::move(all), page_bytes, config.tier_deadline, log);
}

tiers::PageRoom tier_room(const MemoryConfig& config, std::size_t page_bytes) {
  if (!config.disk_cache.empty()) {
    return tiers::page_room(disk_cache_options(config, page_bytes), page_bytes);
  }
  if (config.tiers.empty()) return {};
  const std::uint64_t capacity = config.tiers.front()->stats().capacity_bytes;
  const std::uint64_t pages =
      capacity == 0 ? std::numeric_limits<std::uint32_t>::max() : capacity / page_bytes;
  return {.most = pages, .sure = pages};
}

PageKey PageTiers::key_of(const PageVersion& version) const {
  const std::uint64_t words[] = {mixed(version.page ^ mixed(version.generation ^ nonce_)), nonce_,
                                 version.page, version.generation};
  PageKey key;
  static_assert(sizeof(words) == sizeof(key));
  std::memcpy(key.data(), words, sizeof(words));
  return key;
}

void PageTiers::write(std::span<PageOut> pages) {
  if (pages.empty()) return;
  const Clock clock(*this);
  std::vector<TierPut> puts;
  puts.reserve(pages.size());
  for (PageOut& page : pages) {
    page.crc = crc32c(page.bytes);
    puts.push_back({.key = key_of(page.version), .bytes = page.bytes});
  }
  put(0, puts);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    pages[i].stored = puts[i].status == TierStatus::kOk;
    if (pages[i].stored) continue;
    const std::lock_guard lock(mutex_);
    last_refusal_ = puts[i].status;
  }
  report_refusal(!pages.back().stored);
  std::erase_if(puts, [](const TierPut& put) { return put.status != TierStatus::kOk; });
  // A copy that is not taken is missed only if the first tier fails.
  if (puts.empty()) return;
  for (std::size_t i = 1; i < tiers_.size(); ++i) put(i, puts);
}

void PageTiers::report_refusal(bool refuses) {
  {
    const std::lock_guard lock(mutex_);
    if (refuses == std::exchange(refusing_, refuses)) return;
  }
  say(refuses ? LogLevel::kWarning : LogLevel::kInfo,
      refuses ? describe_refusal() + ": " + tiers_.front()->describe()
              : tiers_.front()->describe() + ": takes pages again");
}

void PageTiers::put(std::size_t tier, std::span<TierPut> pages) {
  const PageTier::Deadline until = deadline();
  const auto start = std::chrono::steady_clock::now();
  tiers_[tier]->put(pages, until);
  const auto end = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  TierStats& use = uses_[tier];
  use.put_time.add(end - start);
  use.puts += pages.size();
  for (const TierPut& page : pages) {
    if (page.status == TierStatus::kOk) {
      ++use.stored;
      use.bytes_written += page.bytes.size();
    } else if (page.status == TierStatus::kFull) {
      ++use.refused;
    } else {
      ++(end >= until ? use.put_timeouts : use.put_failures);
    }
  }
}

bool PageTiers::get(std::size_t tier, std::span<TierGet> pages) {
  const PageTier::Deadline until = deadline();
  const auto start = std::chrono::steady_clock::now();
  tiers_[tier]->get(pages, until);
  const auto end = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  uses_[tier].get_time.add(end - start);
  uses_[tier].gets += pages.size();
  return end >= until;
}

void PageTiers::add_to(Stats& stats) const {
  Stats::Cumulative& sum = stats.cumulative;
  {
    const std::lock_guard lock(mutex_);
    stats.tiers = uses_;
    sum.pages_lost = lost_;
    sum.tier_unavailable = unavailable_;
    sum.tier_nanoseconds = wait_nanoseconds_;
  }
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    TierStats& use = stats.tiers[i];
    const TierStats now = tiers_[i]->stats();
    use.kind = tiers_[i]->kind();
    use.removed = now.removed;
    use.remove_failures = now.remove_failures;
    use.evicted = now.evicted;
    use.pages = now.pages;
    use.capacity_bytes = now.capacity_bytes;
    use.used_bytes = now.used_bytes;
    use.servers = now.servers;
    use.servers_open = now.servers_open;
    use.servers_probing = now.servers_probing;
    sum.tier_hits += use.hits;
    sum.tier_misses += use.misses;
    sum.tier_corrupt += use.corrupt;
    sum.tier_bytes_read += use.bytes_read;
  }
  const TierStats& first = stats.tiers.front();
  sum.pages_repaired = sum.tier_hits - first.hits;
  sum.tier_bytes_written = first.bytes_written;
  sum.tier_refused = first.puts - first.stored;
}

std::string PageTiers::describe_refusal() const {
  const std::lock_guard lock(mutex_);
  return std::string(tiers_.front()->kind()) + " tier: expected pages to be taken, found \"" +
         std::string(tier_status_name(last_refusal_)) + "\"";
}

bool PageTiers::accept(std::size_t tier, const TierGet& got, const PageIn& wanted, bool late) {
  TierStatus status = got.status;
  if (status == TierStatus::kOk && (got.crc ? *got.crc : crc32c(got.bytes)) != wanted.crc) {
    status = TierStatus::kCorrupt;
    tiers_[tier]->remove({&got.key, 1}, deadline());
  }
  {
    const std::lock_guard lock(mutex_);
    TierStats& use = uses_[tier];
    if (status == TierStatus::kOk) {
      ++use.hits;
      use.bytes_read += got.bytes.size();
    } else if (status == TierStatus::kCorrupt) {
      ++use.corrupt;
    } else if (status == TierStatus::kUnavailable) {
      ++(late ? use.get_timeouts : use.get_failures);
    } else {
      ++use.misses;
    }
  }
  if (status == TierStatus::kCorrupt) {
    say(LogLevel::kError, tiers_[tier]->describe() + ": a page is not as it was written");
  }
  return status == TierStatus::kOk;
}

void PageTiers::read(std::span<PageIn> pages) {
  const Clock clock(*this);
  std::vector<std::size_t> left(pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) left[i] = i;
  for (PageIn& page : pages) page.outcome = PageIn::Outcome::kLost;

  std::vector<TierGet> gets;
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    if (left.empty()) return;
    gets.clear();
    for (const std::size_t i : left) {
      gets.push_back({.key = key_of(pages[i].version), .bytes = pages[i].bytes});
    }
    const bool late = get(tier, gets);
    std::vector<std::size_t> missing;
    for (std::size_t j = 0; j < left.size(); ++j) {
      PageIn& page = pages[left[j]];
      if (accept(tier, gets[j], page, late)) {
        page.outcome = tier == 0 ? PageIn::Outcome::kRead : PageIn::Outcome::kRepaired;
        continue;
      }
      if (gets[j].status == TierStatus::kUnavailable) page.outcome = PageIn::Outcome::kUnavailable;
      missing.push_back(left[j]);
    }
    left = std::move(missing);
  }
  const std::lock_guard lock(mutex_);
  for (const std::size_t i : left) {
    ++(pages[i].outcome == PageIn::Outcome::kLost ? lost_ : unavailable_);
  }
}

void PageTiers::remove(std::span<const PageVersion> pages) {
  if (pages.empty()) return;
  const Clock clock(*this);
  std::vector<PageKey> keys;
  keys.reserve(pages.size());
  for (const PageVersion& page : pages) keys.push_back(key_of(page));
  for (const auto& tier : tiers_) tier->remove(keys, deadline());
}

}  // namespace kvtier::runtime
