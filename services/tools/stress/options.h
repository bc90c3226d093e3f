#pragma once

#include "kvtier/config.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtier::services {

/// Attention shape of a published model.
struct ModelPreset {
  std::string_view name;
  int layers;
  int query_heads;
  int kv_heads;
  int head_dim;
};

/// Returns the presets by name: llama-3.1-8b, llama-3.1-70b, qwen3-8b, qwen3-30b-a3b.
[[nodiscard]] const std::vector<ModelPreset>& model_presets();

/// Whose queries those of a stress run drift like from step to step.
enum class DriftModel : std::uint8_t { kSmolLm2, kNeedleLlama };
inline constexpr std::array<std::pair<std::string_view, DriftModel>, 2> kDriftNames{
    {{"smollm2", DriftModel::kSmolLm2}, {"needle-llama", DriftModel::kNeedleLlama}}};

/// What a stress run does. Shape fields left out come from the preset, or from the defaults beside
/// them.
struct StressOptions {
  std::string preset;              ///< Empty: none.
  std::optional<int> layers;       ///< 1
  std::optional<int> query_heads;  ///< 32
  std::optional<int> kv_heads;     ///< 8
  std::optional<int> head_dim;     ///< 128

  std::int64_t tokens = std::int64_t{1} << 16;  ///< Of context, per sequence.
  int batch = 1;                                ///< Sequences, decoded together.
  int steps = 64;                               ///< Measured decode steps.
  int top_k = 2048;                             ///< Rows selected per KV head.
  Estimator estimator = Estimator::kNormAware;
  int bits = 0;                       ///< Of norm-aware; 0: `RetrievalConfig`'s.
  std::optional<SelectionRule> rule;  ///< The estimator's.
  std::optional<SketchCode> code;     ///< The estimator's.
  double error_target = 0.0;          ///< Of the priority rule.
  int coarse_bits = 0;                ///< Of it over a scalar code.
  int candidates = RetrievalConfig{}.candidates;
  std::uint64_t seed = 0;
  Backend backend = Backend::kAuto;
  PageFormat page_format = PageFormat::kModel;
  bool compare_dense = false;
  /// Fetched rows kept on the device per KV head, layer and sequence; 0: none. Left out: four times
  /// `top_k` on a GPU, none on the CPU, which reads rows where they are.
  std::optional<int> row_cache_rows;
  /// Share of the best tokens at N/33 that successive steps are to have in common; left out: the
  /// overlaps of `drift`.
  std::optional<double> step_overlap;
  DriftModel drift = DriftModel::kSmolLm2;

  /// Left out: what the run needs.
  std::optional<std::size_t> device_budget;
  std::optional<std::size_t> host_budget;

  /// Fills the shape in from the preset and the defaults, and checks every field. Throws
  /// `kInvalidArgument` with all problems, `kNotFound` for an unknown preset.
  void resolve();

  [[nodiscard]] RetrievalConfig retrieval() const;
  /// Cached rows with the backend in use.
  [[nodiscard]] int rows_kept(Backend in_use) const;
  [[nodiscard]] ModelConfig model() const;
};

/// Steps decoded before the measured ones, which warm caches and tables.
inline constexpr int kWarmupSteps = 2;
/// Shares of the selected rows that are imposed to be on the device, beside the real one.
inline constexpr std::array kImposedShares = {0.0, 0.8};
/// Most measured steps whose selection is looked at: each has a needle per KV head and layer.
inline constexpr int kMaxProbes = 16;

/// Returns, for example, "4.2 GiB".
[[nodiscard]] std::string show_bytes(double bytes);

}  // namespace kvtier::services
