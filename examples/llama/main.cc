#include "kvtier/version.h"

#include "include/types/failure.h"
#include "llama/bench.h"
#include "llama/eval.h"
#include "llama/generate.h"
#include "llama/record.h"
#include "llama/report.h"
#include "services/console/command_line.h"
#include "services/console/enum_names.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>
#include <optional>
#include <unistd.h>

namespace {

using namespace kvtier;            // NOLINT(google-build-using-namespace): a program, not a library
using namespace kvtier::llama;     // NOLINT(google-build-using-namespace)
using namespace kvtier::services;  // NOLINT(google-build-using-namespace): its command line

struct Arguments {
  std::string model, tasks, json, logits, prompt, trace;
  std::string matmul = "cpu";
  std::string cuda_libs;
  EvalOptions eval;
  std::int64_t max_tokens = 32;
  std::optional<double> sparsity;
  RecordOptions record;
  BenchOptions bench;
};

// Of bench.
constexpr std::array<std::pair<std::string_view, PageFormat>, 3> kBenchFormats{
    {{"model", PageFormat::kModel}, {"bf16", PageFormat::kModel}, {"int8", PageFormat::kInt8}}};
constexpr std::array<std::pair<std::string_view, KvPlacement>, 2> kPlacements{
    {{"device", KvPlacement::kDevice}, {"host", KvPlacement::kHost}}};
constexpr std::array<std::pair<std::string_view, HostAllocation>, 3> kBenchAllocations{
    {{"auto", HostAllocation::kAuto},
     {"managed", HostAllocation::kManaged},
     {"registered", HostAllocation::kRegistered}}};

/// Adds an option that takes numbers of tokens, such as 32K.
template <typename Number>
CLI::Option* add_tokens(CLI::App& app, const std::string& flag, Number& to,
                        const std::string& description, int least) {
  return add_size(app, flag, to, description)->check(between(least, 1 << 24));
}

void add_runtime(CLI::App& app, Arguments& a) {
  RuntimeOptions& runtime = a.eval.runtime;
  app.add_option("--model", a.model, "Directory of config.json and *.safetensors")->required();
  add_named(app, "--backend", kBackendNames, runtime.backend, "Where kvtier runs (default auto)");
  app.add_option("--matmul", a.matmul, "Where the decoder's own arithmetic runs")
      ->check(one_of({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--cuda-libs", a.cuda_libs, "Folder of libcublas.so, for --matmul cuda");
  app.add_option("--threads", runtime.threads, "Threads of the decoder's own arithmetic; 0: all")
      ->check(at_least(0));
  app.add_option("--host-mib", runtime.host_mib, "Page pool, MiB; 0: what the session needs")
      ->check(between(0, 1 << 24));
  app.add_option("--host-budget", runtime.host_budget,
                 "Share of these pages that memory holds, such as 50%; the others: --disk-cache");
  app.add_option("--disk-cache", runtime.disk_cache,
                 "Folder of this program alone for pages that find no room in memory");
  add_named(app, "--kv-dtype", kPageFormatNames, runtime.page_format,
            "Rows in pages: model (bf16) or int8 (default model)");
  app.add_option("--memcached", runtime.remote.memcached,
                 "HOST:PORT,... or unix:PATH of memcached servers that keep copies of its pages")
      ->delimiter(',');
  app.add_option("--redis", runtime.remote.redis,
                 "HOST:PORT or unix:PATH of a Redis server that keeps such copies");
  app.add_option("--device-mib", runtime.device_mib,
                 "Sketches and workspaces, MiB; 0: what the session needs")
      ->check(between(0, 1 << 24));
}

void add_kv(CLI::App& app, Arguments& a) {
  CLI::Option* kv =
      app.add_option("--kv", a.eval.runtime.kv,
                     "Server that keeps the KV, selects and attends: unix:PATH of kvtier serve");
  for (const char* own : {"--backend", "--host-mib", "--host-budget", "--device-mib",
                          "--disk-cache", "--memcached", "--redis"}) {
    kv->excludes(app.get_option(own));
  }
}

/// Presets of `eval` have a row of their own error target. An error target that is given without a
/// sparsity and without a k is all that sizes a selection.
void set_error_rows(const CLI::App& app, RetrievalOptions& retrieval) {
  const auto given = [&app](const char* name) {
    const CLI::Option* const option = app.get_option_no_throw(name);
    return option != nullptr && option->count() > 0;
  };
  if (app.get_name() == "eval" && !retrieval.presets.empty()) {
    retrieval.error_rows = ErrorRows::kBeside;
  }
  const bool alone = given("--error-target") && !given("--sparsity") && !given("--k");
  const auto aims = [](double target) { return target != 0.0; };
  if (alone && std::ranges::all_of(retrieval.error_targets, aims)) {
    retrieval.error_rows = ErrorRows::kInstead;
  }
}

void add_retrieval(CLI::App& app, RetrievalOptions& retrieval) {
  RetrievalConfig& shared = retrieval.shared;
  app.add_option("--bits", retrieval.bits, kBitsText)->delimiter(',');
  add_priority(app, retrieval.error_targets, retrieval.coarse_bits, retrieval.candidates);
  app.add_option("--planes-per-table", shared.planes_per_table, "P of the collision estimators")
      ->capture_default_str();
  app.add_option("--tables", shared.tables, "L of the collision estimators")->capture_default_str();
  app.add_option("--tau", shared.tau, "Temperature of soft_collision")->capture_default_str();
  app.add_option("--query-bits", shared.query_bits, "Bits of norm_aware query weights: 0, 4 or 8")
      ->capture_default_str();
  add_named(app, "--plane-kind", kPlaneKindNames, shared.plane_kind,
            "Kind of planes; by default the estimator's own");
  add_tokens(app, "--sink", retrieval.sink, "First tokens, always attended", 0)
      ->capture_default_str();
  add_tokens(app, "--window", retrieval.window, "Last tokens, always attended", 0)
      ->capture_default_str();
  app.add_option("--seed", retrieval.seeds, "Seeds of the planes")
      ->delimiter(',')
      ->capture_default_str();
  CLI::Option* preset =
      app.add_option("--preset", retrieval.presets,
                     "socket: the method of the SOCKET paper; default: that of this library")
          ->delimiter(',')
          ->check(one_of({"default", "socket"}));
  app.final_callback([&app, &retrieval] {
    check_estimator_options(app, retrieval.estimators);
    if (app.get_name() != "generate") set_error_rows(app, retrieval);
  });
  for (const char* own :
       {"--estimator", "--value-weighting", "--selection", "--rule", "--code", "--bits",
        "--query-bits", "--error-target", "--coarse-bits", "--candidates", "--planes-per-table",
        "--tables", "--tau", "--plane-kind"}) {
    preset->excludes(app.get_option(own));
  }
}

/// The only estimator, weighting, selection, rule and code of a run.
void add_single(CLI::App& app, RetrievalOptions& retrieval) {
  constexpr const char* kText = "As of eval";
  add_named(app, "--estimator", kEstimatorNames, retrieval.estimators, kText)
      ->default_str("norm_aware");
  add_named(app, "--value-weighting", kWeightingNames, retrieval.weightings, kText)
      ->default_str("default");
  add_named(app, "--selection", kSelectionNames, retrieval.selections, kText)
      ->default_str("per_kv_head");
  add_named(app, "--rule", kRuleNames, retrieval.rules, kText);
  add_named(app, "--code", kCodeNames, retrieval.codes, kText);
}

CLI::App* add_eval(CLI::App& app, Arguments& a) {
  CLI::App* eval =
      app.add_subcommand("eval", "Answer retrieval tasks, dense and sparse, and compare");
  add_runtime(*eval, a);
  add_kv(*eval, a);
  RetrievalOptions& retrieval = a.eval.retrieval;
  eval->add_option("--tasks", a.tasks, "Task file (safetensors)")->required();
  eval->add_option("--cases", a.eval.cases, "Cases, such as n8192.d100")
      ->delimiter(',')
      ->required();
  eval->add_option("--sequences", a.eval.sequences, "Sequences of each case")
      ->capture_default_str();
  eval->add_option("--first-sequence", a.eval.first_sequence, "The first of them")
      ->capture_default_str();
  const auto add_list = [eval](const char* flag, const auto& names, auto& to, const char* text) {
    return add_named_list(*eval, flag, names, to, text)->allow_extra_args();
  };
  add_list("--estimator", kEstimatorNames, retrieval.estimators, "How tokens are scored")
      ->default_str("norm_aware");
  add_list("--value-weighting", kWeightingNames, retrieval.weightings, "Value weightings")
      ->default_str("default");
  add_list("--selection", kSelectionNames, retrieval.selections, "Who shares a selection")
      ->default_str("per_kv_head");
  add_list("--rule", kRuleNames, retrieval.rules, kRuleText);
  add_list("--code", kCodeNames, retrieval.codes, kCodeText);
  eval->add_option("--sparsity", retrieval.sparsities, "Context over tokens selected; 0: dense")
      ->delimiter(',')
      ->capture_default_str();
  eval->add_option("--json", a.json, "File for the figures");
  eval->add_option("--logits", a.logits,
                   "File for the logits (safetensors): CASE.SEQUENCE.ROW of the report");
  add_retrieval(*eval, retrieval);
  return eval;
}

CLI::App* add_generate(CLI::App& app, Arguments& a) {
  CLI::App* generate = app.add_subcommand("generate", "Continue a prompt greedily");
  add_runtime(*generate, a);
  add_kv(*generate, a);
  generate->add_option("--prompt-ids", a.prompt, "Token ids: 1,2,3 or @FILE")->required();
  add_tokens(*generate, "--max-tokens", a.max_tokens, "Most tokens to generate", 1)
      ->capture_default_str();
  generate->add_option("--sparsity", a.sparsity,
                       "Tokens visible over tokens selected; 0: dense (default: as many tokens as "
                       "the error target needs)");
  add_single(*generate, a.eval.retrieval);
  add_retrieval(*generate, a.eval.retrieval);
  return generate;
}

CLI::App* add_record(CLI::App& app, Arguments& a) {
  CLI::App* record = app.add_subcommand("record", "Write a trace of dense decoding");
  add_runtime(*record, a);
  record->add_option("--tasks", a.tasks, "Task file (safetensors)")->required();
  record->add_option("--case", a.record.task, "Case, such as n8192.d100")->required();
  record->add_option("--sequence", a.record.sequence, "Sequence of the case")
      ->capture_default_str();
  add_tokens(*record, "--steps", a.record.steps, "Tokens after the context; 0: all", 0)
      ->capture_default_str();
  record->add_option("--layer", a.record.layer, "One layer, stored under plain names; default: all")
      ->check(at_least(0));
  record->add_option("--out", a.trace, "File to write (safetensors)")->required();
  return record;
}

CLI::App* add_bench(CLI::App& app, Arguments& a) {
  BenchOptions& options = a.bench;
  CLI::App* bench =
      app.add_subcommand("bench", "Time a whole model's tokens, dense and sparse in one run");
  bench->add_option("--shape", options.shape, "Layers, widths and heads of a published model")
      ->check(one_of(bench_shapes()))
      ->capture_default_str();
  bench->add_flag("--random-weights")
      ->description("In place of trained ones, which take the same time")
      ->required();
  bench->add_option("--layers", options.layers, "In place of the shape's")->check(between(1, 1024));
  bench
      ->add_option(
          "--tensor-parallel", options.tensor_parallel,
          "Ranks that share the model; one of them is measured, without what they exchange")
      ->check(between(1, 64))
      ->capture_default_str();
  add_tokens(*bench, "--context", options.contexts, "Tokens before those that are timed", 1024)
      ->delimiter(',')
      ->capture_default_str();
  bench->add_option("--steps", options.steps, "Tokens timed for each row")
      ->check(between(3, 400))
      ->capture_default_str();
  add_named(*bench, "--backend", kBackendNames, options.backend,
            "auto: the GPU where there is one (default auto)");
  bench->add_option("--cuda-libs", options.cuda_libs, "Folders of libcublas and libcudnn")
      ->delimiter(',');
  bench->add_option("--threads", options.threads, "Of the decoder on the CPU; 0: all")
      ->check(at_least(0));
  bench->add_option("--json", options.json, "File for the figures");
  add_named(*bench, "--kv-dtype", kBenchFormats, options.page_format,
            "Rows in pages: model (bf16), bf16 or int8")
      ->default_str("model");
  add_named_list(*bench, "--placement", kPlacements, options.placements,
                 "On a GPU: where the KV is, rows for each")
      ->allow_extra_args()
      ->default_str("device,host");
  add_named(*bench, "--host-allocation", kBenchAllocations, options.host_allocation,
            "On a GPU: how host memory is pinned (docs/decisions/0010-host-pages.md)")
      ->default_str("auto");
  add_size(*bench, "--row-cache-rows", options.row_cache_rows,
           "On a GPU: rows per KV head that stay on it with KV on the host, rows for each number; "
           "default: those of the library")
      ->delimiter(',')
      ->check(between(0, 1 << 20));
  bench
      ->add_option(
          "--locality", options.locality,
          "On a GPU: whose queries those of attention drift like; none: the projections' own")
      ->check(one_of({"smollm2", "needle-llama", "none"}))
      ->capture_default_str();
  bench->add_option("--batch", options.batches, "Sequences that decode together, rows for each")
      ->delimiter(',')
      ->check(between(1, 64))
      ->capture_default_str();
  bench->add_flag("!--no-dense", options.dense, "Leaves dense attention out");
  bench->add_flag("--stages", options.stages,
                  "Adds to the JSON file the time of each kernel of one layer");
  RetrievalOptions& retrieval = options.retrieval;
  CLI::Option* sparsity =
      bench
          ->add_option(
              "--sparsity", retrieval.sparsities.front(),
              "Tokens visible over those selected; where --error-target is given alone, as "
              "many as it needs")
          ->check(between(1.0, 1e6))
          ->capture_default_str();
  add_tokens(*bench, "--k", options.top_ks, "Tokens selected per KV head, rows for each number", 1)
      ->delimiter(',')
      ->excludes(sparsity);
  add_single(*bench, retrieval);
  add_retrieval(*bench, retrieval);
  return bench;
}

/// Device tensors of the decoder go to kvtier, so both have to be on the GPU.
std::unique_ptr<Compute> make_compute(Arguments& a) {
  RuntimeOptions& runtime = a.eval.runtime;
  if (runtime.page_format != PageFormat::kModel && !runtime.kv.empty()) {
    throw_invalid("--kv-dtype", "model with --kv", name_of(kPageFormatNames, runtime.page_format));
  }
  if (a.matmul == "cpu") {
    if (!a.cuda_libs.empty()) throw_invalid("--cuda-libs", "--matmul cuda with it", "cpu");
    return make_cpu_compute(runtime.threads);
  }
  if (!runtime.kv.empty()) throw_invalid("--matmul", "cpu with --kv", "cuda");
  if (runtime.backend == Backend::kCpu) throw_invalid("--matmul", "cpu with --backend cpu", "cuda");
  if (runtime.threads != 0) throw_invalid("--threads", "none with --matmul cuda", runtime.threads);
  runtime.backend = Backend::kCuda;
  return make_cuda_compute(a.cuda_libs);
}

void show_progress(const std::string& what, double share) {
  std::fprintf(stderr, "\r\033[K%s %3.0f %%", what.c_str(), 100.0 * share);
  std::fflush(stderr);
}

void clear_progress() {
  if (isatty(STDERR_FILENO) != 0) std::fprintf(stderr, "\r\033[K");
}

void warn_of_positions(const llama::ModelConfig& model, std::int64_t tokens) {
  if (model.max_positions == 0 || tokens <= model.max_positions) return;
  std::cerr << "warning: expected at most " << model.max_positions
            << " tokens, the model's max_position_embeddings, found " << tokens
            << ": later ones may be wrong\n";
}

void run_eval(Arguments& a, const std::string& command) {
  if (isatty(STDERR_FILENO) != 0) a.eval.progress = show_progress;
  check_writable(a.json, "--json");
  check_writable(a.logits, "--logits");
  if (!a.logits.empty() && a.logits == a.json) {
    throw_invalid("--logits", "another file than that of --json", a.logits);
  }
  const TaskFile tasks(a.tasks);
  Decoder decoder = load_decoder(a.model, make_compute(a));
  a.eval.keep_logits = !a.logits.empty();
  std::int64_t longest = 0;
  for (const std::string& name : a.eval.cases) longest = std::max(longest, tasks.at(name).length);
  warn_of_positions(decoder.config(), longest);
  const EvalResult result = evaluate(decoder, tasks, a.eval);
  clear_progress();
  print_report(std::cout, decoder.config(), result);
  const RunInfo run{.model = a.model, .command = command, .threads = a.eval.runtime.threads};
  if (!a.json.empty()) write_json(a.json, run, result);
  if (!a.logits.empty()) write_logits(a.logits, decoder.config().vocab_size, result);
}

void run_generate(Arguments& a) {
  Decoder decoder = load_decoder(a.model, make_compute(a));
  RetrievalOptions retrieval = a.eval.retrieval;
  retrieval.sparsities = {a.sparsity.value_or(1.0)};
  std::vector<std::string> left_out;
  GenerateOptions options;
  options.prompt = parse_ids(a.prompt);
  options.max_tokens = a.max_tokens;
  warn_of_positions(decoder.config(),
                    static_cast<std::int64_t>(options.prompt.size()) + a.max_tokens);
  options.runtime = a.eval.runtime;
  const std::vector<Method> methods = make_methods(retrieval, left_out);
  if (methods.size() != 1) {
    throw_invalid("--bits, --error-target, --seed, --preset", "one of each",
                  join(methods.size(), " methods"));
  }
  options.method = methods.front();
  if (!a.sparsity) options.method.sparsity = 0.0;
  bool first = true;
  generate(decoder, options, [&first](std::int32_t token) {
    std::cout << (first ? "" : ",") << token << std::flush;
    first = false;
  });
  std::cout << '\n';
}

void run_record(Arguments& a) {
  check_writable(a.trace, "--out");
  const TaskFile tasks(a.tasks);
  Decoder decoder = load_decoder(a.model, make_compute(a));
  a.record.runtime = a.eval.runtime;
  warn_of_positions(decoder.config(), tasks.at(a.record.task).length);
  record(decoder, tasks, a.record, a.trace);
  std::cout << "wrote " << a.trace << '\n';
}

int run_program(std::vector<std::string> arguments, const Console& console) {
  CLI::App app("kvtier-llama: a small Llama and Qwen3 decoder that keeps its KV in kvtier",
               "kvtier-llama");
  app.set_version_flag("--version", "kvtier-llama " KVTIER_VERSION);
  Arguments a;
  const CLI::App* eval = add_eval(app, a);
  const CLI::App* generate = add_generate(app, a);
  add_record(app, a);
  const CLI::App* bench = add_bench(app, a);
  std::string command = app.get_name();
  for (const std::string& argument : arguments) command += " " + argument;
  if (const auto code = parse_command_line(app, std::move(arguments), console)) return *code;

  if (bench->parsed()) {
    a.bench.command = command;
    run_bench(console.out, a.bench);
  } else if (eval->parsed()) {
    run_eval(a, command);
  } else if (generate->parsed()) {
    run_generate(a);
  } else {
    run_record(a);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const Console console{
      .out = std::cout, .err = std::cerr, .err_is_terminal = isatty(STDERR_FILENO) == 1};
  return with_errors_printed(std::cerr, [&] {
    try {
      const int code = run_program(arguments, console);
      if (!std::cout.flush()) {
        throw Error(ErrorCode::kUnavailable, "standard output: cannot be written");
      }
      return code;
    } catch (...) {
      clear_progress();
      throw;
    }
  });
}
