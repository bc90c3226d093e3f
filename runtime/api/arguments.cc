#include "runtime/api/arguments.h"

#include "hashing/scalar_code.h"
#include "include/types/failure.h"
#include "runtime/step/resolved_options.h"
#include "transfer/kv/rows.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvtier::runtime {

namespace {

std::string shape3(std::int64_t tokens, int heads, const std::string& last) {
  return "[" + (tokens < 0 ? std::string("tokens") : std::to_string(tokens)) + ", " +
         std::to_string(heads) + ", " + last + "]";
}

/// Host memory is read and written only by calls that wait; the CPU backend has no streams to take.
void check_space(std::string_view name, const TensorView& tensor, StreamRef stream) {
  if (stream.given() && tensor.space == MemorySpace::kHost) {
    throw_invalid(name, "device memory in a call with a stream", "host memory");
  }
}

/// `storage`: of what is stored; the tensor's own for what is not.
void check_finite(std::string_view name, const EngineState& engine, const TensorView& tensor,
                  int heads, DType storage) {
  const bool readable =
      tensor.space == MemorySpace::kHost || engine.device->backend() == Backend::kCpu;
  if (!engine.config.reject_nonfinite || !readable) return;
  const transfer::TokenTensor tokens{tensor.data, tensor.dtype, tensor.strides[0],
                                     tensor.strides[1]};
  const int head_dim = engine.config.model.head_dim;
  if (transfer::all_finite(tokens, tensor.shape[0], heads, head_dim, storage)) return;
  if (!transfer::all_finite(tokens, tensor.shape[0], heads, head_dim)) {
    throw_invalid(name, "finite elements", "NaN or infinity");
  }
  throw_invalid(name,
                join("elements of at most ", storage == DType::kFloat16 ? "65504" : "3.3895e38",
                     " in magnitude, which ", dtype_name(storage), " holds"),
                "a larger one");
}

/// Checks an int32 or fp32 tensor `[tokens, heads, n]` with `n >= min_n` and heads = either count,
/// or 1 where all heads have the same ids.
void check_ids(std::string_view name, const TensorView& tensor, DType dtype, std::int64_t tokens,
               const EngineState& engine, std::int64_t min_n, bool same_ids, StreamRef stream) {
  if (tensor.dtype != dtype) {
    throw_invalid(name, dtype_name(dtype), dtype_name(tensor.dtype));
  }
  const int query_heads = engine.kv.query_heads();
  const int kv_heads = engine.kv.kv_heads;
  const bool heads_fit =
      tensor.rank == 3 && (tensor.shape[1] == query_heads || tensor.shape[1] == kv_heads ||
                           (same_ids && tensor.shape[1] == 1));
  if (!heads_fit || tensor.shape[0] != tokens || tensor.shape[2] < min_n) {
    throw_invalid(name,
                  join(shape3(tokens, query_heads, "n"), " or ", shape3(tokens, kv_heads, "n"),
                       (same_ids ? " or " + shape3(tokens, 1, "n") : ""), " with n >= ", min_n),
                  describe(tensor));
  }
  check_strides(name, tensor);
  check_space(name, tensor, stream);
}

/// Checks what an estimate of attention needs, and says `who` wants it.
void check_estimate(const ResolvedOptions& resolved, std::string_view who) {
  if (resolved.params.estimator != Estimator::kNormAware) {
    throw_invalid(who, "a norm-aware estimator", "another");
  }
  if (resolved.params.coarse_bits > 0) {
    throw_invalid(who, "coarse_bits 0", resolved.params.coarse_bits);
  }
  if (resolved.params.selection == Selection::kPerSequence) {
    throw_invalid(who, "selection per_kv_head or per_query_head", "per_sequence");
  }
  if (resolved.logit_softcap > 0.0F) {
    throw_invalid(who, "logit_softcap 0", resolved.logit_softcap);
  }
}

/// Checks an fp32 tensor `[tokens, query_heads]`.
void check_per_head(std::string_view name, const MutableTensorView& tensor, std::int64_t tokens,
                    int heads, StreamRef stream) {
  if (tensor.dtype != DType::kFloat32 || tensor.rank != 2 || tensor.shape[0] != tokens ||
      tensor.shape[1] != heads) {
    throw_invalid(name, join("fp32 [", tokens, ", ", heads, "]"), describe(tensor));
  }
  check_strides(name, tensor);
  check_space(name, tensor, stream);
}

/// Checks biases: finite and not negative, where the host can read them.
void check_bias(const EngineState& engine, const TensorView& bias, const TensorView& ids,
                StreamRef stream) {
  if (ids.empty()) throw_invalid("bias", "none without selected ids", describe(bias));
  if (bias.dtype != DType::kFloat32 || bias.rank != 3 || bias.shape != ids.shape) {
    throw_invalid("bias", join("fp32 of the shape of selected, ", describe(ids)), describe(bias));
  }
  check_strides("bias", bias);
  check_space("bias", bias, stream);
  if (bias.space != MemorySpace::kHost && engine.device->backend() != Backend::kCpu) return;
  for (std::int64_t token = 0; token < bias.shape[0]; ++token) {
    for (std::int64_t head = 0; head < bias.shape[1]; ++head) {
      const float* values =
          static_cast<const float*>(bias.data) + token * bias.strides[0] + head * bias.strides[1];
      for (std::int64_t i = 0; i < bias.shape[2]; ++i) {
        if (std::isfinite(values[i]) && values[i] >= 0.0F) continue;
        throw_invalid(join("bias[", token, ", ", head, ", ", i, "]"),
                      "a finite number of at least 0", values[i]);
      }
    }
  }
}

/// Most ids that one head of the query, or one KV head, may get.
std::int64_t max_selected(const EngineState& engine, int layer, const AttendOptions& options,
                          std::int64_t length, std::int64_t ids_heads) {
  const ResolvedOptions resolved = resolve_options(engine, layer, options);
  if (resolved.rule.mode != LayerMode::kSparse) return 0;
  const std::int64_t k = scoring::max_per_query(resolved.params, length);
  const bool union_of_group =
      resolved.params.selection == Selection::kPerQueryHead && ids_heads == engine.kv.kv_heads;
  return std::min(length, k * (union_of_group ? engine.kv.group : 1));
}

void check_not_empty(int layer, std::int64_t length) {
  if (length > 0) return;
  throw_error(ErrorCode::kFailedPrecondition, "layer ", layer,
              ": expected stored tokens, found an empty layer");
}

/// Checks a host tensor `[kv_heads, n]` or `[kv_heads, n, head_dim]` of a fetch.
void check_rows(std::string_view name, const TensorView& tensor, DType dtype,
                std::initializer_list<std::int64_t> shape) {
  TensorView expected;  // without strides: extents that are no size yet are only compared
  expected.data = &dtype;
  expected.dtype = dtype;
  expected.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), expected.shape.begin());
  if (tensor.empty() || tensor.dtype != dtype || tensor.rank != expected.rank ||
      !std::equal(shape.begin(), shape.end(), tensor.shape.begin())) {
    throw_invalid(name, describe(expected), tensor.empty() ? "none" : describe(tensor));
  }
  check_strides(name, tensor);
  if (tensor.space != MemorySpace::kHost) throw_invalid(name, "host memory", "device memory");
}

