#pragma once

#include "benchmarks/harness_cuda.h"
#include "hashing/planes.h"
#include "hashing/sketch.h"
#include "scoring/selector.h"
#include "transfer/kv/rows.h"
#include "transfer/kv/sequence.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvtier::bench {

/// What the kernels of several layers read, laid out as the runtime lays it out, without an engine
/// around it: pages with random rows, sketches of random keys, counters and queries.
struct LayerShape {
  std::int64_t tokens = 0;
  int batch = 1;
  int query_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int layers = 1;
  int num_planes = 0;  ///< 0: no sketches.
  PlaneKind kind = PlaneKind::kOrthogonal;
  bool pages = false;
  transfer::Space page_space = transfer::Space::kDevice;
  PageFormat page_format = PageFormat::kModel;
  std::int64_t spare_tokens = 0;  ///< Capacity beyond `tokens`.

  [[nodiscard]] json parameters() const;
};

class Layers {
 public:
  Layers(Run& run, const LayerShape& shape);
  Layers(const Layers&) = delete;  // addresses in device memory point into it
  Layers& operator=(const Layers&) = delete;

  static constexpr int kPageTokens = 64;

  [[nodiscard]] const LayerShape& shape() const { return shape_; }
  [[nodiscard]] transfer::KvGeometry kv() const;
  [[nodiscard]] hashing::SketchGeometry sketch() const {
    return {.kv_heads = shape_.kv_heads, .num_planes = shape_.num_planes};
  }
  [[nodiscard]] hashing::PlanesView planes() const { return planes_->view(); }
  [[nodiscard]] transfer::SequenceView sequence(int layer, int item) const;
  [[nodiscard]] transfer::SequenceBatch sequences(int layer) const;
  [[nodiscard]] std::byte* const* sketch_blocks(int layer, int item) const;
  /// One query row per sequence.
  [[nodiscard]] transfer::QueryBatch query_batch() const;
  [[nodiscard]] const float* queries(int layer) const;
  [[nodiscard]] transfer::StepFlags* flags() const { return flags_.as<transfer::StepFlags>(); }
  [[nodiscard]] scoring::SelectRequest select_request(int layer,
                                                      const RetrievalConfig& retrieval) const;
  /// Sets the lengths of all sequences. Enqueued.
  void set_lengths(std::int64_t length);

 private:
  [[nodiscard]] std::size_t at(int layer, int item) const {
    return static_cast<std::size_t>(layer * shape_.batch + item);
  }
  void fill_pages();
  void fill_sketches();

  Run& run_;
  LayerShape shape_;
  std::int64_t capacity_ = 0;
  std::unique_ptr<hashing::Planes> planes_;
  transfer::Buffer pages_, page_tables_, blocks_, block_tables_, resident_, counters_, flags_,
      queries_;
};

/// Rows `[tokens, kv_heads, K|V]` with random contents, as `pack_rows` leaves them.
[[nodiscard]] transfer::AppendBatch append_batch(const Layers& layers, int layer, int items,
                                                 const DeviceTensor& keys,
                                                 const DeviceTensor& values, std::int64_t tokens);

}  // namespace kvtier::bench
