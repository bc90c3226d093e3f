#pragma once

#include "kvtier/engine.h"

#include "services/console/console.h"
#include "services/tools/stress/device.h"
#include "services/tools/stress/memory.h"
#include "services/tools/stress/needles.h"
#include "services/tools/stress/options.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kvtier::services {

class Decoder;

/// How far a phase of a run is.
struct StressProgress {
  std::string_view phase;  ///< "memory", "ingest", "decode", "dense ingest" or "dense decode".
  double done = 0.0;
  double total = 0.0;
  bool bytes = false;  ///< Of KV rows; otherwise steps.
};

struct StressHooks {
  std::function<void(LogLevel, std::string_view)> log{};
  std::function<void(const StressProgress&)> progress{};
  /// Asked between pieces of work; true stops the run, which keeps what was measured.
  std::function<bool()> interrupted{};
};

/// Dense attention over the same keys and values, all on the device, of layer 0.
struct DenseComparison {
  std::vector<double> step_seconds;  ///< Of one layer.
  double output_error = 0.0;  ///< ||y - y_dense|| / ||y_dense||, mean over query heads and steps.
};

/// As many steps as were measured, with a share of the selected rows on the device that is not the
/// queries' own.
struct ImposedShare {
  double wanted = 0.0;
  std::vector<double> step_seconds;
  Stats::Cumulative moved;
};

/// Returns the share of the rows looked for that were on the device; NaN where none was looked for.
[[nodiscard]] double found_share(const Stats::Cumulative& moved);

struct StressReport {
  MemoryNeed need;
  DriftFit calibration;
  bool interrupted = false;

  double engine_seconds = 0.0;       ///< To allocate and pin.
  double ingest_seconds = 0.0;       ///< Needles, generation and appends.
  double append_seconds = 0.0;       ///< Generation and appends alone.
  std::int64_t ingested_tokens = 0;  ///< (token, layer, sequence) triples.
  double ingested_bytes = 0.0;       ///< KV rows written to host pages.

  std::vector<double> step_seconds;   ///< Of all layers and sequences, in order of the steps.
  Stats::Cumulative moved;            ///< By the measured steps.
  std::vector<ImposedShare> imposed;  ///< None without a row cache.
  Stats::Snapshot memory;

  std::int64_t needles = 0;  ///< Of steps whose selection was looked at.
  std::int64_t needles_found = 0;
  /// Mean share of the selected tokens that the step before had selected as well; NaN of none.
  double selected_overlap = 0.0;
  std::optional<DenseComparison> dense;
};

/// One stress run: a long synthetic context in every layer, and decode steps over it.
class StressRun {
 public:
  /// Resolves the options, and checks them and the memory. Throws `kInvalidArgument`,
  /// `kResourceExhausted` with the arithmetic; nothing large has been allocated then.
  StressRun(StressOptions options, StressHooks hooks);
  StressRun(const StressRun&) = delete;  // sessions belong to its engine
  StressRun& operator=(const StressRun&) = delete;
  ~StressRun();

  /// Runs all phases, or those before an interruption.
  void run();

  /// Frees the sessions, then the engine with the pinned pages. Calls `freeing(what, bytes)` before
  /// each.
  void release(const std::function<void(std::string_view, double)>& freeing);

  [[nodiscard]] const StressOptions& options() const { return options_; }
  [[nodiscard]] const StressReport& report() const { return report_; }

 private:
  struct Appended {
    std::int64_t tokens = 0;  ///< (token, layer, sequence) triples.
    double seconds = 0.0;
  };
  [[nodiscard]] bool interrupted() const { return hooks_.interrupted && hooks_.interrupted(); }
  void progress(const StressProgress& progress) const;
  [[nodiscard]] Engine make_engine(Config config);
  /// Makes the data of a layer, with its needles; that of the first layer sets the drift.
  void make_source(int sequence, int layer);
  /// Opens and fills one session per sequence, until interrupted.
  Appended fill(Engine& engine, int layers, std::string_view phase, std::vector<Session>& sessions);
  /// Plans steps of `layers` layers in these sessions.
  [[nodiscard]] Decoder decoder_of(Engine& engine, std::vector<Session>& sessions, int layers,
                                   LayerMode mode = LayerMode::kSparse);
  /// Runs the step that was prepared. Returns its seconds; nothing when interrupted.
  [[nodiscard]] std::optional<double> run_step(Decoder& decoder);
  void decode();
  /// Measures steps like those of `decode` with each of `kImposedShares`.
  void impose_shares();
  /// Decodes as many steps in `sessions`, which have the context alone; before each, so many rows
  /// are fetched that the share is as wanted.
  void repeat_steps(std::vector<Session>& sessions, ImposedShare& share);
  void compare_dense();

  StressOptions options_;
  StressHooks hooks_;
  StressReport report_;
  std::unique_ptr<TensorDevice> device_;
  std::optional<Engine> engine_;
  std::vector<Session> sessions_;
  std::shared_ptr<const NoiseTable> noise_;
  std::vector<std::vector<LayerSource>> sources_;  ///< `[batch][layers]`
  std::vector<std::vector<float>> outputs_;        ///< Of layer 0, of each step looked at.
};

/// Times of steps, in seconds; NaN of none.
struct StepTimes {
  double mean = 0, min = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;
};

/// Percentiles by nearest rank.
[[nodiscard]] StepTimes step_times(std::vector<double> seconds);

/// Writes what a run measured, for a reader. After an interruption: what there is.
void write_report(std::ostream& out, const StressOptions& options, const StressReport& report);

/// Returns the report as JSON (docs/stress.md names the keys).
[[nodiscard]] std::string to_json(const StressOptions& options, const StressReport& report);

/// The subcommand `stress`.
struct StressCommand {
  std::string json;
  StressOptions options;
};

/// Adds --preset, which every command has that takes a shape.
CLI::Option* add_preset(CLI::App& app, StressOptions& options);

/// Adds the subcommand and its options to a program.
void add_stress(CLI::App& program, StressCommand& command);

/// Runs it. Returns the exit code: 0, or 130 after SIGINT or SIGTERM, when what was measured until
/// then has been written. Throws what `StressRun` and `AtomicFile` throw.
[[nodiscard]] int run_stress(const StressCommand& command, const Console& console,
                             const std::function<void(LogLevel, std::string_view)>& log);

}  // namespace kvtier::services