void check_query(const SessionState& session, int layer, const TensorView& query,
                 std::int64_t key_tokens, StreamRef stream, const AttendOptions& options) {
  const EngineState& engine = session.engine();
  const std::int64_t tokens = check_tokens(engine, "query", query, engine.kv.query_heads(), stream);
  check_finite("query", engine, query, engine.kv.query_heads(), query.dtype);
  const std::int64_t length = session.layer(layer).length + key_tokens;
  check_not_empty(layer, length);
  if (options.tokens_after < 0 || options.tokens_after > length) {
    throw_invalid("tokens_after", join("0..", length, " (the layer's length)"),
                  options.tokens_after);
  }
  if (tokens > length - options.tokens_after) {
    throw_invalid("query",
                  join("at most ", length - options.tokens_after,
                       " tokens (the layer's length, less tokens_after)"),
                  tokens);
  }
}

}  // namespace

void check_strides(std::string_view name, const TensorView& tensor) {
  const auto last = static_cast<std::size_t>(tensor.rank) - 1;
  if (tensor.shape[last] > 1 && tensor.strides[last] != 1) {
    throw_invalid(name, "last stride 1", join("last stride ", tensor.strides[last]));
  }
  for (std::size_t i = 0; i < last; ++i) {
    if (tensor.strides[i] < 0) {
      throw_invalid(name, "strides of at least 0", join("stride ", tensor.strides[i]));
    }
  }
}

void check_layer(const ModelConfig& model, int layer) {
  if (layer < 0 || layer >= model.layers) {
    throw_invalid("layer", join("0..", model.layers - 1), layer);
  }
}

std::int64_t check_tokens(const EngineState& engine, std::string_view name,
                          const TensorView& tensor, int heads, StreamRef stream) {
  if (tensor.empty()) throw_invalid(name, "a tensor", "none");
  if (!is_float(tensor.dtype)) {
    throw_invalid(name, "fp32, fp16 or bf16", dtype_name(tensor.dtype));
  }
  const int head_dim = engine.config.model.head_dim;
  if (tensor.rank != 3 || tensor.shape[0] < 1 || tensor.shape[1] != heads ||
      tensor.shape[2] != head_dim) {
    throw_invalid(name, join(shape3(-1, heads, std::to_string(head_dim)), " with tokens >= 1"),
                  describe(tensor));
  }
  check_strides(name, tensor);
  check_space(name, tensor, stream);
  return tensor.shape[0];
}

