#pragma once

#include "runtime/paging/page_table.h"
#include "runtime/sequence/pools.h"
#include "transfer/device/device.h"
#include "transfer/kv/sequence.h"
#include "transfer/row_cache/row_cache.h"

#include <cstdint>
#include <vector>

namespace kvtier::runtime {

/// One layer of a sequence. `length` and `capacity` are what the host has enqueued; the device's
/// own are in `view.counters`.
struct LayerState {
  PageTable pages;
  std::vector<PageTable> slabs;  ///< One per sketch of the engine.
  transfer::SequenceView view;
  std::int64_t length = 0;
  /// Tokens for which pages and slabs are held by this layer alone, the shared ones below
  /// `length` apart: appends up to there write in place.
  std::int64_t capacity = 0;
  std::byte* row_cache_frame =
      nullptr;  ///< See runtime/sequence/row_cache.h; none until a step has fetched.
  transfer::RowCache row_cache{};    ///< In it.
  bool may_hold_prefetched = false;  ///< Rows may have been prefetched.
};

/// Sizes of one layer's regions in the buffer of a session.
struct LayerBytes {
  LayerBytes(const transfer::KvGeometry& kv, std::size_t num_sketches, std::int64_t tokens);
  std::size_t page_table, slab_table, counters, sinks, ring, total;
};

/// What a sequence holds in all layers: frames of the engine's pools, and one buffer on the device
/// with its tables, counters, sinks and rings. Called with the engine's mutex held.
///
/// The last owner calls `release` first; frames would otherwise go back with no event.
class SequenceMemory {
 public:
  /// Allocates the buffer of a sequence of at most `max_tokens` tokens; enqueues nothing. Throws
  /// `kResourceExhausted`.
  SequenceMemory(Pools& pools, std::int64_t max_tokens);
  SequenceMemory(const SequenceMemory&) = delete;  // holds frames
  SequenceMemory& operator=(const SequenceMemory&) = delete;

  /// Restores all pages of all layers, or none and returns false when they are too many. Throws
  /// what `PagePool::ensure_resident` throws.
  bool ensure_resident(transfer::Stream& stream);
  /// Enqueues what makes it an empty sequence.
  void clear(transfer::Stream& stream);
  /// Makes it the sequence that `other`, of the same capacity, is: its buffer is copied, its pages
  /// and slabs are held by both from then on. The part-filled last page and slab are among them,
  /// so that neither sequence has room until it has copied them.
  void share(transfer::Stream& stream, SequenceMemory& other);
  /// Gives everything back, reused after the work enqueued on `stream` so far.
  void release(transfer::Stream& stream);

  /// Makes the first `tokens` tokens of every layer those of the pages and slabs that it holds,
  /// whole pages that others have written; those of the sinks are resident.
  void begin_at(transfer::Stream& stream, std::int64_t tokens);
  /// Writes a layer's length and capacity to the device. Cached rows past the length are forgotten:
  /// other tokens may come there.
  void set_length(transfer::Stream& stream, const LayerState& layer) const;
  /// Ends each layer's room where it has none of its own, after frames have become shared.
  void limit_room(transfer::Stream& stream);
  /// Tokens up to which a layer can be written in place.
  [[nodiscard]] std::int64_t room(const LayerState& layer) const;

  /// Says that a graph is being captured that uses the memory: its pages stay where they are, those
  /// that it takes later, too. Throws `kFailedPrecondition` when some are evicted or have moved.
  void capture();
  [[nodiscard]] bool captured() const noexcept { return captured_; }
  void keep_pages(LayerState& layer, std::int64_t begin);

  [[nodiscard]] std::vector<LayerState>& layers() noexcept { return layers_; }

 private:
  void share_layer(transfer::Stream& stream, const LayerState& from, LayerState& to) const;

  Pools& pools_;
  std::int64_t max_tokens_;
  transfer::Buffer buffer_;
  std::vector<LayerState> layers_;
  bool captured_ = false;
};

}  // namespace kvtier::runtime
