#include "services/console/enum_names.h"
#include "services/console/options.h"
#include "services/console/text.h"
#include "services/tools/plan/plan.h"
#include "services/tools/stress/stress.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <string>

namespace kvtier::services {
namespace {

std::string line(const char* name, const std::string& value, const std::string& note) {
  std::string text = "  " + std::string(name);
  text.resize(18, ' ');
  return text + value + (note.empty() ? "" : "  " + note) + "\n";
}

std::string bytes(std::size_t count) { return show_bytes(static_cast<double>(count)); }

}  // namespace

void add_plan(CLI::App& program, PlanCommand& command) {
  CLI::App& app = *program.add_subcommand(
      "plan",
      "Compute the memory of a model at a length, its largest context, and its speed; exit status "
      "3 where it does not fit");
  StressOptions& options = command.options;
  options.estimator = Estimator::kNormAware;
  CLI::Option* preset = add_preset(app, options);
  app.add_option("--model", command.model,
                 "A config.json of Hugging Face, or its folder; this or --preset is required")
      ->excludes(preset);
  add_size(app, "--tokens", options.tokens,
           "Tokens of context, for example 64K or 1M (default 64K)")
      ->check(between(std::int64_t{1024}, std::int64_t{1} << 29));
  add_bytes(app, "--gpu", command.gpu_bytes, "Memory of the GPU, for example 80G")->required();
  add_bytes(app, "--host", command.host_bytes, "Memory of the host for KV (default: any)");
  add_bytes(app, "--weights", command.weight_bytes,
            "Bytes of the weights on the GPU (default: of the files at --model)");
  app.add_option("--batch", options.batch, "Sequences, decoded together")
      ->check(between(1, 64))
      ->capture_default_str();
  app.add_option("--k", options.top_k, "Rows selected per KV head, at most all tokens")
      ->check(at_least(1))
      ->capture_default_str();
  app.add_option("--bits", options.bits, "Bits of a key")->capture_default_str();
  add_named(app, "--kv-dtype", kPageFormatNames, options.page_format,
            "Rows in pages: model (bf16) or int8 (default model)");
  add_named(app, "--backend", kBackendNames, options.backend,
            "Whose workspace counts (default auto)");
  app.add_option("--calibration", command.calibration,
                 "File of kvtier calibrate, for the time of the fetches");
  app.add_option("--device-gbps", command.device_gb_per_s,
                 "GB/s at which the GPU reads its memory, for the time of weights and sketches")
      ->check(between(1e-3, 1e9));
  app.add_option("--hits", command.hits, "Share of selected rows that are on the GPU already")
      ->check(between(0.0, 1.0))
      ->capture_default_str();
  app.final_callback([&app, &command] {
    StressOptions& sized = command.options;
    if (app.count("--k") == 0) {
      sized.top_k = static_cast<int>(std::min<std::int64_t>(sized.top_k, sized.tokens));
    }
    if (app.count("--hits") > 0 && command.calibration.empty()) {
      throw CLI::RequiresError("--hits", "--calibration");
    }
    if (command.model.empty() && command.options.preset.empty()) {
      throw CLI::RequiredError("--model or --preset");
    }
  });
}

int run_plan(const PlanCommand& command, const Console& console) {
  const Plan plan = make_plan(command);
  const StressOptions& options = plan.options;
  const MemoryNeed& need = plan.need;
  std::ostream& out = console.out;
  out << *options.layers << " layers, " << *options.query_heads << " query heads, "
      << *options.kv_heads << " KV heads, head_dim " << *options.head_dim << "; " << options.tokens
      << " tokens, " << options.batch << (options.batch == 1 ? " sequence" : " sequences")
      << ", k = " << options.top_k << ", "
      << options.retrieval().sketch(*options.head_dim).num_planes << " bits\n";
  const char* const weights =
      plan.weights_known ? "on the GPU" : "not counted: no files, no --weights";
  const std::string without = plan.weights_known ? "" : "without weights";
  const auto joined = [](const std::string& a, const std::string& b) {
    return a + (a.empty() || b.empty() ? "" : ", ") + b;
  };
  const char* const backend =
      need.backend == Backend::kCuda ? "on the GPU" : "on the GPU, as of the CPU backend";
  if (plan.windows.layers > 0) {
    out << line("windows", std::to_string(plan.windows.tokens) + " tokens",
                "read in " + std::to_string(plan.windows.layers) + " of " +
                    std::to_string(*options.layers) + " layers; their KV is kept whole");
  }
  const auto verdict = [](bool fits) { return fits ? "fits" : "does not fit"; };
  const std::string of_host = command.host_bytes ? " of " + bytes(*command.host_bytes) : "";
  out << line("KV", bytes(need.pages) + of_host,
              std::string("host memory") +
                  (command.host_bytes ? std::string(": ") + verdict(plan.fits_host) : ""))
      << line("weights", bytes(plan.weights), weights)
      << line("sketches", bytes(need.sketches), "on the GPU")
      << line("tables", bytes(need.tables), "on the GPU")
      << line("workspace", bytes(need.workspace), backend)
      << line("row cache", bytes(plan.row_cache), "on the GPU, of what is left")
      << line("GPU in all",
              bytes(need.device() + plan.weights + plan.row_cache) + " of " +
                  bytes(command.gpu_bytes),
              joined(verdict(plan.fits_gpu), without));
  out << line("largest context",
              plan.largest_tokens == 0 ? "none" : std::to_string(plan.largest_tokens) + " tokens",
              joined(command.host_bytes ? "" : "with as much host memory as it takes", without));
  if (plan.fetch_seconds) {
    out << line("fetches", format("%.2f ms", *plan.fetch_seconds * 1e3), "a token, over the link");
  }
  if (plan.read_seconds) {
    out << line("reads", format("%.2f ms", *plan.read_seconds * 1e3),
                "a token, weights and sketches of each sequence");
  }
  const int exit_code = plan.fits_gpu && plan.fits_host ? 0 : kExitNoFit;
  if (!plan.weights_known && (plan.fetch_seconds || command.device_gb_per_s)) {
    out << line("speed", "unknown", "without weights: --weights, or their files at --model");
    return exit_code;
  }
  if (!plan.fetch_seconds && !plan.read_seconds) return exit_code;
  const double seconds = plan.fetch_seconds.value_or(0.0) + plan.read_seconds.value_or(0.0);
  const bool both = plan.fetch_seconds && plan.read_seconds;
  out << line(
      "speed",
      (both ? "about " : "at most ") + format("%.1f", 1.0 / std::max(seconds, 1e-9)) + " tokens/s",
      "of one sequence; attention over the fetched rows is not counted");
  return exit_code;
}

}  // namespace kvtier::services
