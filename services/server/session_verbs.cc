#include "services/server/session_verbs.h"

#include "services/server/wire.h"

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <openssl/evp.h>

namespace kvtier::services {
namespace {

const ModelConfig& model_of(const SessionEntry& entry) {
  return entry.model->engine.config().model;
}

int checked_layer(const SessionEntry& entry, int layer) {
  const int layers = model_of(entry).layers;
  if (layer < 0 || layer >= layers) {
    throw ServiceError::invalid("layer", "0 to " + std::to_string(layers - 1),
                                std::to_string(layer));
  }
  return layer;
}

TensorView query_of(const SessionEntry& entry, const v1::Tensor& query, UsedRegions& regions) {
  const ModelConfig& model = model_of(entry);
  return tokens_of(query, "query", model.query_heads, model.head_dim, kMaxChunkTokens, regions);
}

void check_not_empty(std::int64_t length) {
  if (length > 0) return;
  throw ServiceError(Code::kFailedPrecondition, "EMPTY_LAYER",
                     "layer: expected stored tokens, found none");
}

template <typename Request>
void check_position(const Request& request, std::int64_t length) {
  if (request.has_position() && request.position() != length) {
    throw ServiceError(Code::kAborted, "POSITION_MISMATCH",
                       "position: expected the layer's length, " + std::to_string(length) +
                           ", found " + std::to_string(request.position()));
  }
}

std::int64_t kv_bytes(const ModelConfig& model, std::int64_t tokens) {
  return tokens * model.kv_heads * model.head_dim * 4;  // K and V, 16 bit each
}

std::int64_t stored_tokens(const SessionEntry& entry) {
  std::int64_t tokens = 0;
  for (int layer = 0; layer < model_of(entry).layers; ++layer) {
    tokens += entry.session->length(layer);
  }
  return tokens;
}

/// Charges the tenant for tokens about to be stored, and gives back what a failed call did not use.
class Charge {
 public:
  Charge(SessionEntry& entry, std::int64_t tokens)
      : entry_(entry), bytes_(kv_bytes(model_of(entry), tokens)) {
    entry_.tenant.charge_kv(bytes_);
  }
  ~Charge() {
    if (!kept_) entry_.tenant.refund_kv(bytes_);
  }
  Charge(const Charge&) = delete;  // gives its bytes back once
  Charge& operator=(const Charge&) = delete;
  void keep() noexcept {
    kept_ = true;
    entry_.charged_bytes += bytes_;
  }

 private:
  SessionEntry& entry_;
  const std::int64_t bytes_;
  bool kept_ = false;
};

struct KeyValue {
  TensorView key, value;
};

template <typename Request>
KeyValue key_value_of(const SessionEntry& entry, const Request& request, UsedRegions& regions) {
  const ModelConfig& model = model_of(entry);
  const auto view = [&](const v1::Tensor& tensor, const char* field) {
    return tokens_of(tensor, field, model.kv_heads, model.head_dim, kMaxChunkTokens, regions);
  };
  const KeyValue views{view(request.key(), "key"), view(request.value(), "value")};
  if (views.key.shape[0] != views.value.shape[0]) {
    throw ServiceError::invalid("value.shape", std::to_string(views.key.shape[0]) + " tokens",
                                std::to_string(views.value.shape[0]));
  }
  return views;
}

/// Makes `out`, `lse` and `missed` of a reply, where the request wants them.
template <typename Request, typename Response>
AttendOutputs make_outputs(const Request& request, const TensorView& query, ReplyBudget& budget,
                           Response& response, UsedRegions& regions) {
  const auto& [tokens, heads, head_dim, unused] = query.shape;
  const std::int64_t rows = tokens * heads;
  constexpr std::int64_t kOverhead = 256;
  std::int64_t bytes = kOverhead;
  if (!request.has_out_memory()) {
    bytes += rows * head_dim * static_cast<std::int64_t>(dtype_bytes(query.dtype));
  }
  if (!request.has_lse_memory()) bytes += rows * 4;
  if (request.with_missed()) bytes += rows * 4;
  budget.take(bytes);
  v1::Tensor& out = *response.mutable_out();
  v1::Tensor& lse = *response.mutable_lse();
  AttendOutputs outputs;
  outputs.out = request.has_out_memory()
                    ? place_tensor(out, request.out_memory(), query.dtype,
                                   {tokens, heads, head_dim}, "out_memory", regions)
                    : make_tensor(out, query.dtype, {tokens, heads, head_dim});
  outputs.lse = request.has_lse_memory() ? place_tensor(lse, request.lse_memory(), DType::kFloat32,
                                                        {tokens, heads}, "lse_memory", regions)
                                         : make_tensor(lse, DType::kFloat32, {tokens, heads});
  if (request.with_missed()) {
    outputs.missed = make_tensor(*response.mutable_missed(), DType::kFloat32, {tokens, heads});
  }
  return outputs;
}

/// A digest of the step's tensors, or of their places in device memory, and of which outputs it
/// asks for. Its options are not in it.
std::string digest_of(const v1::DecodeRequest& request) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        &EVP_MD_CTX_free);
  bool done = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  const auto add = [&](std::string_view bytes) {
    done = done && EVP_DigestUpdate(context.get(), bytes.data(), bytes.size()) == 1;
  };
  const auto add_place = [&](const v1::DeviceMemory& place) {
    add(place.region() + ' ' + std::to_string(place.offset()) + ' ');
  };
  const auto add_tensor = [&](const v1::Tensor& tensor) {
    add(tensor.data());
    if (tensor.has_memory()) add_place(tensor.memory());
  };
  for (const v1::Tensor* tensor : {&request.query(), &request.key(), &request.value()}) {
    add_tensor(*tensor);
  }
  if (request.has_selected()) {
    add("selected");
    add_tensor(request.selected());
  }
  if (request.has_bias()) {
    add("bias");
    add_tensor(request.bias());
  }
  if (request.has_out_memory()) add_place(request.out_memory());
  if (request.has_lse_memory()) add_place(request.lse_memory());
  if (request.with_missed()) add("missed");
  done = done && EVP_DigestFinal_ex(context.get(), digest.data(), &size) == 1;
  if (!done) throw std::bad_alloc();
  return {digest.begin(), digest.begin() + size};
}

