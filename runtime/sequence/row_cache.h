#pragma once

#include "runtime/sequence/pools.h"
#include "runtime/sequence/sequence_memory.h"
#include "transfer/device/device.h"
#include "transfer/kv/row_checks.h"
#include "transfer/row_cache/row_cache.h"

#include <cstdint>
#include <optional>
#include <span>

/// Which layers of which sessions have cached rows (transfer/row_cache/row_cache.h), and a step's
/// fetch through them. Called with the engine's mutex held.
namespace kvtier::runtime {

/// Takes memory for the row cache of a layer, none of which is there yet; nothing happens when the
/// layer has it, when the engine has none left, or no row cache at all.
void take_row_cache(transfer::Stream& stream, const Pools& pools, LayerState& layer);
/// Gives it back, reused after the work enqueued on `stream` so far.
void give_back_row_cache(transfer::Stream& stream, const Pools& pools, LayerState& layer);
/// Forgets the cached rows of the tokens from `begin` on. Their memory stays: captured graphs have
/// its address.
void forget_cached_rows(transfer::Stream& stream, const Pools& pools, const LayerState& layer,
                        std::int64_t begin);

/// Rows to be fetched for one launch.
struct Fetch {
  std::span<LayerState* const> layers;  ///< Of each sequence.
  const transfer::RowReading& reading;  ///< What the launch reads.
  transfer::StepFlags* flags = nullptr;
  bool capturing = false;  ///< No memory is taken then.
};

/// Enqueues the copy of the selected rows to staging, as far as it goes, from their pages in host
/// memory, without which there is no staging, and of
/// cached ones from their slots. On CUDA these may stay there: then returns where rows are, for
/// attention, which must be the next launch. With checks of rows, those that the launch reads are
/// compared, and nothing stays.
transfer::RowCachePlaces fetch_rows(transfer::Stream& stream, const Pools& pools,
                                    const Fetch& fetch);
/// Returns the row cache of the layers of each sequence, for a kernel that fetches rows itself;
/// nothing where none has one. `capturing`: as of `Fetch`.
std::optional<transfer::CachedSequences> cached_sequences(transfer::Stream& stream,
                                                          const Pools& pools,
                                                          std::span<LayerState* const> layers,
                                                          bool capturing);
/// Enqueues that the selected rows enter the row cache, those that are not yet and find a slot,
/// where the layers' pages are all resident.
void enqueue_row_prefetch(transfer::Stream& stream, const Pools& pools, const Fetch& fetch);

}  // namespace kvtier::runtime
