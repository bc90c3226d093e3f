#pragma once

#include "kvtier/engine.h"

#include "services/evaluation/synthetic.h"
#include "services/tools/stress/device.h"
#include "services/tools/stress/options.h"

#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvtier::services {

/// Returns the host bytes of the chunks under way.
[[nodiscard]] std::size_t ingest_buffer_bytes(const StressOptions& options);

/// Moves generated rows into sessions: a thread makes the next chunk while the present one is
/// appended.
class Ingest {
 public:
  Ingest(const StressOptions& options, TensorDevice& device);

  /// Appends the context of `source` to one layer of a session. After each chunk calls
  /// `advanced(tokens)`, which returns false to stop.
  void append(Session& session, int layer, const LayerSource& source,
              const std::function<bool(std::int64_t)>& advanced);

 private:
  struct Chunk {
    Mirror keys;
    Mirror values;
  };
  static constexpr int kChunks = 2;

  int kv_heads_;
  int head_dim_;
  std::int64_t tokens_;
  std::int64_t chunk_tokens_;
  TensorDevice& device_;
  Chunk chunks_[kChunks];
};

}  // namespace kvtier::services
