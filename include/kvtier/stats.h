#pragma once

#include "kvtier/export.h"

#include <cstddef>
#include <cstdint>

namespace kvtier {

/// Counters of an engine. `cumulative` only grows; subtract two of them for an interval.
/// Work of calls still in flight on a caller's stream may be counted in part.
struct Stats {
  struct Cumulative {
    std::uint64_t tokens_appended = 0;  ///< (token, layer) pairs.
    std::uint64_t queries = 0;          ///< (query token, layer) pairs attended.
    std::uint64_t rows_selected = 0;  ///< Rows chosen by score, per (query token, KV head, layer).
    std::uint64_t rows_attended = 0;  ///< Rows chosen plus sink, window and dense rows, likewise.
    std::uint64_t bytes_host_to_device = 0;    ///< Rows read from host pages by steps.
    std::uint64_t bytes_device_to_host = 0;    ///< Rows written to host pages by appends.
    std::uint64_t bytes_device_resident = 0;   ///< Rows attended out of device memory.
    std::uint64_t bytes_sketch_read = 0;       ///< Sketch and norm bytes read by scoring.
    std::uint64_t nonfinite_tokens = 0;        ///< (token, KV head) pairs with NaN or infinity.
    std::uint64_t prefix_tokens_asked = 0;     ///< Tokens whose ids sessions were opened with.
    std::uint64_t prefix_tokens_attached = 0;  ///< Of those: found stored.
    std::uint64_t prefix_tokens_evicted = 0;   ///< Stored tokens whose memory others needed.

    friend KVTIER_EXPORT Cumulative operator-(const Cumulative& a, const Cumulative& b) noexcept;
  };
  struct Snapshot {
    std::size_t sessions = 0;
    std::size_t host_page_bytes = 0;  ///< Bytes of page frames, in use and in all.
    std::size_t host_page_bytes_used = 0;
    std::size_t device_bytes = 0;       ///< Bytes the engine holds on the device.
    std::size_t sketch_bytes_used = 0;  ///< Bytes of sketch blocks in use.
    std::size_t pages = 0;              ///< Page frames in all.
    std::size_t pages_used = 0;
    std::size_t prefix_tokens = 0;  ///< Tokens of all stored prefixes, each once.
    std::size_t pages_shared = 0;   ///< Of those used: held by more than one sequence.
  };
  /// Host-clock time of calls without a stream, in seconds, with `Config::time_stages`; otherwise
  /// and for work enqueued on a caller's stream zero.
  struct StageSeconds {
    double append = 0, score = 0, fetch = 0, attend = 0;
    friend KVTIER_EXPORT StageSeconds operator-(const StageSeconds& a,
                                                const StageSeconds& b) noexcept;
  };
  Cumulative cumulative;
  Snapshot snapshot;
  StageSeconds seconds;
};

}  // namespace kvtier