std::int64_t check_keys_and_values(const EngineState& engine, const TensorView& keys,
                                   const TensorView& values, StreamRef stream) {
  const int heads = engine.kv.kv_heads;
  const std::int64_t tokens = check_tokens(engine, "keys", keys, heads, stream);
  const std::int64_t value_tokens = check_tokens(engine, "values", values, heads, stream);
  if (tokens != value_tokens) {
    throw_invalid("values", join(tokens, " tokens, as in keys"), value_tokens);
  }
  check_finite("keys", engine, keys, heads, engine.config.model.kv_dtype);
  check_finite("values", engine, values, heads, engine.config.model.kv_dtype);
  return tokens;
}

void check_options(const EngineState& engine, int layer, const AttendOptions& options,
                   bool selects) {
  if (options.softmax_scale &&
      !(std::isfinite(*options.softmax_scale) && *options.softmax_scale > 0)) {
    throw_invalid("softmax_scale", "a finite number above 0", *options.softmax_scale);
  }
  if (options.logit_softcap &&
      !(std::isfinite(*options.logit_softcap) && *options.logit_softcap >= 0)) {
    throw_invalid("logit_softcap", "0 or a finite number above", *options.logit_softcap);
  }
  if (options.dense_from && *options.dense_from < 0) {
    throw_invalid("dense_from", "at least 0", *options.dense_from);
  }
  if (options.retrieval != nullptr) {
    std::vector<std::string> problems = options.retrieval->validate();
    const int head_dim = engine.config.model.head_dim;
    for (std::string& problem : hashing::check_coarse(*options.retrieval, head_dim)) {
      problems.push_back(std::move(problem));
    }
    if (!problems.empty()) {
      std::string message = "options.retrieval: ";
      for (const std::string& problem : problems) message += "\n  " + problem;
      throw Error(ErrorCode::kInvalidArgument, message);
    }
  }
  if (options.recall_target) {
    const RecallTarget& target = *options.recall_target;
    if (!(target.recall > 0.0 && target.recall < 1.0)) {
      throw_invalid("recall_target.recall", "above 0 and below 1", target.recall);
    }
    if (target.min_top_k < 1) {
      throw_invalid("recall_target.min_top_k", "at least 1", target.min_top_k);
    }
    if (!(std::isfinite(target.noise_share) && target.noise_share >= 0.0F)) {
      throw_invalid("recall_target.noise_share", "a finite number of at least 0",
                    target.noise_share);
    }
    if (selects) check_estimate(resolve_options(engine, layer, options), "recall_target");
  }
  if (selects) {
    (void)engine.pools.fitting_sketch(options.retrieval ? *options.retrieval
                                                        : engine.config.retrieval);
  }
}

void check_attend(const SessionState& session, int layer, const AttendInputs& inputs,
                  const AttendOutputs& outputs, std::int64_t key_tokens, StreamRef stream,
                  const AttendOptions& options) {
  const EngineState& engine = session.engine();
  check_query(session, layer, inputs.query, key_tokens, stream, options);
  const ResolvedOptions resolved = resolve_options(engine, layer, options);
  const bool sparse = resolved.rule.mode == LayerMode::kSparse;
  check_options(engine, layer, options, sparse && inputs.selected.empty());
  if (resolved.rule.mode == LayerMode::kSlidingWindow && resolved.rule.window_tokens < 1) {
    throw_invalid("mode", "sliding window only in a layer configured with window_tokens",
                  "window_tokens 0");
  }
  const std::int64_t tokens = inputs.query.shape[0];
  const int heads = engine.kv.query_heads();
  const std::int64_t out_tokens = check_tokens(engine, "out", outputs.out, heads, stream);
  if (out_tokens != tokens) {
    throw_invalid("out", join(tokens, " tokens, as in query"), out_tokens);
  }
  if (!outputs.lse.empty()) check_per_head("lse", outputs.lse, tokens, heads, stream);
  if (!outputs.missed.empty()) {
    check_per_head("missed", outputs.missed, tokens, heads, stream);
    if (!sparse || !inputs.selected.empty()) {
      throw_invalid("missed", "a sparse layer that selects by score",
                    sparse ? "selected ids" : "a dense or sliding-window layer");
    }
    check_estimate(resolved, "missed");
  }
  if (!inputs.selected.empty()) {
    check_ids("selected", inputs.selected, DType::kInt32, tokens, engine, 0, true, stream);
    if (!sparse) {
      throw_invalid("selected", "none in a dense or sliding-window layer",
                    describe(inputs.selected));
    }
  }
  if (!inputs.bias.empty()) check_bias(engine, inputs.bias, inputs.selected, stream);
  if (!outputs.selected.empty()) {
    const std::int64_t length = session.layer(layer).length + key_tokens;
    const std::int64_t ids_heads = outputs.selected.shape[1];
    const std::int64_t min_n = inputs.selected.empty()
                                   ? max_selected(engine, layer, options, length, ids_heads)
                                   : std::int64_t{0};
    const bool same_ids = inputs.selected.empty()
                              ? resolved.params.selection == Selection::kPerSequence
                              : inputs.selected.shape[1] == 1;
    check_ids("selected (output)", outputs.selected, DType::kInt32, tokens, engine, min_n, same_ids,
              stream);
  }
}

