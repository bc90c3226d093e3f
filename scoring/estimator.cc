#include "scoring/estimator.h"

#include "hashing/scalar_code.h"
#include "scoring/estimator_kernels.h"
#include "scoring/score_math.h"
#include "transfer/device/with_cuda.h"

#include <cassert>
#include <cmath>
#include <limits>
#include <numbers>

namespace kvtier::scoring {

ScoreParams score_params(const RetrievalConfig& config, int head_dim, float softmax_scale,
                         int layer) {
  ScoreParams params;
  params.estimator = config.estimator;
  params.weighting = config.weighting();
  params.selection = config.selection;
  params.planes_per_table = config.planes_per_table;
  params.tables = config.tables;
  params.query_bits = config.query_bits;
  params.tau = config.tau;
  params.logit_scale = softmax_scale;
  params.top_k = static_cast<int>(config.most_selected(std::numeric_limits<int>::max()));
  params.sparsity = config.sparsity;

  const int num_planes = config.sketch(head_dim).num_planes;
  const bool scalar = config.code == SketchCode::kScalar;
  params.projections = scalar ? head_dim : num_planes;
  params.code_bits = scalar ? num_planes / head_dim : 0;
  params.rule = config.rule;
  params.coarse_bits = config.coarse_bits;
  params.candidates = config.candidates;
  const double error = config.error_in_force();
  params.threshold = static_cast<float>(error * error);
  params.priority_key = mix_bits(static_cast<std::uint32_t>(config.seed) ^
                                 mix_bits(static_cast<std::uint32_t>(config.seed >> 32) ^
                                          mix_bits(static_cast<std::uint32_t>(layer) + 1)));
  if (params.code_bits > 0) {
    params.sign_scale = hashing::scalar_step(params.code_bits) / static_cast<float>(2 * head_dim);
    return params;
  }
  double scale = std::sqrt(std::numbers::pi / 2.0) / num_planes;
  if (config.planes() == PlaneKind::kOrthogonal) {
    scale /= 1.0 + 1.0 / (4.0 * head_dim);
  }
  params.sign_scale = static_cast<float>(scale);
  return params;
}

std::int64_t entries_per_head(const ScoreParams& params) noexcept {
  switch (params.estimator) {
    case Estimator::kSoftCollision: {
      const int hi = (params.planes_per_table + 1) / 2;
      const int lo = params.planes_per_table - hi;
      return std::int64_t{params.tables} * ((1 << hi) + (1 << lo));
    }
    case Estimator::kHardCollision:
      return params.tables;
    case Estimator::kNormAware:
      break;
  }
  return params.num_planes();
}

std::int64_t max_per_query(const ScoreParams& params, std::int64_t length) {
  const transfer::AttendedSpans everything{
      .sink_end = 0, .eligible_end = length, .tail_begin = length, .visible = length};
  return transfer::num_to_select(params.top_k, params.sparsity, everything);
}

void build_query_tables(transfer::Stream& stream, const ScoreParams& params,
                        const hashing::PlanesView& planes, const float* queries, int num_queries,
                        int query_heads, float* entries, QueryScalars* scalars) {
  assert(params.query_planes() <= planes.num_planes);
  assert(params.weighting != ValueWeighting::kDefault);
  transfer::enqueue<cpu::build_query_tables, cuda::build_query_tables>(
      stream, params, planes, queries, num_queries, query_heads, entries, scalars);
}

void read_queries(transfer::Stream& stream, const ScoreParams& params,
                  const hashing::PlanesView& planes, const QueryInput& input, float* queries,
                  float* entries, QueryScalars* scalars) {
  assert(params.query_planes() <= planes.num_planes && planes.head_dim == input.kv.head_dim);
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr && cuda::reads_queries_at_once(params, input)) {
      return cuda::read_queries(stream.native(), params, planes, input, queries, entries, scalars);
    }
  }
  transfer::pack_queries(stream, input.kv, input.items, queries);
  build_query_tables(stream, params, planes, queries, input.items.count, input.kv.query_heads(),
                     entries, scalars);
}

}  // namespace kvtier::scoring