/// Returns the reply as `LastStep` keeps it: empty without memory.
std::string bytes_of(const v1::DecodeResponse& response) {
  try {
    return response.SerializeAsString();
  } catch (const std::bad_alloc&) {
    return {};
  }
}

/// Returns whether the step was executed before; `response` is its reply then.
bool replay(const SessionEntry& entry, const v1::DecodeRequest& request, const std::string& digest,
            ReplyBudget& budget, v1::DecodeResponse& response) {
  const LastStep& last = entry.last_step;
  if (last.step != request.step() || last.layer != request.layer()) return false;
  if (last.request_digest != digest) {
    throw ServiceError(Code::kInvalidArgument, "STEP_CONFLICT",
                       "step: expected the tensors that it was used for, found others");
  }
  if (last.reply.empty()) {
    throw ServiceError(Code::kAborted, "REPLY_GONE",
                       "the step was executed, and there was no memory to keep its reply");
  }
  budget.take(static_cast<std::int64_t>(last.reply.size()));
  response.ParseFromString(last.reply);
  return true;
}

/// Most ids that a selection can have.
std::int64_t selected_of(const RetrievalConfig& retrieval, std::int64_t length) {
  if (retrieval.sparsity <= 0.0) return std::min<std::int64_t>(length, retrieval.top_k);
  const auto share = static_cast<std::int64_t>(static_cast<double>(length) / retrieval.sparsity);
  return std::min(length, std::max<std::int64_t>(1, share));
}

}  // namespace

void append_to(SessionEntry& entry, const v1::AppendRequest& request,
               v1::AppendResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  UsedRegions regions(entry.tenant.regions());
  const KeyValue tensors = key_value_of(entry, request, regions);
  check_position(request, entry.session->length(layer));
  response.mutable_layer_lengths()->Resize(model_of(entry).layers, 0);
  Charge charge(entry, tensors.key.shape[0]);
  entry.session->append(layer, tensors.key, tensors.value);
  charge.keep();
  for (int i = 0; i < model_of(entry).layers; ++i) {
    response.set_layer_lengths(i, entry.session->length(i));
  }
}

void select_in(SessionEntry& entry, const v1::SelectRequest& request, ReplyBudget& budget,
               v1::SelectResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  UsedRegions regions(entry.tenant.regions());
  const TensorView query = query_of(entry, request.query(), regions);
  const CallOptions call(request.options(), entry.retrieval);
  const ModelConfig& model = model_of(entry);
  const bool per_query_head = call.retrieval.selection == Selection::kPerQueryHead;
  const std::int64_t heads = per_query_head ? model.query_heads : model.kv_heads;
  const std::int64_t length = entry.session->length(layer);
  check_not_empty(length);
  const std::int64_t count = selected_of(call.retrieval, length);
  const std::int64_t rows = query.shape[0] * heads;
  constexpr std::int64_t kOverhead = 128;
  const int tensors = 1 + (request.with_scores() ? 1 : 0) + (request.with_bias() ? 1 : 0);
  budget.take(rows * count * tensors * 4 + kOverhead);
  SelectOutputs outputs;
  outputs.ids = make_tensor(*response.mutable_ids(), DType::kInt32, {query.shape[0], heads, count});
  if (request.with_scores()) {
    outputs.scores =
        make_tensor(*response.mutable_scores(), DType::kFloat32, {query.shape[0], heads, count});
  }
  if (request.with_bias()) {
    outputs.bias =
        make_tensor(*response.mutable_bias(), DType::kFloat32, {query.shape[0], heads, count});
  }
  entry.session->select(layer, query, outputs, {}, call.options);
}

