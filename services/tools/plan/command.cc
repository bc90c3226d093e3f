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
      "1 where it does not fit");
  StressOptions& options = command.options;
  options.estimator = Estimator::kNormAware;
  CLI::Option* preset = add_preset(app, options);
  app.add_option("--model", command.model,
                 "A config.json of Hugging Face, or its folder; this or --preset is required")
      ->excludes(preset);
  add_size(app, "--tokens", options.tokens,
           "Tokens of context, for example 64K or 1M (default 64K)");
  add_bytes(app, "--gpu", command.gpu_bytes, "Memory of the GPU, for example 80G")->required();
  add_bytes(app, "--host", command.host_bytes, "Memory of the host for KV (default: any)");
  add_bytes(app, "--weights", command.weight_bytes,
            "Bytes of the weights on the GPU (default: of the files at --model)");
  app.add_option("--batch", options.batch, "Sequences, decoded together")->capture_default_str();
  app.add_option("--k", options.top_k, "Rows selected per KV head")->capture_default_str();
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
      plan.weights == 0 ? "not counted: no files, no --weights" : "on the GPU";
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
              verdict(plan.fits_gpu));
  out << line("largest context",
              plan.largest_tokens == 0 ? "none" : std::to_string(plan.largest_tokens) + " tokens",
              command.host_bytes ? "" : "with as much host memory as it takes");
  if (plan.fetch_seconds) {
    out << line("fetches", format("%.2f ms", *plan.fetch_seconds * 1e3), "a token, over the link");
  }
  if (plan.read_seconds) {
    out << line("reads", format("%.2f ms", *plan.read_seconds * 1e3),
                "a token, weights and sketches of each sequence");
  }
  const int exit_code = plan.fits_gpu && plan.fits_host ? 0 : 1;
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
