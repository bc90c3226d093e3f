#pragma once

#include "attention/flash_decode.h"
#include "runtime/engine/engine_state.h"
#include "runtime/sequence/sequence_memory.h"
#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvtier::runtime {

/// One launch of attention on CUDA over more pages than there are frames: pages come a window at a
/// time, each window's rows are attended to as a list of tokens, and the results are merged by
/// log-sum-exp, in the order of tokens. The lists and the results of a window are in the memory
/// that appends pack rows in. Within a submission scope that is not captured and keeps the
/// workspace.
class WindowedAttention {
 public:
  /// A page of one sequence of the launch.
  struct PageIndex {
    int sequence = 0;
    std::int64_t page = 0;
  };
  /// What a launch attends to, read back from the device. Lists are in the order of (query, KV
  /// head); without a selection there are none.
  struct Reading {
    std::span<const transfer::SequenceCounters> counters;  ///< By sequence.
    std::span<const std::vector<std::int32_t>> ids;
    std::span<const std::vector<std::uint16_t>> masks;
    /// What is added to the logits of each, `[entries, bias_heads]`; empty: nothing.
    std::span<const std::vector<float>> biases;
    int bias_heads = 1;
    std::span<const PageIndex> pages;  ///< All that it reads, ascending.
  };
  /// Restores as many of these pages as can be resident, at least one, until it is asked again.
  using Hold = std::function<std::size_t(std::span<const PageIndex>)>;

  /// `session_flags`: of each sequence, where changed rows are counted.
  WindowedAttention(transfer::Stream& stream, EngineState& engine,
                    const attention::AttendRequest& request, const Reading& reading,
                    const transfer::Batch<transfer::StepFlags*>& session_flags);

  /// Waits for every window but the last.
  void attend(const attention::OutputBatch& outputs, const Hold& hold);

 private:
  /// The tokens of one (query, KV head), ascending, and how many have been attended to.
  struct List {
    transfer::AttendedSpans spans;
    std::span<const std::int32_t> ids;
    std::span<const std::uint16_t> masks;
    std::span<const float> biases;
    int sequence = 0;
    std::int64_t done = 0;

    [[nodiscard]] std::int64_t size() const;
    [[nodiscard]] std::int64_t token(std::int64_t i) const;
    /// Returns whether query head h of the group attends the token in bit h.
    [[nodiscard]] std::uint16_t mask(std::int64_t i) const;
    /// Writes what is added to the logits of the token, for each head that has its own.
    void write_bias(std::int64_t i, int heads, float* to) const;
    /// How many of the next `most` tokens are before `end`.
    [[nodiscard]] std::int64_t before(std::int64_t end, std::int64_t most) const;
  };
  /// Results of all queries, contiguous.
  struct Results {
    float* out = nullptr;
    float* lse = nullptr;
  };

  void count_rows() const;
  [[nodiscard]] std::size_t results_bytes() const;
  [[nodiscard]] Results take_results();
  /// Attends to what the lists have before these tokens, by sequence.
  void attend_until(std::span<const std::int64_t> ends);
  /// Writes the next tokens of every list for the device. Returns none when there are none.
  [[nodiscard]] transfer::SelectionView next_lists(std::span<const std::int64_t> ends);
  void launch(const transfer::SelectionView& selection, const Results& to);
  void write(const attention::OutputBatch& outputs);

  transfer::Stream& stream_;
  EngineState& engine_;
  attention::AttendRequest request_;  ///< Of which nothing is attended to but lists.
  const attention::AttendRequest& whole_;
  const Reading& reading_;
  const transfer::Batch<transfer::StepFlags*>& session_flags_;
  std::vector<List> lists_;
  transfer::Buffer own_;  ///< Where an append's memory is too small.
  std::byte* memory_;     ///< What is left on the device.
  std::size_t bytes_left_;
  Results sum_, part_;
  bool begun_ = false;  ///< `sum_` has results.
};

}  // namespace kvtier::runtime
