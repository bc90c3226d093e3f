#include "services/tools/plan/plan.h"

#include "kvtier/calibration.h"

#include "include/types/failure.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>

namespace kvtier::services {
namespace {

using nlohmann::json;

constexpr std::int64_t kTokenStep = 1024;                    // of the largest context
constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;  // of StressOptions

std::filesystem::path config_file(const std::string& model) {
  const std::filesystem::path path = model;
  return is_directory(path) ? path / "config.json" : path;
}

json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw_error(ErrorCode::kNotFound, "--model: expected a file, found none at ", path.string());
  }
  const json document = json::parse(file, nullptr, false);
  if (document.is_object()) return document;
  throw_invalid(path.string(), "an object of JSON", "something else");
}

/// Returns a positive integer of a configuration, or `otherwise` where it is not there or null.
int field(const std::filesystem::path& path, const json& config, const char* name,
          std::optional<int> otherwise = {}) {
  constexpr int kMost = 1 << 20;
  const auto found = config.find(name);
  if (found == config.end() || found->is_null()) {
    if (otherwise) return *otherwise;
    throw_invalid(path.string(), name, "none");
  }
  if (found->is_number_integer() && *found > 0 && *found <= kMost) return found->get<int>();
  throw_invalid(join(path.string(), ": ", name), join("1 to ", kMost), found->dump());
}

/// The decoder's part of a configuration.
json read_decoder(const std::filesystem::path& config) {
  json document = read_json(config);
  const auto text = document.find("text_config");
  return text != document.end() && text->is_object() ? json(*text) : document;
}

/// Returns n where every n-th layer of a configuration without `layer_types` attends to all tokens;
/// 0: there is no such pattern.
int full_every(const std::filesystem::path& path, const json& config) {
  const std::string type = config.value("model_type", "");
  const int otherwise = type == "gemma2" ? 2 : type.starts_with("gemma3") ? 6 : 0;
  return config.contains("sliding_window_pattern") ? field(path, config, "sliding_window_pattern")
                                                   : otherwise;
}

bool fits_gpu(const PlanCommand& command, const MemoryNeed& need, std::size_t weights) {
  return need.device() + weights <= command.gpu_bytes;
}

bool fits_host(const PlanCommand& command, const MemoryNeed& need) {
  return !command.host_bytes || need.pages <= *command.host_bytes;
}

bool has_room(const PlanCommand& command, const MemoryNeed& need, std::size_t weights) {
  return fits_gpu(command, need, weights) && fits_host(command, need);
}

/// Whether a context fits. An engine is started only where the rest fits.
bool fits(const PlanCommand& command, StressOptions options, std::int64_t tokens,
          std::size_t weights) {
  options.tokens = tokens;
  if (!has_room(command, stored_need(options), weights)) return false;
  return has_room(command, memory_need(options), weights);
}

std::int64_t largest_context(const PlanCommand& command, const StressOptions& options,
                             std::size_t weights) {
  const std::int64_t least = std::max<std::int64_t>(kTokenStep, options.top_k);
  if (!fits(command, options, least, weights)) return 0;
  std::int64_t low = least / kTokenStep;
  std::int64_t high = kMostTokens / kTokenStep + 1;  // too many
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(command, options, middle * kTokenStep, weights) ? low : high) = middle;
  }
  return std::max(low * kTokenStep, least);
}

/// Returns GB/s of gathers of about so many rows, of the best allocation.
double gather_rate(const Calibration& calibration, double rows) {
  std::size_t nearest = 0;
  for (std::size_t i = 1; i < kCalibrationRows.size(); ++i) {
    const auto distance = [rows](int measured) { return std::abs(std::log(rows / measured)); };
    if (distance(kCalibrationRows[i]) < distance(kCalibrationRows[nearest])) nearest = i;
  }
  double rate = 0.0;
  for (const CalibrationEntry& entry : calibration.entries) {
    if (entry.allocation == calibration.best) rate = entry.gb_per_s[nearest];
  }
  return rate;
}

std::size_t row_bytes(const StressOptions& options) {
  const auto bytes = static_cast<std::size_t>(*options.head_dim) * 4;
  return options.page_format == PageFormat::kInt8 ? bytes / 2 + 2 * sizeof(float) : bytes;
}

std::optional<Calibration> calibration_of(const PlanCommand& command) {
  if (command.calibration.empty()) return std::nullopt;
  try {
    return read_calibration(command.calibration);
  } catch (const Error& error) {
    std::string problem = error.what();
    constexpr std::string_view kSubject = "calibration file: ";
    if (problem.starts_with(kSubject)) problem.erase(0, kSubject.size());
    throw Error(error.code(), "--calibration: " + problem);
  }
}

}  // namespace