void attend_in(SessionEntry& entry, const v1::AttendRequest& request, ReplyBudget& budget,
               v1::AttendResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  UsedRegions regions(entry.tenant.regions());
  AttendInputs inputs;
  inputs.query = query_of(entry, request.query(), regions);
  if (request.has_selected()) inputs.selected = view_of(request.selected(), "selected");
  if (request.has_bias()) inputs.bias = view_of(request.bias(), "bias");
  const CallOptions call(request.options(), entry.retrieval);
  const AttendOutputs outputs = make_outputs(request, inputs.query, budget, response, regions);
  entry.session->attend(layer, inputs, outputs, {}, call.options);
}

void decode_in(SessionEntry& entry, const v1::DecodeRequest& request, ReplyBudget& budget,
               v1::DecodeResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  if (request.step() < 0) {
    throw ServiceError::invalid("step", "at least 0", std::to_string(request.step()));
  }
  std::string digest;
  if (request.step() > 0) {
    digest = digest_of(request);
    if (replay(entry, request, digest, budget, response)) return;
  }
  UsedRegions regions(entry.tenant.regions());
  DecodeInputs inputs;
  inputs.query = query_of(entry, request.query(), regions);
  const KeyValue tensors = key_value_of(entry, request, regions);
  inputs.key = tensors.key;
  inputs.value = tensors.value;
  if (request.has_selected()) inputs.selected = view_of(request.selected(), "selected");
  if (request.has_bias()) inputs.bias = view_of(request.bias(), "bias");
  check_position(request, entry.session->length(layer));
  const CallOptions call(request.options(), entry.retrieval);
  Charge charge(entry, inputs.key.shape[0]);
  const AttendOutputs outputs = make_outputs(request, inputs.query, budget, response, regions);
  entry.session->decode(layer, inputs, outputs, {}, call.options);
  charge.keep();
  response.set_layer(layer);
  response.set_step(request.step());
  if (request.step() > 0) {
    entry.remember({.layer = layer,
                    .step = request.step(),
                    .request_digest = std::move(digest),
                    .reply = bytes_of(response)});
  }
}

void fetch_in(SessionEntry& entry, const v1::FetchRequest& request, ReplyBudget& budget,
              v1::FetchResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  const ModelConfig& model = model_of(entry);
  const TensorView tokens = ids_of(request.tokens(), "tokens", model.kv_heads);
  const std::int64_t count = tokens.shape[1];
  check_not_empty(entry.session->length(layer));
  constexpr std::int64_t kOverhead = 128;
  budget.take(kv_bytes(model, count) + kOverhead);
  FetchOutputs outputs;
  outputs.keys =
      make_tensor(*response.mutable_key(), model.kv_dtype, {model.kv_heads, count, model.head_dim});
  outputs.values = make_tensor(*response.mutable_value(), model.kv_dtype,
                               {model.kv_heads, count, model.head_dim});
  entry.session->fetch(layer, tokens, outputs);
}

void charge_stored(SessionEntry& entry) {
  Charge charge(entry, stored_tokens(entry));
  charge.keep();
}

void publish_from(SessionEntry& entry, const v1::PublishPrefixRequest& request,
                  v1::PublishPrefixResponse& response) {
  if (!entry.has_fingerprint) {
    throw ServiceError(Code::kFailedPrecondition, "NO_FINGERPRINT",
                       "expected a session created with a model_fingerprint, found none");
  }
  const auto count = static_cast<std::size_t>(request.token_ids_size());
  const auto length = static_cast<std::size_t>(entry.session->length());
  if (count > length) {
    throw ServiceError::invalid("token_ids", "at most " + std::to_string(length) + ", the length",
                                std::to_string(count));
  }
  entry.session->publish({request.token_ids().data(), count});
  const auto page = static_cast<std::size_t>(entry.model->engine.config().memory.page_tokens);
  response.set_stored_tokens(static_cast<std::int64_t>(count / page * page));
}

void truncate_to(SessionEntry& entry, std::int64_t tokens) {
  if (tokens < 0) throw ServiceError::invalid("tokens", "at least 0", std::to_string(tokens));
  const std::int64_t before = stored_tokens(entry);
  entry.session->truncate(tokens);
  entry.remember({});
  const std::int64_t bytes = kv_bytes(model_of(entry), before - stored_tokens(entry));
  entry.charged_bytes -= bytes;
  entry.tenant.refund_kv(bytes);
}

}  // namespace kvtier::services
