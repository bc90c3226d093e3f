#include "runtime/step/resolved_options.h"

#include <cmath>
#include <limits>

namespace kvtier::runtime {

bool ResolvedOptions::same_launch(const ResolvedOptions& other) const {
  return rule == other.rule && params == other.params && recall_params == other.recall_params &&
         softmax_scale == other.softmax_scale && logit_softcap == other.logit_softcap &&
         may_be_dense == other.may_be_dense;
}

ResolvedOptions resolve_options(const EngineState& engine, int layer,
                                const AttendOptions& options) {
  const ModelConfig& model = engine.config.model;
  const LayerConfig defaults = model.layer_options.empty()
                                   ? LayerConfig{}
                                   : model.layer_options[static_cast<std::size_t>(layer)];
  const RetrievalConfig& given =
      options.retrieval != nullptr ? *options.retrieval : engine.config.retrieval;
  const RetrievalConfig retrieval = options.recall_target ? given.with_fixed_k() : given;
  ResolvedOptions resolved;
  const float default_scale = 1.0F / std::sqrt(static_cast<float>(model.head_dim));
  resolved.softmax_scale =
      options.softmax_scale.value_or(defaults.softmax_scale.value_or(default_scale));
  resolved.logit_softcap = options.logit_softcap.value_or(defaults.logit_softcap);
  resolved.dense_from = options.dense_from.value_or(std::numeric_limits<std::int64_t>::max());
  resolved.tokens_after = options.tokens_after;
  resolved.rule = {.mode = options.mode.value_or(defaults.mode),
                   .sink_tokens = retrieval.sink_tokens,
                   .recent_tokens = retrieval.recent_tokens,
                   .window_tokens = defaults.window_tokens};
  resolved.may_be_dense = engine.config.dense_when_faster && !options.mode &&
                          resolved.rule.mode == LayerMode::kSparse &&
                          engine.pools.pages_on_device &&
                          engine.device->backend() == Backend::kCuda;
  resolved.params = scoring::score_params(retrieval, model.head_dim, resolved.softmax_scale, layer);
  return resolved;
}

}  // namespace kvtier::runtime
