#pragma once

#include "scoring/estimator.h"
#include "transfer/kv/sequence.h"

#include <cstdint>

namespace kvtier::scoring {

/// What a `SelectionPlan` depends on: the shape of a `SelectRequest`, without its memory.
struct SelectShape {
  ScoreParams params;
  transfer::SpanRule rule;
  int kv_heads = 0;
  int group = 0;            ///< Query heads of a KV head.
  int head_dim = 0;         ///< Of rows and queries.
  int plane_dim = 0;        ///< Of the planes.
  bool int8_rows = false;   ///< Rows of pages are in int8,
  bool fp16_sinks = false;  ///< always-attended ones have copies in 16 bits.
  int num_queries = 0;
  std::int64_t max_length = 0;  ///< In whole sketch slabs, so that growing tokens keep a plan.
  bool keep_scores = false;
  bool recall = false;  ///< With a recall target, or missed mass wanted.

  friend bool operator==(const SelectShape&, const SelectShape&) = default;
};

/// Which kernels select. docs: scoring/README.md has the decision tree.
enum class SelectionPath {
  kGeneric,    ///< Scores in memory; on the CPU always.
  kFused,      ///< One kernel, sums in shared memory (fused/).
  kStream,     ///< A key per token (stream/).
  kSoft,       ///< Soft collision, one kernel (soft/).
  kSoftHeads,  ///< Soft collision, a selection per query head (soft/).
};

/// Queries of a request that are served together.
struct QueryPart {
  int first = 0;
  int count = 0;
  /// Its first query has the place of this one in the memory by which blocks exchange data: parts
  /// that run at the same time have different places.
  int first_place = 0;

  KVTIER_HOST_DEVICE [[nodiscard]] bool has(int query_index) const {
    return first <= query_index && query_index < first + count;
  }
};

/// How `Selector::select` serves a shape.
struct SelectionPlan {
  SelectionPath path = SelectionPath::kGeneric;
  /// Whether it reads the caller's queries itself: then it may be given them as
  /// `SelectRequest::input`, and needs no tables.
  bool reads_queries = false;
  /// Whether it can attend as well, where it is given `SelectRequest::attend`: the rows must then
  /// lie where `row_address` says, in device memory.
  bool attends = false;
  /// Most selected tokens of a query with which it can attend through the row cache, where it is
  /// given `SelectRequest::cached` too; 0: it cannot.
  int cached_rows = 0;
  /// Queries of a part of a batch that is attended so, of two parts or more: the rows of one are on
  /// the link while the sketches of the next are read. 0: it is served whole.
  int part_queries = 0;
  /// Whether it selects `transfer::num_to_select` tokens of each query, and its last kernel lets
  /// the next one start only after its own wait (transfer/device/launch_cuda.cuh): that one may
  /// read all but the selection and the queries before it waits for it.
  bool k_known = false;

  // The launch, of paths whose blocks share a (query, KV head).
  unsigned blocks = 0;  ///< Of a (query, KV head), that choose.
  unsigned parts = 0;   ///< Of a (query, KV head), that score, where others choose.
  int capacity = 0;     ///< Tokens of a block that chooses, whole units.
  int stages = 0;       ///< Units that a warp has under way.
  int bytes = 0;        ///< Dynamic shared memory of a block that chooses.
};

/// What a plan depends on of a CUDA device, from its attributes.
struct DeviceLimits {
  int processors = 0;
  int major = 0;           ///< Compute capability.
  int block_bytes = 0;     ///< Most shared memory of a block.
  double read_gbps = 0.0;  ///< Of its memory, by clock and width.
};

namespace cuda {
/// Of the current device.
[[nodiscard]] DeviceLimits device_limits();
/// `may_exchange`: whether kernels may be used whose blocks wait for one another.
[[nodiscard]] SelectionPlan plan_selection(const SelectShape& shape, const DeviceLimits& device,
                                           bool may_exchange);
}  // namespace cuda

}  // namespace kvtier::scoring
