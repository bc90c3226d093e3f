#pragma once

#include "services/console/console.h"
#include "services/tools/stress/memory.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace kvtier::services {

/// The subcommand `plan`.
struct PlanCommand {
  std::string model;  ///< A config.json of Hugging Face, or its folder; empty: `options.preset`.
  std::size_t gpu_bytes = 0;
  std::optional<std::size_t> host_bytes;    ///< Left out: any number.
  std::optional<std::size_t> weight_bytes;  ///< Left out: of the files beside the configuration.
  std::string calibration;                  ///< Empty: none.
  std::optional<double> device_gb_per_s;    ///< Rate at which the GPU reads its memory.
  double hits = 0.0;                        ///< Share of the rows that are found on the GPU.
  StressOptions options;                    ///< Without the shape, or with a preset.
};

/// Layers with a sliding window, of which a step reads the last tokens alone. Their KV and sketches
/// are kept as those of the others.
struct WindowLayers {
  int layers = 0;
  int tokens = 0;
};

/// What a model takes, as `MemoryNeed`, and what follows.
struct Plan {
  StressOptions options;  ///< With the shape.
  WindowLayers windows;
  MemoryNeed need;
  std::size_t weights = 0;
  bool weights_known = false;  ///< Given, or of files; else all below is without weights.
  std::size_t row_cache = 0;   ///< What the GPU has left for it, as far as steps have a use for it.
  bool fits_gpu = false;       ///< Without the row cache, which takes what is left.
  bool fits_host = false;
  std::int64_t largest_tokens = 0;  ///< Of one sequence; 0: none fits.
  /// Seconds in which a token's rows cross the link; nothing without a calibration.
  std::optional<double> fetch_seconds;
  /// In which the GPU reads weights and sketches; nothing without its rate or the weights.
  std::optional<double> read_seconds;
};

/// Reads layers, heads and head_dim into `options`. Throws `kNotFound` for a file that cannot be
/// read, `kInvalidArgument` for one that does not say them, or says latent attention, which kvtier
/// does not have.
void read_shape(const std::filesystem::path& config, StressOptions& options);

/// Returns the layers with a sliding window, as transformers reads `sliding_window`, `layer_types`
/// and what older configurations of Qwen2 and Gemma have instead. Throws as `read_shape`.
[[nodiscard]] WindowLayers read_windows(const std::filesystem::path& config);

/// Returns the bytes of the weights beside a config.json: as model.safetensors.index.json says, or
/// of all *.safetensors; 0: there are none.
[[nodiscard]] std::size_t weight_bytes_beside(const std::filesystem::path& config);

/// Computes a plan by the formulas of docs/memory.md. Throws what `read_shape`,
/// `StressOptions::resolve`, `read_calibration` and `memory_need` throw.
[[nodiscard]] Plan make_plan(const PlanCommand& command);

/// Adds the subcommand and its options to a program.
void add_plan(CLI::App& program, PlanCommand& command);

/// The exit code where the model does not fit.
inline constexpr int kExitNoFit = 3;

/// Writes a plan as text. Returns 0 or `kExitNoFit`. Throws as `make_plan`.
[[nodiscard]] int run_plan(const PlanCommand& command, const Console& console);

}  // namespace kvtier::services
