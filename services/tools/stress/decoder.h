#pragma once

#include "kvtier/engine.h"

#include "services/evaluation/synthetic.h"
#include "services/tools/stress/device.h"
#include "services/tools/stress/options.h"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvtier::services {

/// Decodes steps of all layers of a batch: makes the queries, keys and values of a step, and runs
/// it.
class Decoder {
 public:
  struct Setup {
    Engine& engine;
    std::vector<Session>& sessions;
    const std::vector<std::vector<LayerSource>>& sources;  ///< `[batch][layers or more]`
    TensorDevice& device;
    LayerMode mode = LayerMode::kSparse;
    std::function<bool()> interrupted;  ///< Asked between layers, where they run one by one.
  };

  /// Plans steps over `layers` layers. The sessions must outlive it, and have room reserved.
  Decoder(const StressOptions& options, const QueryDrift& drift, int layers, Setup setup);

  /// Passes over the queries of the next steps.
  void skip_queries(int steps);
  /// Makes the tensors of the next step.
  void prepare();
  /// Fetches the best `rows` rows per KV head of the step that was prepared, so that it finds them
  /// on the device. Returns when they are there.
  void prefetch_selected(int rows);
  /// Runs the step that was prepared. Returns its seconds, or a negative number when interrupted.
  /// On a GPU the first step is enqueued, later ones replay a graph.
  [[nodiscard]] double run();

  /// Returns layer 0's output of the last step, fp32 `[batch, query_heads, head_dim]`.
  [[nodiscard]] std::span<const float> first_output();

  /// Selects once more with the last step's queries. Returns the ids of one (sequence, layer),
  /// `[kv_heads][selected]`, ascending.
  [[nodiscard]] std::vector<std::vector<std::int32_t>> selected(int sequence, int layer);

 private:
  void decode_layers();
  [[nodiscard]] MutableTensorView view(const Mirror& mirror, DType dtype, int layer, int sequence,
                                       int heads) const;

  StressOptions options_;
  int layers_;
  Setup setup_;
  std::vector<std::vector<QuerySource>> queries_;  ///< `[batch][layers]`
  std::int64_t next_token_;
  Mirror query_;   ///< bf16 `[layers, batch, query_heads, head_dim]`
  Mirror key_;     ///< bf16 `[layers, batch, kv_heads, head_dim]`
  Mirror value_;   ///< As `key_`.
  Mirror output_;  ///< fp32 `[layers, batch, query_heads, head_dim]`
  std::int64_t steps_run_ = 0;
  bool abandoned_ = false;
};

}  // namespace kvtier::services
