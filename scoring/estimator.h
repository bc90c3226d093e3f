#pragma once

#include "kvtier/config.h"

#include "hashing/planes.h"
#include "transfer/device/device.h"
#include "transfer/device/host_device.h"
#include "transfer/kv/rows.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::scoring {

/// Numbers that define a score, resolved from `RetrievalConfig`; by value to kernels.
struct ScoreParams {
  Estimator estimator = Estimator::kSoftCollision;
  ValueWeighting weighting = ValueWeighting::kLinear;
  Selection selection = Selection::kPerKvHead;
  int planes_per_table = 10;  ///< P
  int tables = 60;            ///< L
  /// Of norm-aware: planes of which the signs are read, or coordinates of a scalar code.
  int projections = 256;
  int code_bits = 0;  ///< Bits of a coordinate of a scalar code, or 0 for signs.
  int query_bits = 4;
  float tau = 0.4F;
  float logit_scale = 0.0F;  ///< Softmax scale of the layer, 1 / sqrt(d) unless overridden.
  /// c of norm-aware: sqrt(pi / 2) / projections, / (1 + 1 / (4 d)) if orthogonal; of a scalar code
  /// step / (2 d).
  float sign_scale = 0.0F;
  SelectionRule rule = SelectionRule::kTopK;
  /// Of `kPriority`: least priority of a token that is taken, where p adds up to 1 over all visible
  /// tokens; 0: none.
  float threshold = 0.0F;
  std::uint32_t priority_key = 0;  ///< Of `kPriority`, made of the seed and the layer.
  int top_k = 0;                   ///< Most tokens of a set, where `sparsity` is 0.
  double sparsity = 0.0;           ///< Visible tokens over the most of a set; 0: `top_k`.
  int coarse_bits = 0;             ///< Of the first of two phases (two_phase.h), or 0.
  int candidates = 1;              ///< That the first phase takes, over those selected.

  /// Bits of a projection that norm-aware reads.
  KVTIER_HOST_DEVICE int planes_of_projection() const { return code_bits > 0 ? code_bits : 1; }
  /// Bits of a key read by norm-aware.
  KVTIER_HOST_DEVICE int num_planes() const { return projections * planes_of_projection(); }
  /// Planes of the sketch that are read.
  KVTIER_HOST_DEVICE int planes_read() const {
    return estimator == Estimator::kNormAware ? num_planes() : planes_per_table * tables;
  }
  /// Planes onto which a query is projected.
  KVTIER_HOST_DEVICE int query_planes() const {
    return estimator == Estimator::kNormAware ? projections : planes_read();
  }
  /// What multiplies the weight of a query for bit `t` of a projection of a norm-aware sketch: the
  /// significance of the bit in a scalar code, 2^(B-1-t).
  KVTIER_HOST_DEVICE int significance(int t) const { return 1 << (planes_of_projection() - 1 - t); }
  /// Bits of the products of significances and integer weights, in two's complement.
  KVTIER_HOST_DEVICE int weight_bits() const {
    return query_bits + (code_bits > 0 ? code_bits - 1 : 0);
  }
  /// Whether heads share a set.
  KVTIER_HOST_DEVICE bool shared() const { return selection != Selection::kPerQueryHead; }
  /// Logit-like scores combine over heads by log-mean-exp, collision scores by the mean of shares.
  KVTIER_HOST_DEVICE bool logit_like() const {
    return estimator == Estimator::kNormAware || weighting == ValueWeighting::kCalibrated;
  }

  friend bool operator==(const ScoreParams&, const ScoreParams&) = default;
};

[[nodiscard]] ScoreParams score_params(const RetrievalConfig& config, int head_dim,
                                       float softmax_scale, int layer = 0);

/// Score of a token whose key or value is not finite: below every other eligible token, above a
/// masked one. Reductions over heads skip it.
inline constexpr float kLowestScore = -3.0e38F;

/// What a query contributes to scores, per (query, query head); device memory, fp32.
///
/// - soft collision: `[tables][2^hi + 2^lo]` with hi = ceil(P / 2), lo = P - hi. p_l(r) = A_l[r >>
/// lo] *
///   B_l[r & (2^lo - 1)]: A is the product of sigmoid(2 c_i u_i / tau) over the first hi planes of
///   the table, B over the rest, u = tanh(W q) / sqrt(d). (Corners are the whole hypercube, so the
///   softmax factorises.)
/// - hard collision: `[tables]`, the query's bucket ids as int32 bits.
/// - norm-aware: `[num_planes()]` p_i = w_i . q; with query_bits 4 or 8 the integers
///   round_half_even((2^(bits-1) - 1) p_i / max|p|) as floats; of a scalar code those of the
///   rotation, for each plane of bits times its significance.
struct QueryTables {
  const float* entries = nullptr;  ///< `[queries][query_heads][entries_per_head]`
  std::int64_t entries_per_head = 0;
  const struct QueryScalars* scalars = nullptr;  ///< `[queries][query_heads]`
};

struct QueryScalars {
  float query_norm = 0.0F;      ///< ||q||
  float mean_agreement = 0.0F;  ///< m of `calibrated`: mean over planes of |tanh(u / tau)|.
  float weight_step = 1.0F;  ///< p_i = weight_step * integer (1 for float weights; 0 when q is 0).
};

/// Most tokens that one head selects at the given length.
[[nodiscard]] std::int64_t max_per_query(const ScoreParams& params, std::int64_t length);

/// Entries per (query, head) for the given parameters.
[[nodiscard]] std::int64_t entries_per_head(const ScoreParams& params) noexcept;
/// The most that any valid parameters need.
inline constexpr std::int64_t kMaxEntriesPerHead = 10880;

/// Fills the tables for `num_queries` queries: `queries` fp32 `[num_queries, query_heads,
/// head_dim]`. `entries` and `scalars` are device memory of the sizes above. Enqueued.
void build_query_tables(transfer::Stream& stream, const ScoreParams& params,
                        const hashing::PlanesView& planes, const float* queries, int num_queries,
                        int query_heads, float* entries, QueryScalars* scalars);

/// Queries as the caller gave them.
struct QueryInput {
  transfer::KvGeometry kv;
  transfer::QueryItems items;
  /// True when the work enqueued just before on the stream is `hashing::append_rows`: memory that
  /// steps before it used may then be overwritten without waiting for the append.
  bool after_append = false;
};

/// Converts queries to fp32 as `transfer::pack_queries` does, `queries [queries, query_heads,
/// head_dim]`, and fills their tables as `build_query_tables` does. On Hopper one kernel, which
/// runs beside the append. Enqueued.
void read_queries(transfer::Stream& stream, const ScoreParams& params,
                  const hashing::PlanesView& planes, const QueryInput& input, float* queries,
                  float* entries, QueryScalars* scalars);

}  // namespace kvtier::scoring
