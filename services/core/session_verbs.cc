#include "services/core/session_verbs.h"

#include "services/base/from_message.h"
#include "services/base/secrets.h"

#include <algorithm>
#include <new>
#include <optional>
#include <type_traits>

namespace kvtier::services {
namespace {

const ModelConfig& model_of(const SessionEntry& entry) {
  return entry.model->engine.config().model;
}

int checked_layer(const SessionEntry& entry, int layer) {
  check_within("layer", layer, 0, model_of(entry).layers - 1);
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

/// Refuses tokens that are not the layer's next, and those beyond the session's capacity.
template <typename Request>
void check_place(const SessionEntry& entry, const Request& request, std::int64_t length,
                 std::int64_t tokens) {
  if (request.has_position() && request.position() != length) {
    throw ServiceError(Code::kAborted, "POSITION_MISMATCH",
                       "position: expected the layer's length, " + std::to_string(length) +
                           ", found " + std::to_string(request.position()));
  }
  if (tokens > entry.capacity_tokens - length) {
    throw ServiceError(Code::kResourceExhausted, "SESSION_FULL",
                       "layer " + std::to_string(request.layer()) + ": expected at most " +
                           std::to_string(entry.capacity_tokens) +
                           " tokens, the session's capacity_tokens (at most "
                           "--max-session-tokens), found " +
                           std::to_string(length) + " and " + std::to_string(tokens) + " more");
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
  std::string parts;
  const auto add_place = [&](const v1::DeviceMemory& place) {
    parts += place.region() + ' ' + std::to_string(place.offset()) + ' ';
  };
  const auto add_tensor = [&](const v1::Tensor& tensor) {
    parts += sha256(tensor.data());
    if (tensor.has_memory()) add_place(tensor.memory());
  };
  for (const v1::Tensor* tensor : {&request.query(), &request.key(), &request.value()}) {
    add_tensor(*tensor);
  }
  if (request.has_selected()) {
    parts += "selected";
    add_tensor(request.selected());
  }
  if (request.has_bias()) {
    parts += "bias";
    add_tensor(request.bias());
  }
  if (request.has_out_memory()) {
    parts += "out";
    add_place(request.out_memory());
  }
  if (request.has_lse_memory()) {
    parts += "lse";
    add_place(request.lse_memory());
  }
  if (request.with_missed()) parts += "missed";
  return sha256(parts);
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

/// Tokens [begin, begin + count) of a tensor; of none, none.
template <typename View>
View tokens_in(View view, std::int64_t begin, std::int64_t count) {
  if (view.empty()) return view;
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, const std::byte, std::byte>;
  view.data = static_cast<Byte*>(view.data) +
              begin * view.strides[0] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  view.shape[0] = count;
  return view;
}

/// A call whose query's tokens come one piece after another.
class QueryInPieces : public CallInPieces {
 public:
  QueryInPieces(SessionEntry& entry, int layer, const v1::AttendOptions& options)
      : entry_(entry),
        layer_(layer),
        regions_(entry.tenant.regions()),
        call_(options, entry.retrieval) {}

  [[nodiscard]] UsedRegions& regions() noexcept { return regions_; }
  [[nodiscard]] const RetrievalConfig& retrieval() const noexcept { return call_.retrieval; }
  /// Most ids of a set of the call, of a layer with so many tokens.
  [[nodiscard]] std::int64_t most_selected(std::int64_t length) const noexcept {
    const bool fixed = call_.options.recall_target.has_value();
    return (fixed ? retrieval().with_fixed_k() : retrieval()).most_selected(length);
  }
  /// Sets the query's tokens and how many of them a piece has, of a layer with so many tokens.
  void divide(std::int64_t tokens, std::int64_t length) {
    const Config& config = entry_.model->engine.config();
    const std::int64_t work =
        std::max<std::int64_t>(length, 1) * config.model.query_heads * config.model.head_dim;
    const std::int64_t fit = std::max<std::int64_t>(entry_.piece_work / work, 1);
    const std::int64_t launch = config.memory.max_batch_rows;
    tokens_ = tokens;
    piece_ = fit < launch ? fit : fit / launch * launch;  // launches are full where there are more
  }
  bool next() override {
    const std::int64_t count = std::min(piece_, tokens_ - begin_);
    call_.options.tokens_after = tokens_ - begin_ - count;
    if (begin_ == 0) start(count == tokens_);
    piece(begin_, count);
    begin_ += count;
    if (begin_ < tokens_) return false;
    end();
    return true;
  }

 protected:
  [[nodiscard]] SessionEntry& entry() const noexcept { return entry_; }
  [[nodiscard]] int layer() const noexcept { return layer_; }
  [[nodiscard]] const AttendOptions& options() const noexcept { return call_.options; }
  /// Before the first piece, which may be all of the call.
  virtual void start(bool /*whole*/) {}
  virtual void piece(std::int64_t begin, std::int64_t count) = 0;
  virtual void end() {}

 private:
  SessionEntry& entry_;
  const int layer_;
  UsedRegions regions_;
  CallOptions call_;
  std::int64_t tokens_ = 0, piece_ = 0, begin_ = 0;
};

class Attending : public QueryInPieces {
 public:
  using QueryInPieces::QueryInPieces;
  AttendInputs inputs;
  AttendOutputs outputs;

 protected:
  [[nodiscard]] AttendInputs inputs_of(std::int64_t begin, std::int64_t count) const {
    return {.query = tokens_in(inputs.query, begin, count),
            .selected = tokens_in(inputs.selected, begin, count),
            .bias = tokens_in(inputs.bias, begin, count)};
  }
  void piece(std::int64_t begin, std::int64_t count) override {
    entry().session->attend(layer(), inputs_of(begin, count),
                            {.out = tokens_in(outputs.out, begin, count),
                             .lse = tokens_in(outputs.lse, begin, count),
                             .missed = tokens_in(outputs.missed, begin, count)},
                            {}, options());
  }
};

/// Appends with its first piece, and takes that back unless it comes to its end.
class Decoding final : public Attending {
 public:
  Decoding(SessionEntry& entry, int layer, const v1::DecodeRequest& request,
           v1::DecodeResponse& response, std::string digest)
      : Attending(entry, layer, request.options()),
        step_(request.step()),
        response_(response),
        digest_(std::move(digest)) {}
  ~Decoding() override {
    if (!length_) return;
    try {
      entry().session->truncate(*length_, {}, layer());
    } catch (const std::exception&) {
      // The engine has failed, and the session with it.
    }
  }
  Decoding(const Decoding&) = delete;  // takes its append back once
  Decoding& operator=(const Decoding&) = delete;

  KeyValue tensors;
  std::optional<Charge> charge;

 private:
  void start(bool whole) override {
    whole_ = whole;
    if (whole) return;
    const std::int64_t length = entry().session->length(layer());
    entry().session->append(layer(), tensors.key, tensors.value);
    length_ = length;
  }
  void piece(std::int64_t begin, std::int64_t count) override {
    if (!whole_) return Attending::piece(begin, count);
    entry().session->decode(layer(),
                            {.query = inputs.query,
                             .key = tensors.key,
                             .value = tensors.value,
                             .selected = inputs.selected,
                             .bias = inputs.bias},
                            outputs, {}, options());
  }
  void end() override {
    length_.reset();
    charge->keep();
    response_.set_layer(layer());
    response_.set_step(step_);
    if (step_ == 0) return;
    entry().remember({.layer = layer(),
                      .step = step_,
                      .request_digest = std::move(digest_),
                      .reply = bytes_of(response_)});
  }

  const std::int64_t step_;
  v1::DecodeResponse& response_;
  std::string digest_;
  bool whole_ = false;
  std::optional<std::int64_t> length_;  ///< Before the append, until the end.
};

}  // namespace

void execute(SessionEntry& entry, const v1::AppendRequest& request, ReplyBudget& /*budget*/,
             v1::AppendResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  UsedRegions regions(entry.tenant.regions());
  const KeyValue tensors = key_value_of(entry, request, regions);
  check_place(entry, request, entry.session->length(layer), tensors.key.shape[0]);
  response.mutable_layer_lengths()->Resize(model_of(entry).layers, 0);
  Charge charge(entry, tensors.key.shape[0]);
  entry.session->append(layer, tensors.key, tensors.value);
  charge.keep();
  for (int i = 0; i < model_of(entry).layers; ++i) {
    response.set_layer_lengths(i, entry.session->length(i));
  }
}

std::unique_ptr<CallInPieces> execute(SessionEntry& entry, const v1::SelectRequest& request,
                                      ReplyBudget& budget, v1::SelectResponse& response) {
  class Selecting final : public QueryInPieces {
   public:
    using QueryInPieces::QueryInPieces;
    TensorView query;
    SelectOutputs outputs;

   private:
    void piece(std::int64_t begin, std::int64_t count) override {
      entry().session->select(layer(), tokens_in(query, begin, count),
                              {.ids = tokens_in(outputs.ids, begin, count),
                               .scores = tokens_in(outputs.scores, begin, count),
                               .bias = tokens_in(outputs.bias, begin, count)},
                              {}, options());
    }
  };
  const int layer = checked_layer(entry, request.layer());
  auto call = std::make_unique<Selecting>(entry, layer, request.options());
  call->query = query_of(entry, request.query(), call->regions());
  const ModelConfig& model = model_of(entry);
  const std::int64_t heads = model.num_sets(call->retrieval().selection);
  const std::int64_t tokens = call->query.shape[0];
  const std::int64_t length = entry.session->length(layer);
  check_not_empty(length);
  const std::int64_t count = call->most_selected(length);
  constexpr std::int64_t kOverhead = 128;
  const int tensors = 1 + (request.with_scores() ? 1 : 0) + (request.with_bias() ? 1 : 0);
  budget.take(tokens * heads * count * tensors * 4 + kOverhead);
  call->outputs.ids = make_tensor(*response.mutable_ids(), DType::kInt32, {tokens, heads, count});
  if (request.with_scores()) {
    call->outputs.scores =
        make_tensor(*response.mutable_scores(), DType::kFloat32, {tokens, heads, count});
  }
  if (request.with_bias()) {
    call->outputs.bias =
        make_tensor(*response.mutable_bias(), DType::kFloat32, {tokens, heads, count});
  }
  call->divide(tokens, length);
  return call;
}

std::unique_ptr<CallInPieces> execute(SessionEntry& entry, const v1::AttendRequest& request,
                                      ReplyBudget& budget, v1::AttendResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  auto call = std::make_unique<Attending>(entry, layer, request.options());
  AttendInputs& inputs = call->inputs;
  inputs.query = query_of(entry, request.query(), call->regions());
  if (request.has_selected()) inputs.selected = view_of(request.selected(), "selected");
  if (request.has_bias()) inputs.bias = view_of(request.bias(), "bias");
  call->outputs = make_outputs(request, inputs.query, budget, response, call->regions());
  call->divide(inputs.query.shape[0], entry.session->length(layer));
  return call;
}

std::unique_ptr<CallInPieces> execute(SessionEntry& entry, const v1::DecodeRequest& request,
                                      ReplyBudget& budget, v1::DecodeResponse& response) {
  const int layer = checked_layer(entry, request.layer());
  check_at_least("step", request.step(), 0);
  std::string digest;
  if (request.step() > 0) {
    digest = digest_of(request);
    if (replay(entry, request, digest, budget, response)) return nullptr;
  }
  auto call = std::make_unique<Decoding>(entry, layer, request, response, std::move(digest));
  AttendInputs& inputs = call->inputs;
  inputs.query = query_of(entry, request.query(), call->regions());
  call->tensors = key_value_of(entry, request, call->regions());
  if (request.has_selected()) inputs.selected = view_of(request.selected(), "selected");
  if (request.has_bias()) inputs.bias = view_of(request.bias(), "bias");
  const std::int64_t length = entry.session->length(layer);
  const std::int64_t tokens = call->tensors.key.shape[0];
  check_place(entry, request, length, tokens);
  call->charge.emplace(entry, tokens);
  call->outputs = make_outputs(request, inputs.query, budget, response, call->regions());
  call->divide(inputs.query.shape[0], length + tokens);
  return call;
}

void execute(SessionEntry& entry, const v1::FetchRequest& request, ReplyBudget& budget,
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

void execute(SessionEntry& entry, const v1::PublishPrefixRequest& request, ReplyBudget& /*budget*/,
             v1::PublishPrefixResponse& response) {
  if (!entry.has_fingerprint) {
    throw ServiceError(Code::kFailedPrecondition, "NO_FINGERPRINT",
                       "expected a session created with a model_fingerprint, found none");
  }
  const auto count = static_cast<std::size_t>(request.token_ids_size());
  const auto length = static_cast<std::size_t>(entry.session->length());
  check_at_most("token_ids", count, length, ", the length");
  entry.session->publish({request.token_ids().data(), count});
  const auto page = static_cast<std::size_t>(entry.model->engine.config().memory.page_tokens);
  response.set_stored_tokens(static_cast<std::int64_t>(count / page * page));
}

void truncate_to(SessionEntry& entry, std::int64_t tokens) {
  check_at_least("tokens", tokens, 0);
  const std::int64_t before = stored_tokens(entry);
  entry.session->truncate(tokens);
  entry.remember({});
  const std::int64_t bytes = kv_bytes(model_of(entry), before - stored_tokens(entry));
  entry.charged_bytes -= bytes;
  entry.tenant.refund_kv(bytes);
}

}  // namespace kvtier::services
