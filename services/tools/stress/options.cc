#include "services/tools/stress/options.h"

#include "include/types/failure.h"
#include "services/console/retrieval.h"
#include "services/console/text.h"

#include <algorithm>

namespace kvtier::services {
namespace {

constexpr std::int64_t kMinTokens = 1024;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 29;
constexpr int kMaxSteps = 1 << 20;
constexpr int kMaxRowCacheRows = 1 << 20;

const ModelPreset* find_preset(std::string_view name) {
  const std::vector<ModelPreset>& presets = model_presets();
  const auto found = std::ranges::find(presets, name, &ModelPreset::name);
  return found == presets.end() ? nullptr : &*found;
}

void check_range(std::vector<std::string>& problems, const char* field, std::int64_t low,
                 std::int64_t high, std::int64_t found) {
  if (found >= low && found <= high) return;
  problems.push_back(join("--", field, ": expected ", low, "..", high, ", found ", found));
}

}  // namespace

const std::vector<ModelPreset>& model_presets() {
  // num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim of the published configs.
  static const std::vector<ModelPreset> presets{{"llama-3.1-8b", 32, 32, 8, 128},
                                                {"llama-3.1-70b", 80, 64, 8, 128},
                                                {"qwen3-8b", 36, 32, 8, 128},
                                                {"qwen3-30b-a3b", 48, 32, 4, 128}};
  return presets;
}

void StressOptions::resolve() {
  ModelPreset shape{"", 1, 32, 8, 128};
  if (!preset.empty()) {
    const ModelPreset* found = find_preset(preset);
    if (found == nullptr) {
      std::string names;
      for (const ModelPreset& known : model_presets()) {
        names.append(names.empty() ? "" : ", ").append(known.name);
      }
      throw_error(ErrorCode::kNotFound, "--preset: expected one of ", names, ", found ", preset);
    }
    shape = *found;
  }
  layers = layers.value_or(shape.layers);
  query_heads = query_heads.value_or(shape.query_heads);
  kv_heads = kv_heads.value_or(shape.kv_heads);
  head_dim = head_dim.value_or(shape.head_dim);

  std::vector<std::string> problems;
  check_range(problems, "tokens", kMinTokens, kMaxTokens, tokens);
  check_range(problems, "batch", 1, 64, batch);
  check_range(problems, "steps", 1, kMaxSteps, steps);
  // Of too few tokens k is not to blame.
  check_range(problems, "k", 1, tokens < kMinTokens ? kMaxTokens : tokens, top_k);
  check_range(problems, "row-cache-rows", 0, kMaxRowCacheRows, row_cache_rows.value_or(0));
  if (step_overlap && !(*step_overlap > 0.0 && *step_overlap < 1.0)) {
    problems.push_back(join("--overlap: expected a number between 0 and 1, found ", *step_overlap));
  }
  Config config;
  config.model = model();
  config.retrieval = retrieval();
  for (const std::string& problem : config.validate()) problems.push_back(as_option(problem));
  refuse("options", problems);
}

RetrievalConfig StressOptions::retrieval() const {
  RetrievalConfig config = RetrievalConfig::of(estimator);
  config.num_planes = bits;
  config.rule = rule.value_or(config.rule);
  config.code = code.value_or(config.code);
  config.error_target = error_target;
  config.coarse_bits = coarse_bits;
  config.candidates = candidates;
  config.top_k = top_k;
  return config;
}

int StressOptions::rows_kept(Backend in_use) const {
  if (row_cache_rows) return *row_cache_rows;
  return in_use == Backend::kCuda ? std::min(top_k, kMaxRowCacheRows / 4) * 4 : 0;
}

ModelConfig StressOptions::model() const {
  return {.layers = layers.value_or(1),
          .query_heads = query_heads.value_or(32),
          .kv_heads = kv_heads.value_or(8),
          .head_dim = head_dim.value_or(128)};
}

std::string show_bytes(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  while (bytes >= 1024.0 && unit + 1 < kUnits.size()) {
    bytes /= 1024.0;
    ++unit;
  }
  return format(unit == 0 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
}

}  // namespace kvtier::services