void read_shape(const std::filesystem::path& config, StressOptions& options) {
  const json document = read_decoder(config);
  constexpr const char* kLatent = "kv_lora_rank";
  if (document.contains(kLatent) && !document[kLatent].is_null()) {
    throw_invalid(config.string(), "standard attention",
                  join("latent attention (", kLatent, " ", document[kLatent].dump(), ")"));
  }
  const int heads = field(config, document, "num_attention_heads");
  options.layers = field(config, document, "num_hidden_layers");
  options.query_heads = heads;
  options.kv_heads = field(config, document, "num_key_value_heads", heads);
  const auto head_dim = document.find("head_dim");
  const bool has = head_dim != document.end() && !head_dim->is_null();
  options.head_dim =
      has ? field(config, document, "head_dim") : field(config, document, "hidden_size") / heads;
}

WindowLayers read_windows(const std::filesystem::path& config) {
  const json document = read_decoder(config);
  constexpr const char* kWindow = "sliding_window";
  const bool unused =
      document.contains("use_sliding_window") && document["use_sliding_window"] == json(false);
  if (unused || !document.contains(kWindow) || document[kWindow].is_null()) return {};
  const int tokens = field(config, document, kWindow);
  const int layers = field(config, document, "num_hidden_layers");
  const auto types = document.find("layer_types");
  if (types != document.end() && types->is_array()) {
    const auto sliding = std::count(types->begin(), types->end(), json("sliding_attention"));
    return {static_cast<int>(sliding), tokens};
  }
  if (const int every = full_every(config, document); every > 0) {
    return {layers - layers / every, tokens};
  }
  const int first = document.contains("use_sliding_window")
                        ? std::min(field(config, document, "max_window_layers", layers), layers)
                        : 0;
  return {layers - first, tokens};
}

std::size_t weight_bytes_beside(const std::filesystem::path& config) {
  const std::filesystem::path folder = config.parent_path();
  std::ifstream file(folder / "model.safetensors.index.json");
  if (file) {
    const json index = json::parse(file, nullptr, false);
    const json::json_pointer size("/metadata/total_size");
    if (index.contains(size) && index[size].is_number_unsigned()) return index[size];
  }
  std::size_t bytes = 0;
  const std::filesystem::path searched = folder.empty() ? "." : folder;
  for (const auto& entry : std::filesystem::directory_iterator(searched)) {
    if (entry.path().extension() == ".safetensors") bytes += entry.file_size();
  }
  return bytes;
}

Plan make_plan(const PlanCommand& command) {
  Plan plan;
  plan.options = command.options;
  const bool has_file = !command.model.empty();
  const std::filesystem::path config = config_file(command.model);
  if (has_file) read_shape(config, plan.options);
  plan.options.steps = 1;
  plan.options.row_cache_rows = 0;
  plan.options.resolve();
  plan.weights = command.weight_bytes ? *command.weight_bytes
                 : has_file           ? weight_bytes_beside(config)
                                      : 0;
  plan.weights_known = command.weight_bytes || plan.weights > 0;
  const std::optional<Calibration> calibration = calibration_of(command);

  plan.need = memory_need(plan.options);
  plan.fits_gpu = fits_gpu(command, plan.need, plan.weights);
  plan.fits_host = fits_host(command, plan.need);
  const std::size_t taken = plan.need.device() + plan.weights;
  plan.row_cache = std::min(most_row_cache(plan.options),
                            command.gpu_bytes - std::min(command.gpu_bytes, taken));
  plan.largest_tokens = largest_context(command, plan.options, plan.weights);
  if (has_file) plan.windows = read_windows(config);
  const double full_layers = *plan.options.layers - plan.windows.layers;
  if (calibration) {
    const double heads = *plan.options.kv_heads;
    const double selected = heads * plan.options.top_k * (1.0 - command.hits);
    // The last tokens are on the GPU.
    const std::int64_t windowed = std::min<std::int64_t>(plan.windows.tokens, plan.options.tokens) -
                                  plan.options.retrieval().recent_tokens;
    const double in_window = heads * static_cast<double>(std::max<std::int64_t>(windowed, 0));
    const auto seconds = [&](double layers, double rows) {
      const double rate = gather_rate(*calibration, std::max(rows, 1.0)) * 1e9;
      return layers * rows * static_cast<double>(row_bytes(plan.options)) / rate;
    };
    if (gather_rate(*calibration, std::max(selected, 1.0)) > 0.0) {
      plan.fetch_seconds = seconds(full_layers, selected) + seconds(plan.windows.layers, in_window);
    }
  }
  if (command.device_gb_per_s && plan.weights_known) {
    const double read = full_layers / *plan.options.layers;
    const double bytes =
        static_cast<double>(plan.weights) + read * static_cast<double>(plan.need.sketches);
    plan.read_seconds = bytes / (*command.device_gb_per_s * 1e9);
  }
  return plan;
}

}  // namespace kvtier::services
