#pragma once

#include "kvtier/engine.h"

#include "runtime/engine/session.h"

#include <cstdint>
#include <string_view>

/// Checks of public arguments. Each throws before anything has changed, with expected and found.
namespace kvtier::runtime {

[[nodiscard]] inline bool is_float(DType dtype) { return dtype != DType::kInt32; }

/// Throws `kInvalidArgument` unless the last stride of a tensor with dimensions is 1, where it has
/// more than one element, and none is below 0.
void check_strides(std::string_view name, const TensorView& tensor);

/// Throws `kInvalidArgument` unless `layer` exists.
void check_layer(const ModelConfig& model, int layer);
inline void check_layer(const EngineState& engine, int layer) {
  check_layer(engine.config.model, layer);
}

/// Checks a tensor `[tokens, heads, head_dim]` of a float dtype with last stride 1, and that its
/// memory fits the call: host memory needs a call without a stream. Returns its tokens (>= 1).
std::int64_t check_tokens(const EngineState& engine, std::string_view name,
                          const TensorView& tensor, int heads, StreamRef stream);

/// Checks keys and values of an append: equal token counts, finite when they are host tensors.
/// Returns the tokens.
std::int64_t check_keys_and_values(const EngineState& engine, const TensorView& keys,
                                   const TensorView& values, StreamRef stream);

/// Checks the query, the ids and the outputs of an attend. `key_tokens` is the tokens appended by
/// the same call, 0 for none.
void check_attend(const SessionState& session, int layer, const AttendInputs& inputs,
                  const AttendOutputs& outputs, std::int64_t key_tokens, StreamRef stream,
                  const AttendOptions& options);

/// Checks `Session::select`.
void check_select(const SessionState& session, int layer, const TensorView& query,
                  const SelectOutputs& outputs, StreamRef stream, const AttendOptions& options);

/// Checks that `call`, such as "prefetch", can select by this query.
void check_selection(const char* call, const SessionState& session, int layer,
                     const TensorView& query, StreamRef stream, const AttendOptions& options);

/// Checks `Session::fetch`, every token id among it.
void check_fetch(const SessionState& session, int layer, const TensorView& tokens,
                 const FetchOutputs& outputs);

/// Throws unless the options are valid and a sketch fits.
void check_options(const EngineState& engine, int layer, const AttendOptions& options,
                   bool selects);

}  // namespace kvtier::runtime
