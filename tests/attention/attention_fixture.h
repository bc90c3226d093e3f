#pragma once

#include "attention/flash_decode.h"
#include "support/backend_fixture.h"
#include "support/oracle.h"
#include "support/priority_oracle.h"

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::attention {

/// Keys and values of one sequence, `[kv_heads][length][head_dim]`, exact in the storage dtype.
struct SequenceData {
  std::int64_t length = 0;
  std::int64_t resident_tokens = 0;  ///< Last tokens that are in the ring, at most its capacity.
  std::vector<float> keys;
  std::vector<float> values;
};

/// A selected token and the query heads of the group that attend it.
struct SelectedRow {
  std::int32_t id = 0;
  std::uint16_t mask = 0xFFFF;
  std::vector<float> biases = {};  ///< `[bias_heads]` of the problem.
};

/// One attention call and everything it reads. Pages of resident tokens hold NaN, so that a row
/// read from the wrong place is noticed.
struct Problem {
  transfer::KvGeometry kv;
  transfer::SpanRule rule;
  float softmax_scale = 0.1F;
  float logit_softcap = 0.0F;
  std::vector<SequenceData> sequences;
  std::vector<transfer::QueryToken> query_tokens;
  std::vector<float> queries;  ///< `[queries, query_heads, head_dim]`
  /// `[rows * kv_heads]` ascending; empty: no selected part.
  std::vector<std::vector<SelectedRow>> selected;
  int bias_heads = 0;  ///< Of the selected rows: none, one for a group, or one for each head.
  std::int64_t staged_capacity = 0;
  bool pages_on_device = false;
  bool poison_pages = false;  ///< All page contents are NaN: rows must come from elsewhere.
  DType out_dtype = DType::kFloat32;
  std::int64_t out_padding = 0;  ///< Elements between the outputs of two heads.
  bool with_lse = true;

  [[nodiscard]] int group() const { return kv.group; }
  [[nodiscard]] std::int64_t head_stride() const { return kv.head_dim + out_padding; }
  [[nodiscard]] std::vector<std::int64_t> static_tokens(std::size_t query_index) const;
  /// Tokens that a query head attends, by the rules and by the selection.
  [[nodiscard]] std::vector<std::int64_t> attended(std::size_t query_index, int head) const;
  /// What is added to their logits.
  [[nodiscard]] std::vector<double> biases(std::size_t query_index, int head) const;
};

/// A problem with one sequence per length and one row per (sequence, lag), random from `seed`.
[[nodiscard]] Problem make_problem(std::uint64_t seed, DType dtype, int head_dim, int kv_heads,
                                   int group, const std::vector<std::int64_t>& lengths,
                                   const std::vector<std::int32_t>& lags);

/// Selects about `share` of the eligible tokens of every row and KV head, each for a random subset
/// of the heads of its group.
void select_at_random(Problem& problem, std::uint64_t seed, double share);

/// Gives every selected row biases, `heads` of them, some of them 0.
void bias_at_random(Problem& problem, std::uint64_t seed, int heads);

/// What the call returned, on the host.
struct Outcome {
  std::vector<float> out;        ///< `[queries, query_heads, head_dim + padding]`
  std::vector<std::byte> bytes;  ///< The same, as stored.
  std::vector<float> lse;        ///< `[queries, query_heads]`
  transfer::StepFlags flags;
};

class AttentionTest : public testing::BackendTest {
 protected:
  /// A problem in device memory, ready to be asked for.
  struct Placed {
    AttendRequest request;
    transfer::SelectionView selection;
    OutputBatch outputs;
    transfer::Buffer out;
    transfer::Buffer lse;
    transfer::Buffer flags;
    std::vector<transfer::Buffer> kept;
  };
  Placed place(const Problem& problem);
  Outcome download_outcome(const Problem& problem, const Placed& placed);
  /// Runs one call.
  Outcome run(const Problem& problem);
  /// Runs and compares output, log-sum-exp and counters with the oracle.
  void expect_oracle(const Problem& problem);

  /// Largest relative error of an output and absolute error of a log-sum-exp. The CPU works in
  /// fp32: sums of up to some thousand terms, 2^-24 each. CUDA carries queries and probabilities in
  /// at least 16 bits, so a logit of up to 32 is off by up to 32 * 2^-17.
  [[nodiscard]] double tolerance() const { return GetParam() == Backend::kCuda ? 5e-4 : 3e-5; }

 private:
  void place_sequence(const Problem& problem, const SequenceData& data, Placed& placed);
  void place_selection(const Problem& problem, Placed& placed);
};

[[nodiscard]] FlashDecodeLimits limits_of(const Problem& problem);

}  // namespace kvtier::attention
