#include "benchmarks/benchmarks.h"
#include "services/console/command_line.h"

#include <CLI/CLI.hpp>

#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace {

using namespace kvtier;         // NOLINT: a program
using namespace kvtier::bench;  // NOLINT

/// Options that say how rows are chosen.
struct Retrieval {
  RetrievalConfig config{.top_k = 2048};
  std::string estimator = "norm_aware";
  std::string selection = "per_kv_head";
  std::string rule;  // empty: the estimator's
  std::string code;

  void add_options(CLI::App& app) {
    app.add_option("--estimator", estimator)
        ->check(services::one_of({"soft_collision", "hard_collision", "norm_aware"}));
    app.add_option("--selection", selection)
        ->check(services::one_of({"per_kv_head", "per_query_head", "per_sequence"}));
    app.add_option("--rule", rule)->check(services::one_of({"top_k", "priority"}));
    app.add_option("--code", code)->check(services::one_of({"sign", "scalar"}));
    app.add_option("--error-target", config.error_target,
                   "of the priority rule, at most --k rows; 0: none");
    app.add_option("--coarse-bits", config.coarse_bits, "of its first phase; 0: one phase");
    app.add_option("--candidates", config.candidates, "of its first phase, over k");
    app.add_option("--bits", config.num_planes, "of a key, of norm_aware");
    app.add_option("--query-bits", config.query_bits, "of norm_aware");
    app.add_option("--planes-per-table", config.planes_per_table, "of the collision estimators");
    app.add_option("--tables", config.tables, "of the collision estimators");
    app.add_option("--k", config.top_k, "rows per head, unless --sparsity is given");
    app.add_option("--sparsity", config.sparsity, "context length over rows per head");
  }
  [[nodiscard]] RetrievalConfig resolve() const {
    const RetrievalConfig own =
        RetrievalConfig::of(estimator == "norm_aware"       ? Estimator::kNormAware
                            : estimator == "hard_collision" ? Estimator::kHardCollision
                                                            : Estimator::kSoftCollision);
    RetrievalConfig resolved = config;
    resolved.estimator = own.estimator;
    resolved.rule = own.rule;
    resolved.code = own.code;
    resolved.selection = selection == "per_query_head" ? Selection::kPerQueryHead
                         : selection == "per_sequence" ? Selection::kPerSequence
                                                       : Selection::kPerKvHead;
    if (!rule.empty()) {
      resolved.rule = rule == "priority" ? SelectionRule::kPriority : SelectionRule::kTopK;
    }
    if (!code.empty()) resolved.code = code == "scalar" ? SketchCode::kScalar : SketchCode::kSign;
    return resolved;
  }
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Times of kvtier's kernels and of its decode step on an NVIDIA GPU, one JSON row each. Every "
      "row is printed; --json keeps them with command, machine and date.",
      "kvtier-bench"};
  app.fallthrough();
  std::string file;
  std::vector<std::string> cuda_libs;
  int replays = 20;
  app.add_option("--json", file, "file of the run");
  app.add_option("--cuda-libs", cuda_libs, "folders of libcudnn and libcublas")->delimiter(',');
  app.add_option("--replays", replays, "replays that count")->check(services::between(3, 400));

  const CLI::Validator counts = services::between(1, 1 << 30);
  StepCase step;
  Retrieval retrieval;
  std::string placement = "device";
  std::int64_t new_tokens = 1, rows = 2048, region_gib = 64;
  int bits = 256;
  std::string kv_dtype = "model";
  ModelCase whole;
  std::vector<std::string> shapes, only;
  bool with_dense = false;

  auto* decode = app.add_subcommand("decode_step", "one layer's step through the public API");
  auto* paged = app.add_subcommand("paged_step", "the same over a paged cache of the caller");
  auto* cached = app.add_subcommand("row_cache_step", "one layer's step with a row cache");
  auto* prefetch = app.add_subcommand("prefetch", "the same with rows fetched ahead of steps");
  auto* resident = app.add_subcommand("resident_step", "a step with tiers that are not needed");
  auto* dense = app.add_subcommand("dense", "dense attention by cuDNN");
  auto* select = app.add_subcommand("select", "tables, scores and the choice of k");
  auto* tables = app.add_subcommand("tables", "tables of a query");
  auto* gather = app.add_subcommand("gather", "random rows into staging");
  auto* flash = app.add_subcommand("flash_decode", "attention over rows and runs of tokens");
  auto* ingest = app.add_subcommand("ingest", "append of new tokens");
  auto* prefill = app.add_subcommand("prefill", "sketches of a prompt, and its append");
  auto* overlap = app.add_subcommand("overlap", "fast against exact selections");
  auto* fork = app.add_subcommand("fork", "children of a long session");
  auto* model = app.add_subcommand("model", "tokens per second of a whole decoder");
  auto* ttft = app.add_subcommand("ttft", "what sketches add to the prefill of a prompt");
  auto* all = app.add_subcommand("all", "every row of docs/performance.md");

  for (auto* command : {decode, paged, dense}) {
    command->add_option("--query-heads", step.query_heads)->check(counts);
    command->add_option("--kv-heads", step.kv_heads)->check(counts);
    command->add_option("--head-dim", step.head_dim)->check(counts);
  }
  ForkCase fork_case;
  fork->add_option("--tokens", fork_case.tokens, "of the parent")->check(counts);
  fork->add_option("--layers", fork_case.layers)->check(counts);
  fork->add_option("--kv-heads", fork_case.kv_heads)->check(counts);
  fork->add_option("--children", fork_case.children)->check(counts);
  for (auto* command :
       {decode, paged, cached, prefetch, resident, dense, select, flash, prefill, overlap, ttft}) {
    command->add_option("--tokens", step.tokens, "context length")->check(counts);
  }
  for (auto* command : {decode, paged, dense, select, tables, ingest}) {
    command->add_option("--batch", step.batch, "sequences")->check(services::between(1, 64));
  }
  for (auto* command :
       {decode, paged, cached, prefetch, resident, select, tables, overlap, model, ttft})
    retrieval.add_options(*command);
  for (auto* command : {decode, resident, gather, ingest}) {
    command->add_option("--placement", placement, "where the KV is")
        ->check(services::one_of({"device", "host"}));
  }
  for (auto* command : {decode, cached, prefetch, gather}) {
    command->add_option("--kv-dtype", kv_dtype, "rows in pages: model (bf16) or int8")
        ->check(services::one_of({"model", "int8"}));
  }
  for (auto* command : {decode, cached}) {
    command->add_flag("--verify-rows", step.verify_rows, "rows on the host have checksums");
  }
  for (auto* command : {gather, flash}) {
    command->add_option("--rows", rows, "per KV head, of which there are 8")->check(counts);
  }
  for (auto* command : {ingest, prefill}) {
    command->add_option("--bits", bits, "of the sketch")->check(services::between(64, 1024));
  }
  decode->add_option("--layers", step.layers, "layers in the graph, each with its own memory")
      ->check(counts);
  decode
      ->add_option(
          "--shapes", shapes,
          "several, each TOKENS[xSEQUENCES][:QUERY_HEADS/KV_HEADS], as 128K,32Kx16,128K:64/8")
      ->delimiter(',')
      ->excludes("--tokens")
      ->excludes("--batch")
      ->excludes("--query-heads")
      ->excludes("--kv-heads");
  decode->add_flag("--cudnn", with_dense, "dense attention of each shape by cuDNN, too");
  decode->add_flag("--dense", step.dense, "attend to everything instead");
  decode->add_option("--recall", step.recall, "share of the attention that decides about the rows")
      ->check(services::between(0.0, 1.0));
  decode->add_flag("--stages", step.stages, "time of each kernel too");
  for (auto* command : {cached, prefetch}) {
    command->add_option("--row-cache-rows", step.row_cache_rows, "per KV head")->check(counts);
    command
        ->add_option("--share", step.row_cache_share, "of the selected rows that are to be found")
        ->check(services::between(0.0, 1.0));
  }
  gather->add_option("--region-gib", region_gib, "memory that the rows are in")->check(counts);
  model->add_option("--context", whole.contexts, "tokens")->delimiter(',')->check(counts);
  model->add_option("--layers", whole.layers, "decoder layers")->check(counts);
  all->add_option("--only", only, "words; cases with one of them in their name are run")
      ->delimiter(',');
  ingest->add_option("--new-tokens", new_tokens, "of each sequence")
      ->check(services::between(1, 4096));
  if (const auto code =
          services::parse_command_line(app, {argv + 1, argv + argc}, {std::cout, std::cerr})) {
    return *code;
  }

  std::string command = "kvtier-bench";
  for (int i = 1; i < argc; ++i) command += " " + std::string(argv[i]);
  return services::with_errors_printed(std::cerr, [&] {
    std::vector<DenseCase> step_shapes;
    for (const std::string& shape : shapes) step_shapes.push_back(parse_shape(shape));
    Run run(file, command, cuda_libs, replays);
    step.placement = placement == "host" ? KvPlacement::kHost : KvPlacement::kDevice;
    step.page_format = kv_dtype == "int8" ? PageFormat::kInt8 : PageFormat::kModel;
    step.retrieval = retrieval.resolve();
    if (*decode) {
      if (step_shapes.empty()) step_shapes.push_back(step.shape());
      for (const DenseCase& shape : step_shapes) {
        step.set_shape(shape);
        const json parameters = {{"shape", name_of(shape)}};
        if (with_dense) {
          run.attempt("dense_cudnn", parameters, [&] { bench_dense_cudnn(run, step.shape()); });
        }
        run.attempt("decode_step", parameters, [&] { bench_decode_step(run, step); });
      }
    }
    if (*paged) bench_paged_step(run, step);
    if (*cached) bench_row_cache_step(run, step);
    if (*prefetch) bench_prefetch(run, step);
    if (*resident) bench_resident_step(run, step);
    if (*dense) {
      const DenseCase shape{.tokens = step.tokens,
                            .batch = step.batch,
                            .query_heads = step.query_heads,
                            .kv_heads = step.kv_heads,
                            .head_dim = step.head_dim};
      check_dense(run, shape);
      bench_dense_cudnn(run, shape);
    }
    if (*select) bench_select(run, step.tokens, step.batch, step.retrieval);
    if (*tables) bench_tables(run, step.batch, step.retrieval);
    if (*gather) bench_gather(run, {rows}, step.placement, region_gib, step.page_format);
    if (*flash) bench_flash_decode(run, step.tokens, rows);
    if (*ingest) bench_ingest(run, step.batch, new_tokens, bits, step.placement);
    if (*prefill) {
      bench_prefill(run, step.tokens, bits);
      bench_prefill_append(run, step.tokens);
    }
    if (*overlap) {
      RetrievalConfig exact = step.retrieval;
      exact.query_bits = 0;
      bench_overlap(run, step.tokens, step.retrieval, exact);
    }
    if (*fork) bench_fork(run, fork_case);
    if (*model) {
      whole.retrieval = step.retrieval;
      static_cast<void>(bench_model(run, whole));
    }
    if (*ttft) {
      whole.retrieval = step.retrieval;
      bench_ttft(run, whole, step.tokens);
    }
    if (*all) bench_all(run, only);
    return run.failed() ? 1 : 0;
  });
}
