#pragma once

#include "kvtier/engine.h"

#include "services/base/tenants.h"

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier::services {

/// What an engine is made for. Sessions that agree in all of it share one.
struct ModelSpec {
  ModelConfig model;
  /// Estimator and options of the first session; its sketch, sinks and window shape the engine.
  RetrievalConfig retrieval;
  std::vector<SketchConfig> extra_sketches;
};

/// An engine and what the service knows of it.
struct Model {
  Model(const Config& config, std::string key_in, const Tenant* owner_in)
      : engine(config),
        row_cache_rows(engine.stats().snapshot.row_cache_rows),
        key(std::move(key_in)),
        owner(owner_in) {}

  Engine engine;
  const int row_cache_rows;  ///< As in the engine's `Stats`.
  const std::string key;
  const Tenant* const owner;  ///< For which it was made, of whose share it is.
  /// Set after a fault of the device: the engine answers nothing more.
  std::atomic<bool> failed{false};

  /// Returns whether a session with these options finds its sketch here.
  [[nodiscard]] bool carries(const RetrievalConfig& retrieval) const;
};

struct ModelPoolOptions {
  Backend backend = Backend::kAuto;
  std::size_t max_models = 4;
  /// Of each engine, but pages of int8 for models in bf16 only.
  MemoryConfig memory;
  /// A folder with one for each engine in it, as `MemoryConfig::disk_cache`; empty: none.
  std::filesystem::path disk_cache;
  std::function<void(LogLevel, std::string_view)> log{};
  std::function<void(bool)> on_tier_wait{};  ///< Of engines, as `Config::on_tier_wait`.
  /// Called when a fault of the device keeps an engine from being made where others were made
  /// before, and by `lose_device`: what this process can do about it is end. Must not block.
  std::function<void()> on_device_lost{};
};

/// The engines of a server, at most `max_models`, made when the first session asks. One without
/// sessions gives way to another model. Thread-safe.
class ModelPool {
 public:
  /// Empties the disk caches of servers that are no more. Throws `kFailedPrecondition` when one is
  /// in use, `kUnavailable` when the folder cannot be made.
  explicit ModelPool(ModelPoolOptions options);

  /// Throws `kInvalidArgument` for a model that the library refuses, RESOURCE_EXHAUSTED when every
  /// engine there may be is in use by other models.
  /// Waits while another engine is made.
  /// An engine that is made is `owner`'s; one that has its share of them gives up one of its own
  /// that no session uses.
  [[nodiscard]] std::shared_ptr<Model> acquire(const ModelSpec& spec,
                                               const Tenant* owner = nullptr);
  /// Returns the engine that is there, or null; waits for nothing.
  [[nodiscard]] std::shared_ptr<Model> find(const ModelSpec& spec);

  /// Says that the device is lost: an engine waits for it in vain.
  void lose_device();

  [[nodiscard]] std::size_t size() const;
  /// Whether an engine has failed and is still there, or the last could not be made for a fault of
  /// the device.
  [[nodiscard]] bool any_failed() const;
  /// Sums over the engines there are and, for what only grows, those there were.
  [[nodiscard]] Stats stats() const;

 private:
  /// With `mutex_` held. Takes an engine out; its end is left to the caller.
  [[nodiscard]] std::shared_ptr<Model> retire(std::size_t index);
  /// With `mutex_` held. Returns the engine that gives way to a new one of `owner`, if one has to.
  /// Throws RESOURCE_EXHAUSTED where none can.
  [[nodiscard]] std::optional<std::size_t> place_for(const Tenant* owner) const;
  [[nodiscard]] std::shared_ptr<Model> find_locked(const std::string& key);
  /// The tiers that engines have, with nothing counted.
  [[nodiscard]] std::vector<TierStats> unused_tiers() const;
  /// With `mutex_` held. Returns the folder of a cache that no engine has.
  [[nodiscard]] std::filesystem::path free_disk_cache() const;

  const ModelPoolOptions options_;
  std::mutex building_;
  /// Held while the engines are read: one that is read must not seem to be in use. After
  /// `building_`, before `mutex_`.
  mutable std::mutex reading_;
  std::atomic<bool> device_lost_{false};
  std::atomic<bool> device_served_{false};      ///< An engine has been made.
  mutable std::mutex mutex_;                    ///< Guards all below.
  std::vector<std::shared_ptr<Model>> models_;  ///< Least recently acquired first.
  Stats::Cumulative retired_;
  std::vector<TierStats> retired_tiers_;
};

}  // namespace kvtier::services
