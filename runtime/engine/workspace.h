#pragma once

#include "attention/flash_decode.h"
#include "hashing/append.h"
#include "runtime/engine/host_staging.h"
#include "runtime/engine/memory_plan.h"
#include "scoring/selector.h"
#include "transfer/device/device.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"

#include <cstddef>
#include <cstdint>

namespace kvtier::runtime {

/// The device memory of one call, allocated once. Calls use it one after another: `begin_use` makes
/// a stream wait, on the device, for the use before it.
class Workspace {
 public:
  Workspace(transfer::Device& device, const transfer::KvGeometry& kv, const WorkspacePlan& plan);

  const int batch_queries;           ///< Queries per launch.
  const std::int64_t append_tokens;  ///< Tokens packed at a time.
  const std::int64_t staged_rows;
  scoring::Selector selector;
  attention::FlashDecode flash;
  transfer::Buffer packed;   ///< Of `append_tokens` tokens, see `packed_rows`.
  transfer::Buffer queries;  ///< `[batch_queries, query_heads, head_dim]` fp32
  HostStaging staging;

  /// Returns pinned memory of at least so many bytes for what a call reads back; the memory of the
  /// call before.
  [[nodiscard]] std::byte* read_back(std::size_t bytes);
  [[nodiscard]] hashing::PackedRows packed_rows() const;
  /// Tokens appended at a time that need no packing: their squares take the place of packed rows.
  [[nodiscard]] std::int64_t given_tokens() const;
  [[nodiscard]] hashing::PackedRows given_rows() const {
    return {nullptr, packed.as<transfer::RowSquares>()};
  }

  void begin_use(transfer::Stream& stream) const {
    if (last_stream_ != &stream) wait_for_last_use(stream);
  }
  void end_use(transfer::Stream& stream) {
    last_use_ = stream.record();
    last_stream_ = &stream;
  }
  /// Orders `stream` after all uses so far.
  void wait_for_last_use(transfer::Stream& stream) const { stream.wait(last_use_); }

 private:
  transfer::Device& device_;
  std::int64_t kv_heads_;
  std::int64_t row_bytes_;
  transfer::Buffer read_back_;
  transfer::Event last_use_;
  const transfer::Stream* last_stream_ = nullptr;
};

}  // namespace kvtier::runtime
