#pragma once

#include "kvtier/config.h"

#include "services/console/console.h"
#include "services/evaluation/replay_metrics.h"
#include "services/evaluation/trace.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace kvtier::services {

/// Which selectors a replay compares: every estimator with every value weighting, selection, rule,
/// size, error target, and, of norm-aware, code and number of bits. Fields left out take the
/// estimator's defaults.
struct ReplayGrid {
  std::vector<Estimator> estimators = {Estimator::kSoftCollision, Estimator::kHardCollision,
                                       Estimator::kNormAware};
  std::vector<ValueWeighting> weightings = {ValueWeighting::kDefault};
  std::vector<Selection> selections = {Selection::kPerKvHead};
  std::vector<SelectionRule> rules;                      ///< Empty: the estimator's.
  std::vector<SketchCode> codes;                         ///< Empty: the estimator's.
  std::vector<double> sparsities = {10.0, 33.0, 100.0};  ///< Ignored when `top_ks` is not empty.
  std::vector<int> top_ks;

  std::optional<PlaneKind> plane_kind;
  std::optional<int> planes_per_table;  ///< Default 10, for hard collision 2.
  std::optional<int> tables;            ///< Default 60, for hard collision 300.
  std::vector<int> bits = {0};          ///< Of a key, of norm-aware; 0: `RetrievalConfig`'s.
  int query_bits = 4;
  float tau = 0.4F;
  std::uint64_t seed = 0;
  std::vector<double> error_targets = {0.0};  ///< Of the rows with the priority rule.
  bool error_alone = false;  ///< Whether these have no size: as many tokens as the error takes.
  int coarse_bits = 0;       ///< Of those over a scalar code.
  int candidates = RetrievalConfig{}.candidates;
  int sink = RetrievalConfig{}.sink_tokens;
  int window = RetrievalConfig{}.recent_tokens;

  /// Replaces what `RetrievalConfig::socket` sets.
  void set_socket();
  /// Returns one configuration per row, without the exact selector's. Throws `kInvalidArgument`
  /// with every problem that rows have with one another and with the model; an estimator and a
  /// weighting that do not fit are named together.
  [[nodiscard]] std::vector<RetrievalConfig> expand(const ModelConfig& model) const;
};

/// One selector at one size. The exact selector takes the top-k by q.k, or, with one selection per
/// KV head, by the mean over its query heads of the softmax weight among the eligible.
struct ReplayRow {
  bool exact = false;
  RetrievalConfig retrieval;  ///< Of the exact selector: selection, size, sink and window.
  ReplayMetrics mean;
  std::vector<ReplayMetrics> layers;
};

/// Relative difference ||y - o|| / ||o|| of kvtier's dense output y to the recorded o, over query
/// heads and steps.
struct DenseError {
  double mean = 0;
  double max = 0;
};

struct ReplayReport {
  Backend backend = Backend::kCpu;
  std::int64_t steps = 0;  ///< Steps replayed.
  DenseError dense;
  std::vector<DenseError> dense_layers;
  double append_seconds = 0;        ///< Of all tokens in all layers.
  double bytes_device_to_host = 0;  ///< Written by the appends.
  std::vector<ReplayRow> rows;
};

struct ReplayOptions {
  Backend backend = Backend::kAuto;
  PageFormat page_format = PageFormat::kModel;  ///< int8: of traces in bf16 and fp32.
  ReplayGrid grid;
  /// Steps to replay; 0: all. With S recorded, the i-th of N is `first_step` + floor(i S / N).
  std::int64_t steps = 0;
  std::int64_t first_step = 0;
  std::function<void(LogLevel, std::string_view)> log;
  /// Called with the tokens, rising, that a row of the grid selects: layer by layer, of these step
  /// by step, of these head by head (KV heads, or query heads where each has its own). The grid
  /// must have one row then.
  std::function<void(std::span<const std::int32_t> ids)> selected;
  std::function<void(double)> progress;  ///< Called with the share of the work done.
};

/// Replays a trace: appends its keys and values, decodes its queries with every selector of the
/// grid, and measures each against dense attention in double. One prefill serves all selectors.
/// Throws `kInvalidArgument` for options that do not fit the trace, and what `Engine` throws.
[[nodiscard]] ReplayReport replay(const Trace& trace, const ReplayOptions& options);

/// Writes the report as an aligned table, means over layers.
void write_table(std::ostream& out, const Trace& trace, const ReplayReport& report);

/// Returns the report as JSON: `dense` and `rows`, each with `mean` and `layers`. A metric that no
/// step could measure is null.
[[nodiscard]] std::string to_json(const Trace& trace, const ReplayOptions& options,
                                  const ReplayReport& report);

/// The subcommand `replay`.
struct ReplayCommand {
  std::string trace;
  std::string json;
  std::string record_ids;
  ReplayOptions options;
};

/// Adds the subcommand and its options to a program.
void add_replay(CLI::App& program, ReplayCommand& command);

/// Replays, and writes the table and what else was asked for. Throws what `Trace::open`, `replay`
/// and `AtomicFile` throw.
void run_replay(ReplayCommand& command, const Console& console);

}  // namespace kvtier::services
