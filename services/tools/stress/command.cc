#include "services/console/enum_names.h"
#include "services/console/json_report.h"
#include "services/console/options.h"
#include "services/tools/stress/progress.h"
#include "services/tools/stress/stress.h"

#include <CLI/CLI.hpp>

#include <atomic>
#include <csignal>
#include <vector>

namespace kvtier::services {
namespace {

constexpr int kExitInterrupted = 130;

/// Turns SIGINT and SIGTERM into a flag while it lives: the first one sets the flag, a second one
/// ends the program as it would without. At most one at a time.
class InterruptFlag {
 public:
  InterruptFlag() {
    raised = false;
    struct sigaction action {};
    action.sa_handler = [](int /*signal*/) { raised = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  InterruptFlag(const InterruptFlag&) = delete;  // the handlers are the process's
  InterruptFlag& operator=(const InterruptFlag&) = delete;
  ~InterruptFlag() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }

  static inline std::atomic<bool> raised = false;
  static_assert(std::atomic<bool>::is_always_lock_free);  // a handler may touch nothing else

 private:
  struct sigaction interrupt_ {};
  struct sigaction terminate_ {};
};

}  // namespace

CLI::Option* add_preset(CLI::App& app, StressOptions& options) {
  std::vector<std::string> presets;
  for (const ModelPreset& preset : model_presets()) presets.emplace_back(preset.name);
  return app
      .add_option("--preset", options.preset, "Layers, heads and head_dim of a published model")
      ->check(one_of(presets));
}

void add_stress(CLI::App& program, StressCommand& command) {
  CLI::App& app = *program.add_subcommand(
      "stress", "Decode over a long synthetic context and measure speed, memory and recall");
  StressOptions& options = command.options;
  add_preset(app, options);
  add_size(app, "--tokens", options.tokens,
           "Tokens of context, for example 64K or 1M (default 64K)");
  app.add_option("--layers", options.layers, "Layers (default 1)");
  app.add_option("--kv-heads", options.kv_heads, "KV heads (default 8)");
  app.add_option("--query-heads", options.query_heads, "Query heads (default 32)");
  app.add_option("--head-dim", options.head_dim, "64, 96, 128 or 256 (default 128)");
  app.add_option("--batch", options.batch, "Sequences, decoded together")->capture_default_str();
  app.add_option("--k", options.top_k, "Rows selected per KV head")->capture_default_str();
  add_bytes(app, "--device-budget", options.device_budget,
            "Most bytes of device memory (default: what is needed)");
  add_bytes(app, "--host-budget", options.host_budget,
            "Most bytes of KV pages (default: what is needed)");
  add_named(app, "--estimator", kEstimatorNames, options.estimator,
            "How tokens are scored (default norm_aware)");
  app.add_option("--bits", options.bits, kBitsText);
  add_named(app, "--rule", kRuleNames, options.rule, kRuleText);
  add_named(app, "--code", kCodeNames, options.code, kCodeText);
  add_priority(app, options.error_target, options.coarse_bits, options.candidates);
  app.add_option("--steps", options.steps, "Decode steps that are measured")->capture_default_str();
  app.add_option("--seed", options.seed, "Seed of the data")->capture_default_str();
  add_named(app, "--backend", kBackendNames, options.backend, "Where kernels run (default auto)");
  add_named(app, "--kv-dtype", kPageFormatNames, options.page_format,
            "Rows in pages: model (bf16) or int8 (default model)");
  app.add_option(
      "--row-cache-rows", options.row_cache_rows,
      "Fetched rows kept on the device per KV head, layer and sequence; 0: none (default: "
      "four times k on a GPU)");
  CLI::Option* overlap = app.add_option(
      "--overlap", options.step_overlap,
      "Share of the best tokens at N/33 that successive steps have in common (default: that of "
      "--drift)");
  add_named(app, "--drift", kDriftNames, options.drift,
            "Model whose queries set how much successive steps have in common: smollm2 over text, "
            "or needle-llama (default smollm2)")
      ->excludes(overlap);
  app.add_flag("--compare-dense", options.compare_dense,
               "Measure dense attention over one layer's KV on the device as well");
  app.add_option("--json", command.json, "Write the report to this file; -: standard output");
  app.final_callback([&app, &options] { check_estimator_options(app, {options.estimator}); });
}

int run_stress(const StressCommand& command, const Console& console,
               const std::function<void(LogLevel, std::string_view)>& log) {
  JsonReport json(command.json, console);
  const InterruptFlag interrupt;
  ProgressWriter progress(console.err, console.err_is_terminal);
  StressRun run(command.options,
                {.log = log,
                 .progress = [&progress](const StressProgress& now) { progress.show(now); },
                 .interrupted = [] { return InterruptFlag::raised.load(); }});
  run.run();
  progress.finish();
  write_report(json.text(), run.options(), run.report());
  if (json.is_wanted()) json.commit(to_json(run.options(), run.report()));
  run.release([&console](std::string_view what, double bytes) {
    console.err << "freeing " << what << ", " << show_bytes(bytes) << std::endl;
  });
  return run.report().interrupted ? kExitInterrupted : 0;
}

}  // namespace kvtier::services
