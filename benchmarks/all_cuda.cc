#include "benchmarks/benchmarks.h"

#include <vector>

namespace kvtier::bench {
namespace {

constexpr std::int64_t K = 1024;
constexpr std::int64_t M = 1024 * K;

RetrievalConfig norm_aware(int bits, int top_k, double sparsity = 0.0) {
  RetrievalConfig retrieval;
  retrieval.estimator = Estimator::kNormAware;
  retrieval.num_planes = bits;
  retrieval.top_k = top_k;
  retrieval.sparsity = sparsity;
  return retrieval;
}

RetrievalConfig soft_collision(int top_k, double sparsity = 0.0,
                               Selection selection = Selection::kPerKvHead) {
  RetrievalConfig retrieval;
  retrieval.estimator = Estimator::kSoftCollision;
  retrieval.selection = selection;
  retrieval.top_k = top_k;
  retrieval.sparsity = sparsity;
  return retrieval;
}

RetrievalConfig hard_collision(int top_k) {
  RetrievalConfig retrieval;
  retrieval.estimator = Estimator::kHardCollision;
  retrieval.planes_per_table = 2;
  retrieval.tables = 300;
  retrieval.top_k = top_k;
  return retrieval;
}

/// Dense attention by cuDNN and by kvtier, for every shape that a step is compared with.
void dense(Run& run) {
  run.attempt("check_dense", {}, [&] { check_dense(run, {.tokens = 16 * K}); });
  std::vector<DenseCase> cases;
  for (std::int64_t tokens = 16 * K; tokens <= M; tokens *= 2) cases.push_back({.tokens = tokens});
  cases.push_back({.tokens = 128 * K, .batch = 8});
  cases.push_back({.tokens = 128 * K, .query_heads = 32, .kv_heads = 32});
  cases.push_back({.tokens = 128 * K, .query_heads = 32, .kv_heads = 4});
  cases.push_back({.tokens = 128 * K, .query_heads = 64, .kv_heads = 8});
  for (const DenseCase& dense : cases) {
    const json parameters = {{"tokens", dense.tokens}, {"batch", dense.batch}};
    run.attempt("dense_cudnn", parameters, [&] { bench_dense_cudnn(run, dense); });
    run.attempt("decode_step", parameters, [&] {
      bench_decode_step(run, {.tokens = dense.tokens,
                              .batch = dense.batch,
                              .query_heads = dense.query_heads,
                              .kv_heads = dense.kv_heads,
                              .dense = true});
    });
  }
}

void steps(Run& run) {
  std::vector<StepCase> cases;
  for (std::int64_t tokens = 16 * K; tokens <= M; tokens *= 2) {
    cases.push_back({.tokens = tokens, .retrieval = norm_aware(256, 2048)});
    cases.push_back({.tokens = tokens, .retrieval = norm_aware(256, 0, 33)});
    cases.push_back({.tokens = tokens, .retrieval = soft_collision(0, 33)});
  }
  cases.push_back({.tokens = M, .retrieval = norm_aware(128, 2048)});
  cases.push_back({.tokens = M, .retrieval = soft_collision(2048)});
  cases.push_back(
      {.tokens = 128 * K, .retrieval = soft_collision(0, 33, Selection::kPerQueryHead)});
  cases.push_back({.tokens = 32 * K, .retrieval = hard_collision(2048)});
  cases.push_back({.tokens = 32 * K, .retrieval = norm_aware(128, 2048)});
  cases.push_back(
      {.tokens = M, .placement = KvPlacement::kHost, .retrieval = norm_aware(256, 2048)});
  cases.push_back({.tokens = M,
                   .placement = KvPlacement::kHost,
                   .page_format = PageFormat::kFloat8,
                   .retrieval = norm_aware(256, 2048)});
  // More attention than these rows have among normal keys: the cost of estimating, for equal rows.
  for (const std::int64_t tokens : {128 * K, M}) {
    cases.push_back({.tokens = tokens, .retrieval = norm_aware(256, 2048), .recall = 0.99});
  }
  run.attempt("hot_step", {{"tokens", M}},
              [&] { bench_hot_step(run, {.tokens = M, .retrieval = norm_aware(256, 2048)}); });
  // Other shapes: eight sequences, no groups, groups of eight.
  cases.push_back({.tokens = 128 * K, .batch = 8, .retrieval = norm_aware(256, 2048)});
  cases.push_back({.tokens = 128 * K, .batch = 8, .retrieval = soft_collision(0, 33)});
  for (const auto& [query_heads, kv_heads] : {std::pair{32, 32}, {32, 4}, {64, 8}}) {
    for (const RetrievalConfig& retrieval : {norm_aware(256, 0, 33), soft_collision(0, 33)}) {
      cases.push_back({.tokens = 128 * K,
                       .query_heads = query_heads,
                       .kv_heads = kv_heads,
                       .retrieval = retrieval});
    }
  }
  for (StepCase& step : cases) {
    const bool long_context = step.tokens == M;
    step.stages = step.query_heads == 32 && step.kv_heads == 8 && step.batch == 1 &&
                  (step.tokens == 128 * K ? step.retrieval.sparsity > 0
                                          : long_context && step.retrieval.sparsity == 0);
    json parameters = retrieval_parameters(step.retrieval);
    parameters["tokens"] = step.tokens;
    run.attempt("decode_step", parameters, [&] { bench_decode_step(run, step); });
  }
}

void kernels(Run& run) {
  const auto select = [&](std::int64_t tokens, int batch, const RetrievalConfig& retrieval) {
    run.attempt("select", retrieval_parameters(retrieval),
                [&] { bench_select(run, tokens, batch, retrieval); });
  };
  for (const int bits : {64, 128, 256, 512, 1024}) select(M, 1, norm_aware(bits, 2048));
  select(M, 1, soft_collision(2048));
  select(M, 1, soft_collision(0, 33));
  select(M, 1, hard_collision(2048));
  for (const RetrievalConfig& retrieval :
       {norm_aware(256, 2048), soft_collision(2048), hard_collision(2048)}) {
    select(128 * K, 8, retrieval);
    for (const int batch : {1, 8}) {
      run.attempt("tables", retrieval_parameters(retrieval),
                  [&] { bench_tables(run, batch, retrieval); });
    }
  }
  run.attempt("gather", {{"placement", "device"}}, [&] {
    bench_gather(run, {256, 2048, 8192}, KvPlacement::kDevice, 32, PageFormat::kModel);
  });
  run.attempt("gather", {{"placement", "host"}}, [&] {
    bench_gather(run, {512, 2048, 8192}, KvPlacement::kHost, 64, PageFormat::kModel);
    bench_gather(run, {2048}, KvPlacement::kHost, 32, PageFormat::kFloat8);
  });
  for (const std::int64_t rows : {256, 2048, 8192}) {
    run.attempt("flash_decode", {{"rows", 8 * rows}},
                [&] { bench_flash_decode(run, 512 * K, rows); });
  }
  for (const int batch : {1, 8, 32}) {
    run.attempt("ingest", {{"batch", batch}},
                [&] { bench_ingest(run, batch, 1, 256, KvPlacement::kDevice); });
  }
  run.attempt("ingest", {{"batch", 8}}, [&] { bench_ingest(run, 8, 1, 600, KvPlacement::kHost); });
  for (const int bits : {128, 256, 600, 1024}) {
    run.attempt("prefill_sketch", {{"bits", bits}}, [&] { bench_prefill(run, 128 * K, bits); });
  }
  run.attempt("prefill_append", {{"tokens", 128 * K}}, [&] { bench_prefill_append(run, 128 * K); });
}

void overlaps(Run& run) {
  RetrievalConfig exact = norm_aware(256, 2048);
  exact.query_bits = 0;
  for (const std::int64_t tokens : {128 * K, M}) {
    run.attempt("overlap", {{"estimator", "norm_aware"}},
                [&] { bench_overlap(run, tokens, norm_aware(256, 2048), exact); });
    run.attempt("overlap", {{"estimator", "soft_collision"}},
                [&] { bench_overlap(run, tokens, soft_collision(2048), soft_collision(2048)); });
  }
}

}  // namespace

void bench_all(Run& run) {
  dense(run);
  steps(run);
  kernels(run);
  overlaps(run);
}

}  // namespace kvtier::bench
