#include "services/core/model_pool.h"

#include "kvtier/error.h"
#include "kvtier/page_tier.h"

#include "services/base/service_error.h"
#include "services/wire/stats_fields.h"
#include "transfer/tiers/file_tier.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

/// Folders of engines in that of the disk caches.
constexpr const char* kCachePrefix = "engine-";

void write_sketch(std::ostream& out, const SketchConfig& sketch) {
  out << ' ' << static_cast<int>(sketch.kind) << ':' << static_cast<int>(sketch.code) << ':'
      << sketch.num_planes << ':' << sketch.seed;
}

std::string key_of(const ModelSpec& spec) {
  std::ostringstream key;
  key.precision(9);
  const ModelConfig& model = spec.model;
  key << model.layers << ' ' << model.query_heads << ' ' << model.kv_heads << ' ' << model.head_dim
      << ' ' << static_cast<int>(model.kv_dtype) << ' ' << spec.retrieval.sink_tokens << ' '
      << spec.retrieval.recent_tokens;
  for (const LayerConfig& layer : model.layer_options) {
    key << " l" << static_cast<int>(layer.mode) << ':' << layer.window_tokens << ':'
        << layer.softmax_scale.value_or(0.0F) << ':' << layer.logit_softcap;
  }
  write_sketch(key, spec.retrieval.sketch(model.head_dim));
  std::vector<SketchConfig> extra = spec.extra_sketches;
  std::sort(extra.begin(), extra.end(), [](const SketchConfig& a, const SketchConfig& b) {
    return std::tie(a.kind, a.code, a.num_planes, a.seed) <
           std::tie(b.kind, b.code, b.num_planes, b.seed);
  });
  for (const SketchConfig& sketch : extra) write_sketch(key, sketch);
  return key.str();
}

void add(Stats::Cumulative& to, const Stats::Cumulative& from) {
  add_fields(kCumulativeFields, from, to);
  add_fields(kUnsentFields, from, to);
}

/// Adds what an engine has asked of its tiers, which are those of all engines in the same order.
void add(std::vector<TierStats>& to, const std::vector<TierStats>& from) {
  for (std::size_t i = 0; i < std::min(to.size(), from.size()); ++i) {
    add_fields(kTierFields, from[i], to[i]);
    to[i].get_time += from[i].get_time;
    to[i].put_time += from[i].put_time;
    if (to[i].servers > 0) continue;  // shared by all engines: what it says of itself is there
    add_fields(kTierStateFields, from[i], to[i]);
  }
}

/// Makes the folder, for this user alone, if it is not there. Throws `kFailedPrecondition` for one
/// in which others could put or rename something.
void check_folder(const std::filesystem::path& folder) {
  const auto refuse = [&](const std::string& expected, const std::string& found) {
    throw Error(ErrorCode::kFailedPrecondition,
                "disk cache " + folder.string() + ": expected " + expected + ", found " + found);
  };
  const int made = ::mkdir(folder.c_str(), 0700) == 0 ? 0 : errno;
  struct stat status {};
  const bool there = ::stat(folder.c_str(), &status) == 0;
  if (!there || !S_ISDIR(status.st_mode)) {
    throw Error(ErrorCode::kUnavailable,
                "disk cache " + folder.string() + ": expected a folder, found " +
                    (there ? "another file"
                           : std::string("none that can be made: ") + std::strerror(made)));
  }
  if (status.st_uid != ::geteuid()) {
    refuse("a folder of user " + std::to_string(::geteuid()),
           "one of user " + std::to_string(status.st_uid));
  }
  if ((status.st_mode & 022U) != 0)
    refuse("a folder that others cannot write", "one that they can");
}

