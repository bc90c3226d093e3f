#pragma once

#include "attention/flash_decode.h"
#include "runtime/engine/engine_state.h"
#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvtier::runtime {

/// A page of one sequence of a launch.
struct PageIndex {
  int sequence = 0;
  std::int64_t page = 0;
};

/// One launch of attention over more pages than there are frames, and what it attends to, read back
/// from the device. Lists are in the order of (query, KV head); without a selection there are none.
struct WindowedLaunch {
  const attention::AttendRequest& request;
  const attention::OutputBatch& outputs;
  /// Of each sequence, where changed rows are counted.
  const transfer::Batch<transfer::StepFlags*>& session_flags;
  std::span<const transfer::SequenceCounters> counters;  ///< By sequence.
  std::span<const std::vector<std::int32_t>> ids;
  std::span<const std::vector<std::uint16_t>> masks;
  /// What is added to the logits of each, `[entries, bias_heads]`; empty: nothing.
  std::span<const std::vector<float>> biases;
  int bias_heads = 1;
  std::span<const PageIndex> pages;  ///< All that it reads, ascending.
};

/// Runs the launch on CUDA: pages come a window at a time, each window's rows are attended to as a
/// list of tokens, and the results are merged by log-sum-exp, in the order of tokens. The lists and
/// the results of a window are in the memory that appends pack rows in. Within a submission scope
/// that is not captured and keeps the workspace. Waits for every window but the last.
///
/// `hold` restores as many of these pages as can be resident, at least one, until it is asked
/// again.
void attend_in_windows(transfer::Stream& stream, EngineState& engine, const WindowedLaunch& launch,
                       const std::function<std::size_t(std::span<const PageIndex>)>& hold);

}  // namespace kvtier::runtime