void check_selection(const char* call, const SessionState& session, int layer,
                     const TensorView& query, StreamRef stream, const AttendOptions& options) {
  const EngineState& engine = session.engine();
  check_query(session, layer, query, 0, stream, options);
  if (resolve_options(engine, layer, options).rule.mode != LayerMode::kSparse) {
    throw_error(ErrorCode::kFailedPrecondition, call, ": expected a sparse layer, found layer ",
                layer, " dense or sliding-window");
  }
  check_options(engine, layer, options, true);
}

void check_select(const SessionState& session, int layer, const TensorView& query,
                  const SelectOutputs& outputs, StreamRef stream, const AttendOptions& options) {
  const EngineState& engine = session.engine();
  check_selection("select", session, layer, query, stream, options);
  const std::int64_t tokens = query.shape[0];
  if (outputs.ids.empty()) throw_invalid("ids", "a tensor", "none");
  const std::int64_t min_n =
      max_selected(engine, layer, options, session.layer(layer).length, outputs.ids.shape[1]);
  const scoring::ScoreParams params = resolve_options(engine, layer, options).params;
  const bool per_sequence = params.selection == Selection::kPerSequence;
  check_ids("ids", outputs.ids, DType::kInt32, tokens, engine, min_n, per_sequence, stream);
  if (!outputs.scores.empty()) {
    check_ids("scores", outputs.scores, DType::kFloat32, tokens, engine, 0, per_sequence, stream);
    if (outputs.scores.shape != outputs.ids.shape) {
      throw_invalid("scores", join("the shape of ids, ", describe(outputs.ids)),
                    describe(outputs.scores));
    }
  }
  if (!outputs.bias.empty()) {
    if (params.rule != SelectionRule::kPriority) {
      throw_invalid("bias (output)", "none without the priority rule", describe(outputs.bias));
    }
    const int heads = engine.config.model.num_sets(params.selection);
    check_ids("bias (output)", outputs.bias, DType::kFloat32, tokens, engine, 0, per_sequence,
              stream);
    if (outputs.bias.shape != outputs.ids.shape || outputs.ids.shape[1] != heads) {
      throw_invalid("bias (output)",
                    join("the shape of ids with a head for each set (", heads, ")"),
                    join(describe(outputs.bias), " beside ids ", describe(outputs.ids)));
    }
  }
}

void check_fetch(const SessionState& session, int layer, const TensorView& tokens,
                 const FetchOutputs& outputs) {
  const EngineState& engine = session.engine();
  const std::int64_t heads = engine.kv.kv_heads;
  const std::int64_t length = session.layer(layer).length;
  check_not_empty(layer, length);
  if (tokens.empty() || tokens.rank != 2 || tokens.shape[1] < 1) {
    throw_invalid("tokens", join("[", heads, ", n] with n >= 1"),
                  tokens.empty() ? "none" : describe(tokens));
  }
  const std::int64_t n = tokens.shape[1];
  check_rows("tokens", tokens, DType::kInt32, {heads, n});
  check_rows("keys", outputs.keys, engine.kv.dtype, {heads, n, engine.kv.head_dim});
  check_rows("values", outputs.values, engine.kv.dtype, {heads, n, engine.kv.head_dim});
  for (std::int64_t head = 0; head < heads; ++head) {
    const auto* ids = static_cast<const std::int32_t*>(tokens.data) + head * tokens.strides[0];
    for (std::int64_t i = 0; i < n; ++i) {
      if (ids[i] >= -1 && ids[i] < length) continue;
      throw_invalid(join("tokens[", head, ", ", i, "]"), join("-1 or 0..", length - 1), ids[i]);
    }
  }
}

}  // namespace kvtier::runtime