/// A failed engine throws; what it counted is lost with it.
Stats stats_of(const Model& model) {
  try {
    return model.engine.stats();
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

ModelPool::ModelPool(ModelPoolOptions options) : options_(std::move(options)) {
  namespace fs = std::filesystem;
  if (options_.disk_cache.empty()) return;
  std::error_code error;
  const fs::path parent = options_.disk_cache.parent_path();
  if (!parent.empty()) fs::create_directories(parent, error);
  check_folder(options_.disk_cache);
  std::vector<fs::path> stale;
  for (fs::directory_iterator it(options_.disk_cache, error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().filename().string().starts_with(kCachePrefix)) stale.push_back(it->path());
  }
  if (error) {
    throw Error(ErrorCode::kUnavailable, "disk cache " + options_.disk_cache.string() +
                                             ": expected a folder, found " + error.message());
  }
  for (const fs::path& folder : stale) {
    tiers::FileTierOptions cache;
    cache.folder = folder;
    cache.capacity_bytes = 2 * cache.segment_bytes;
    cache.retain = true;
    const tiers::FileTier emptied(cache);  // takes the folder, or throws
  }
}

std::filesystem::path ModelPool::free_disk_cache() const {
  for (int i = 0;; ++i) {
    const std::filesystem::path folder = options_.disk_cache / (kCachePrefix + std::to_string(i));
    const bool taken = std::any_of(models_.begin(), models_.end(), [&](const auto& model) {
      return model->engine.config().memory.disk_cache == folder;
    });
    if (!taken) return folder;
  }
}

bool Model::carries(const RetrievalConfig& retrieval) const {
  const Config& config = engine.config();
  const SketchConfig wanted = retrieval.sketch(config.model.head_dim);
  const auto fits = [&wanted](const SketchConfig& have) { return have.serves(wanted); };
  return fits(config.retrieval.sketch(config.model.head_dim)) ||
         std::any_of(config.extra_sketches.begin(), config.extra_sketches.end(), fits);
}

std::shared_ptr<Model> ModelPool::find_locked(const std::string& key) {
  const auto it = std::find_if(models_.begin(), models_.end(), [&key](const auto& model) {
    return !model->failed && model->key == key;
  });
  if (it == models_.end()) return nullptr;
  std::rotate(it, it + 1, models_.end());
  return models_.back();
}

std::shared_ptr<Model> ModelPool::find(const ModelSpec& spec) {
  const std::string key = key_of(spec);
  const std::lock_guard lock(mutex_);
  return find_locked(key);
}

std::optional<std::size_t> ModelPool::place_for(const Tenant* owner) const {
  const auto whole = static_cast<std::int64_t>(options_.max_models);
  std::int64_t owned = 0;
  std::optional<std::size_t> idle, own_idle;  // the least recently acquired
  for (std::size_t i = models_.size(); i-- > 0;) {
    const bool is_idle = models_[i].use_count() == 1;
    if (is_idle) idle = i;
    if (owner == nullptr || models_[i]->owner != owner) continue;
    ++owned;
    if (is_idle) own_idle = i;
  }
  const bool has_share = owner != nullptr && owned >= owner->part_of(Shared::kEngines, whole);
  if (!has_share && models_.size() < options_.max_models) return {};
  const std::optional<std::size_t> gives_way = has_share ? own_idle : idle;
  if (gives_way) return gives_way;
  throw ServiceError::overloaded(
      "TOO_MANY_MODELS", has_share ? "all models that the tenant may have made have sessions"
                                   : "all " + std::to_string(options_.max_models) +
                                         " models that the server may hold have sessions");
}

std::shared_ptr<Model> ModelPool::acquire(const ModelSpec& spec, const Tenant* owner) {
  const std::string key = key_of(spec);
  const std::lock_guard one_at_a_time(building_);
  std::vector<std::shared_ptr<Model>> retired;  // ends without the mutex: it takes a while
  std::filesystem::path disk_cache;
  {
    const std::scoped_lock lock(reading_, mutex_);
    retired.reserve(models_.size());
    for (std::size_t i = models_.size(); i-- > 0;) {
      if (models_[i]->failed) retired.push_back(retire(i));
    }
    if (std::shared_ptr<Model> found = find_locked(key)) return found;
    if (const auto gives_way = place_for(owner)) retired.push_back(retire(*gives_way));
    if (!options_.disk_cache.empty()) disk_cache = free_disk_cache();
  }
  retired.clear();
  Config config;
  config.model = spec.model;
  config.memory = options_.memory;
  if (spec.model.kv_dtype != DType::kBFloat16) config.memory.page_format = PageFormat::kModel;
  config.memory.disk_cache = std::move(disk_cache);
  config.retrieval = spec.retrieval;
  config.extra_sketches = spec.extra_sketches;
  config.backend = options_.backend;
  config.log = options_.log;
  config.on_tier_wait = options_.on_tier_wait;
  std::shared_ptr<Model> model;
  try {
    model = std::make_shared<Model>(config, key, owner);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInternal) {
      if (device_served_) {
        lose_device();
      } else {
        device_lost_ = true;
      }
    }
    throw;
  }
  device_lost_ = false;
  device_served_ = true;
  const std::lock_guard lock(mutex_);
  models_.push_back(model);
  return model;
}

void ModelPool::lose_device() {
  device_lost_ = true;
  if (options_.on_device_lost) options_.on_device_lost();
}

std::shared_ptr<Model> ModelPool::retire(std::size_t index) {
  std::shared_ptr<Model> model = models_[index];
  Stats last = stats_of(*model);
  for (TierStats& tier : last.tiers) tier.capacity_bytes = tier.used_bytes = 0;
  add(retired_, last.cumulative);
  if (retired_tiers_.empty()) retired_tiers_ = unused_tiers();
  add(retired_tiers_, last.tiers);
  models_.erase(models_.begin() + static_cast<std::ptrdiff_t>(index));
  return model;
}

std::vector<TierStats> ModelPool::unused_tiers() const {
  std::vector<TierStats> tiers;
  if (!options_.disk_cache.empty()) tiers.emplace_back().kind = "file";
  for (const auto& shared : options_.memory.tiers) {
    const TierStats now = shared->stats();
    TierStats& tier = tiers.emplace_back();
    tier.kind = shared->kind();
    tier.remove_failures = now.remove_failures;
    tier.servers = now.servers;
    tier.servers_open = now.servers_open;
    tier.servers_probing = now.servers_probing;
  }
  return tiers;
}

std::size_t ModelPool::size() const {
  const std::lock_guard lock(mutex_);
  return models_.size();
}

bool ModelPool::any_failed() const {
  const std::lock_guard lock(mutex_);
  return device_lost_ || std::any_of(models_.begin(), models_.end(),
                                     [](const auto& model) { return model->failed.load(); });
}

Stats ModelPool::stats() const {
  const std::lock_guard reading(reading_);
  std::vector<std::shared_ptr<Model>> models;
  Stats sum;
  {
    const std::lock_guard lock(mutex_);
    models = models_;
    sum.cumulative = retired_;
    sum.tiers = unused_tiers();
    add(sum.tiers, retired_tiers_);
  }
  for (const auto& model : models) {
    const Stats stats = stats_of(*model);
    add(sum.cumulative, stats.cumulative);
    add_fields(kSnapshotFields, stats.snapshot, sum.snapshot);
    add(sum.tiers, stats.tiers);
  }
  return sum;
}

}  // namespace kvtier::services
