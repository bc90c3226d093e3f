#include "kvtier/client.h"

#include "services/client/client_impl.h"
#include "services/client/decode_stream.h"
#include "services/client/request_tensors.h"
#include "services/wire/grpc_time.h"
#include "services/wire/to_message.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace kvtier {

namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;

[[noreturn]] void invalid(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what);
}

/// The results of a batch; `take(i, response)` takes the outputs of an item that succeeded.
template <typename Response, typename Take>
std::vector<ItemResult> results_of(const Response& response, std::size_t count, Take take) {
  if (static_cast<std::size_t>(response.items_size()) != count) {
    throw ClientError(ErrorCode::kInternal,
                      "batch: expected " + std::to_string(count) + " items in the reply, found " +
                          std::to_string(response.items_size()),
                      "");
  }
  std::vector<ItemResult> results(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& item = response.items(static_cast<int>(i));
    try {
      if (item.status().code() != 0) throw services::error_of(item.status());
      take(static_cast<int>(i), item.response());
    } catch (const ClientError& error) {
      results[i].error = error;
    } catch (const Error& error) {
      results[i].error.emplace(error.code(), error.what(), "");
    }
  }
  return results;
}

}  // namespace

class RemoteSession::Impl {
 public:
  Impl(std::shared_ptr<Client::Impl> client, const v1::Session& session)
      : client_(std::move(client)),
        name_(session.name()),
        lengths_(session.layer_lengths().begin(), session.layer_lengths().end()),
        steps_(client_->connection) {
    client_->add(name_, services::milliseconds_of(session.lease_ttl()));
  }
  ~Impl() {
    client_->remove(name_);
    steps_.close();
    grpc::ClientContext context;
    context.set_deadline(services::grpc_deadline(services::kCloseTime));
    client_->connection.authorize(context);
    v1::ReleaseSessionRequest request;
    request.set_name(name_);
    v1::ReleaseSessionResponse response;
    // When this fails, the lease ends the session.
    (void)client_->connection.sessions().ReleaseSession(&context, request, &response);
  }
  Impl(const Impl&) = delete;  // owns a session
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  void append(int layer, const TensorView& keys, const TensorView& values) {
    services::check_readable({"keys"}, keys, client_->memories);
    services::check_readable({"values"}, values, client_->memories);
    if (keys.shape[0] != values.shape[0]) {
      invalid("values: expected " + std::to_string(keys.shape[0]) + " tokens, found " +
              std::to_string(values.shape[0]));
    }
    const std::int64_t tokens = keys.shape[0];
    const std::int64_t chunk = chunk_tokens(keys, values);
    v1::AppendResponse response;
    if (append_over_plane(layer, keys, values, chunk)) return;
    client_->connection.call_once([&](grpc::ClientContext& context) {
      const auto stream = client_->connection.attention().Append(&context, &response);
      for (std::int64_t first = 0; first < tokens || first == 0; first += chunk) {
        v1::AppendRequest request;
        services::RequestTensors tensors(client_->memories);
        start(request, tensors, layer, keys, values, first, std::min(chunk, tokens - first));
        if (known_layer(layer)) request.set_position(length(layer) + first);
        tensors.fill();
        if (!stream->Write(request)) break;
      }
      stream->WritesDone();
      const grpc::Status status = stream->Finish();
      if (status.ok()) {
        lengths_.assign(response.layer_lengths().begin(), response.layer_lengths().end());
      }
      return status;
    });
  }

  void select(int layer, const TensorView& query, const SelectOutputs& outputs,
              const AttendOptions& options) {
    v1::SelectRequest request;
    services::RequestTensors tensors(client_->memories);
    start(request, tensors, -1, layer, query, outputs, options);
    v1::SelectResponse response;
    client_->run(services::Method::kSelect, request, tensors, response, &Stub::Select);
    take(response, -1, outputs, client_->memories);
  }

  void attend(int layer, const AttendInputs& inputs, const AttendOutputs& outputs,
              const AttendOptions& options) {
    v1::AttendRequest request;
    services::RequestTensors tensors(client_->memories);
    start(request, tensors, -1, layer, inputs, outputs, options);
    v1::AttendResponse response;
    client_->run(services::Method::kAttend, request, tensors, response, &Stub::Attend);
    services::take(response, -1, outputs, client_->memories);
  }

  void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
              const AttendOptions& options) {
    v1::DecodeRequest request;
    services::RequestTensors tensors(client_->memories);
    start(request, tensors, -1, layer, inputs, outputs, options, 0);
    v1::DecodeResponse response;
    if (!client_->run_over_plane(services::Method::kDecode, request, tensors, response)) {
      tensors.fill();
      decode_over_grpc(request, response);
    }
    stored(layer, inputs.key.shape[0]);
    services::take(response, -1, outputs, client_->memories);
  }

  void fetch(int layer, const TensorView& tokens, const FetchOutputs& outputs) {
    services::check_fetch(-1, tokens, outputs, client_->memories);
    const std::int64_t n = tokens.shape[1];
    const std::int64_t token_bytes = outputs.keys.shape[0] * outputs.keys.shape[2] * 2;
    const std::int64_t piece = std::max<std::int64_t>(kChunkBytes / token_bytes, 1);
    for (std::int64_t first = 0; first < n || first == 0; first += piece) {
      const std::int64_t count = std::min(piece, n - first);
      const FetchOutputs rows{.keys = services::columns_of(outputs.keys, first, count),
                              .values = services::columns_of(outputs.values, first, count)};
      v1::FetchRequest request;
      services::RequestTensors tensors(client_->memories);
      start(request, tensors, -1, layer, services::columns_of(tokens, first, count), rows);
      v1::FetchResponse response;
      client_->run(services::Method::kFetch, request, tensors, response, &Stub::Fetch);
      take(response, -1, rows, client_->memories);
    }
  }

  // Requests, of an item of a batch where `item` is not below 0.

  void start(v1::AppendRequest& request, services::RequestTensors& tensors, int layer,
             const TensorView& keys, const TensorView& values, std::int64_t first,
             std::int64_t count) const {
    name_call(request, layer);
    tensors.add({"keys"}, services::rows_of(keys, first, count), *request.mutable_key());
    tensors.add({"values"}, services::rows_of(values, first, count), *request.mutable_value());
  }
  void start(v1::SelectRequest& request, services::RequestTensors& tensors, int item, int layer,
             const TensorView& query, const SelectOutputs& outputs,
             const AttendOptions& options) const {
    name_call(request, layer);
    *request.mutable_options() = services::message_of(options);
    request.set_with_scores(!outputs.scores.empty());
    request.set_with_bias(!outputs.bias.empty());
    tensors.add({"query", item}, query, *request.mutable_query());
    tensors.add_selection();
  }
  void start(v1::AttendRequest& request, services::RequestTensors& tensors, int item, int layer,
             const AttendInputs& inputs, const AttendOutputs& outputs,
             const AttendOptions& options) const {
    services::check_attention(item, inputs.query, outputs, tensors.memories());
    name_call(request, layer);
    *request.mutable_options() = services::message_of(options);
    tensors.add({"query", item}, inputs.query, *request.mutable_query());
    tensors.add_optional(item, inputs, request);
    tensors.add_attention(inputs.query, outputs, request);
  }
  /// `ahead`: tokens of the layer that steps before this one, not executed yet, will have stored.
  void start(v1::DecodeRequest& request, services::RequestTensors& tensors, int item, int layer,
             const DecodeInputs& inputs, const AttendOutputs& outputs, const AttendOptions& options,
             std::int64_t ahead) {
    services::check_attention(item, inputs.query, outputs, tensors.memories());
    name_call(request, layer);
    *request.mutable_options() = services::message_of(options);
    tensors.add({"query", item}, inputs.query, *request.mutable_query());
    tensors.add({"key", item}, inputs.key, *request.mutable_key());
    tensors.add({"value", item}, inputs.value, *request.mutable_value());
    tensors.add_optional(item, inputs, request);
    tensors.add_attention(inputs.query, outputs, request);
    request.set_step(++step_);
    if (known_layer(layer)) request.set_position(length(layer) + ahead);
  }
  void start(v1::FetchRequest& request, services::RequestTensors& tensors, int item, int layer,
             const TensorView& tokens, const FetchOutputs& outputs) const {
    services::check_fetch(item, tokens, outputs, tensors.memories());
    name_call(request, layer);
    tensors.add({"tokens", item}, tokens, *request.mutable_tokens());
    tensors.add_rows(outputs);
  }

  static void take(const v1::SelectResponse& response, int item, const SelectOutputs& outputs,
                   const services::DeviceMemories& memories) {
    services::take(response.ids(), {"ids", item}, outputs.ids, memories);
    services::take(response.scores(), {"scores", item}, outputs.scores, memories);
    services::take(response.bias(), {"bias", item}, outputs.bias, memories);
  }
  static void take(const v1::FetchResponse& response, int item, const FetchOutputs& outputs,
                   const services::DeviceMemories& memories) {
    services::take(response.key(), {"keys", item}, outputs.keys, memories);
    services::take(response.value(), {"values", item}, outputs.values, memories);
  }
  /// Takes note of tokens that a step has stored.
  void stored(int layer, std::int64_t tokens) {
    if (known_layer(layer)) lengths_[static_cast<std::size_t>(layer)] += tokens;
  }

  void truncate(std::int64_t tokens) {
    v1::TruncateSessionRequest request;
    request.set_name(name_);
    request.set_tokens(tokens);
    request.set_request_id(services::make_request_id());
    v1::TruncateSessionResponse response;
    client_->connection.call([&](grpc::ClientContext& context) {
      return client_->connection.sessions().TruncateSession(&context, request, &response);
    });
    take_lengths(response.session());
  }

  [[nodiscard]] v1::ForkSessionResponse fork(int count) {
    v1::ForkSessionRequest request;
    request.set_name(name_);
    request.set_count(count);
    request.set_request_id(services::make_request_id());
    v1::ForkSessionResponse response;
    client_->connection.call([&](grpc::ClientContext& context) {
      return client_->connection.sessions().ForkSession(&context, request, &response);
    });
    return response;
  }
  void publish(std::span<const std::int32_t> token_ids) {
    v1::PublishPrefixRequest request;
    request.set_name(name_);
    request.mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
    v1::PublishPrefixResponse response;
    client_->connection.call([&](grpc::ClientContext& context) {
      return client_->connection.sessions().PublishPrefix(&context, request, &response);
    });
  }
  [[nodiscard]] const std::shared_ptr<Client::Impl>& client() const noexcept { return client_; }

  void refresh() {
    v1::GetSessionRequest request;
    request.set_name(name_);
    v1::GetSessionResponse response;
    client_->connection.call([&](grpc::ClientContext& context) {
      return client_->connection.sessions().GetSession(&context, request, &response);
    });
    take_lengths(response.session());
  }

  [[nodiscard]] std::int64_t length(int layer) const {
    if (!known_layer(layer)) {
      invalid("layer: expected 0.." + std::to_string(lengths_.size() - 1) + ", found " +
              std::to_string(layer));
    }
    return lengths_[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] std::int64_t length() const {
    return lengths_.empty() ? 0 : *std::min_element(lengths_.begin(), lengths_.end());
  }

 private:
  using Stub = v1::AttentionService::Stub;

  template <typename Request>
  void name_call(Request& request, int layer) const {
    request.set_session(name_);
    request.set_layer(layer);
  }

  /// Returns false when nothing was sent.
  bool append_over_plane(int layer, const TensorView& keys, const TensorView& values,
                         std::int64_t chunk) {
    const services::ChannelPool::Lent channel = client_->channels.borrow();
    if (!channel) return false;
    const std::int64_t tokens = keys.shape[0];
    for (std::int64_t first = 0; first < tokens || first == 0; first += chunk) {
      v1::AppendRequest request;
      services::RequestTensors tensors(client_->memories);
      start(request, tensors, layer, keys, values, first, std::min(chunk, tokens - first));
      if (known_layer(layer)) request.set_position(length(layer));
      v1::AppendResponse response;
      if (!services::call_over(*channel, services::Method::kAppend, request, tensors, response)) {
        if (first == 0) return false;
        invalid("keys: expected chunks of equal size");
      }
      lengths_.assign(response.layer_lengths().begin(), response.layer_lengths().end());
    }
    return true;
  }

  void decode_over_grpc(const v1::DecodeRequest& request, v1::DecodeResponse& response) {
    client_->connection.retry([&] {
      grpc::Status status = steps_.exchange(request, response);
      // The server ends streams that stand still; the session lives on.
      if (services::reason_of(status) == "STREAM_IDLE") status = steps_.exchange(request, response);
      return status;
    });
  }

  /// The server refuses a layer that is none; it needs no position for that.
  [[nodiscard]] bool known_layer(int layer) const {
    return layer >= 0 && static_cast<std::size_t>(layer) < lengths_.size();
  }
  void take_lengths(const v1::Session& session) {
    lengths_.assign(session.layer_lengths().begin(), session.layer_lengths().end());
  }
  [[nodiscard]] std::int64_t chunk_tokens(const TensorView& keys, const TensorView& values) const {
    constexpr std::int64_t kMaxTokens = 8192;
    const services::DeviceMemories& memories = client_->memories;
    if (memories.place_of(keys) && memories.place_of(values)) return kMaxTokens;
    std::int64_t row = 0;
    for (const TensorView* view : {&keys, &values}) {
      auto bytes = static_cast<std::int64_t>(dtype_bytes(view->dtype));
      for (int i = 1; i < view->rank; ++i) bytes *= view->shape[static_cast<std::size_t>(i)];
      row += bytes;
    }
    return std::clamp<std::int64_t>(kChunkBytes / std::max<std::int64_t>(row, 1), 1, kMaxTokens);
  }

  std::shared_ptr<Client::Impl> client_;
  std::string name_;
  std::vector<std::int64_t> lengths_;
  std::int64_t step_ = 0;
  services::DecodeStream steps_;
};

namespace {

/// Calls `visit(i, item, session)` for each item of a batch.
template <typename Item, typename Visit>
void each_item(const std::shared_ptr<Client::Impl>& client, std::span<const Item> items,
               Visit visit) {
  for (std::size_t i = 0; i < items.size(); ++i) {
    const RemoteSession* const session = items[i].session;
    RemoteSession::Impl* const impl =
        session == nullptr ? nullptr : Client::Impl::impl_of(*session);
    if (impl == nullptr || impl->client() != client) {
      invalid("items[" + std::to_string(i) + "].session: expected one of this client, found " +
              (impl == nullptr ? "none" : "another's"));
    }
    visit(static_cast<int>(i), items[i], *impl);
  }
}

}  // namespace

Client::Client(const ClientOptions& options) : impl_(std::make_shared<Impl>(options)) {}
Client::~Client() = default;
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;

RemoteSession Client::open(const RemoteSessionConfig& config) {
  v1::CreateSessionRequest request;
  request.set_request_id(services::make_request_id());
  *request.mutable_geometry() = services::geometry_of(config.model);
  request.set_capacity_tokens(config.capacity_tokens);
  *request.mutable_retrieval() = services::message_of(config.retrieval);
  for (const SketchConfig& sketch : config.extra_sketches) {
    *request.add_extra_sketches() = services::message_of(sketch);
  }
  request.mutable_token_ids()->Add(config.token_ids.begin(), config.token_ids.end());
  request.set_model_fingerprint(config.model_fingerprint);
  v1::CreateSessionResponse response;
  impl_->connection.call([&](grpc::ClientContext& context) {
    return impl_->connection.sessions().CreateSession(&context, request, &response);
  });
  return RemoteSession(std::make_unique<RemoteSession::Impl>(impl_, response.session()));
}

std::vector<ItemResult> Client::batch_select(std::span<const SelectItem> items) {
  v1::BatchSelectRequest request;
  services::RequestTensors tensors(impl_->memories);
  each_item(impl_, items, [&](int i, const SelectItem& item, const RemoteSession::Impl& session) {
    session.start(*request.add_items(), tensors, i, item.layer, item.query, item.outputs,
                  item.options);
  });
  v1::BatchSelectResponse response;
  impl_->run(services::Method::kBatchSelect, request, tensors, response,
             &v1::AttentionService::Stub::BatchSelect);
  return results_of(response, items.size(), [&](int i, const v1::SelectResponse& found) {
    RemoteSession::Impl::take(found, i, items[static_cast<std::size_t>(i)].outputs,
                              impl_->memories);
  });
}

std::vector<ItemResult> Client::batch_attend(std::span<const AttendItem> items) {
  v1::BatchAttendRequest request;
  services::RequestTensors tensors(impl_->memories);
  each_item(impl_, items, [&](int i, const AttendItem& item, const RemoteSession::Impl& session) {
    session.start(*request.add_items(), tensors, i, item.layer, item.inputs, item.outputs,
                  item.options);
  });
  v1::BatchAttendResponse response;
  impl_->run(services::Method::kBatchAttend, request, tensors, response,
             &v1::AttentionService::Stub::BatchAttend);
  return results_of(response, items.size(), [&](int i, const v1::AttendResponse& found) {
    services::take(found, i, items[static_cast<std::size_t>(i)].outputs, impl_->memories);
  });
}

std::vector<ItemResult> Client::batch_decode(std::span<const DecodeItem> items) {
  v1::BatchDecodeRequest request;
  services::RequestTensors tensors(impl_->memories);
  std::map<std::pair<const RemoteSession*, int>, std::int64_t> ahead;
  each_item(impl_, items, [&](int i, const DecodeItem& item, RemoteSession::Impl& session) {
    std::int64_t& tokens = ahead[{item.session, item.layer}];
    session.start(*request.add_items(), tensors, i, item.layer, item.inputs, item.outputs,
                  item.options, tokens);
    tokens += item.inputs.key.shape[0];
  });
  v1::BatchDecodeResponse response;
  impl_->run(services::Method::kBatchDecode, request, tensors, response,
             &v1::AttentionService::Stub::BatchDecode);
  return results_of(response, items.size(), [&](int i, const v1::DecodeResponse& found) {
    const DecodeItem& item = items[static_cast<std::size_t>(i)];
    Client::Impl::impl_of(*item.session)->stored(item.layer, item.inputs.key.shape[0]);
    services::take(found, i, item.outputs, impl_->memories);
  });
}

std::vector<ItemResult> Client::batch_fetch(std::span<const FetchItem> items) {
  v1::BatchFetchRequest request;
  services::RequestTensors tensors(impl_->memories);
  each_item(impl_, items, [&](int i, const FetchItem& item, const RemoteSession::Impl& session) {
    session.start(*request.add_items(), tensors, i, item.layer, item.tokens, item.outputs);
  });
  v1::BatchFetchResponse response;
  impl_->run(services::Method::kBatchFetch, request, tensors, response,
             &v1::AttentionService::Stub::BatchFetch);
  return results_of(response, items.size(), [&](int i, const v1::FetchResponse& found) {
    RemoteSession::Impl::take(found, i, items[static_cast<std::size_t>(i)].outputs,
                              impl_->memories);
  });
}

RemoteSession::RemoteSession(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
RemoteSession::~RemoteSession() = default;
RemoteSession::RemoteSession(RemoteSession&&) noexcept = default;
RemoteSession& RemoteSession::operator=(RemoteSession&&) noexcept = default;

const std::string& RemoteSession::name() const noexcept { return impl_->name(); }
void RemoteSession::append(int layer, const TensorView& keys, const TensorView& values) {
  impl_->append(layer, keys, values);
}
void RemoteSession::select(int layer, const TensorView& query, const SelectOutputs& outputs,
                           const AttendOptions& options) {
  impl_->select(layer, query, outputs, options);
}
void RemoteSession::attend(int layer, const AttendInputs& inputs, const AttendOutputs& outputs,
                           const AttendOptions& options) {
  impl_->attend(layer, inputs, outputs, options);
}
void RemoteSession::decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
                           const AttendOptions& options) {
  impl_->decode(layer, inputs, outputs, options);
}
void RemoteSession::fetch(int layer, const TensorView& tokens, const FetchOutputs& outputs) {
  impl_->fetch(layer, tokens, outputs);
}
void RemoteSession::truncate(std::int64_t tokens) { impl_->truncate(tokens); }
std::vector<RemoteSession> RemoteSession::fork(int count) {
  const v1::ForkSessionResponse response = impl_->fork(count);
  std::vector<RemoteSession> children;
  for (const v1::Session& child : response.sessions()) {
    children.push_back(RemoteSession(std::make_unique<Impl>(impl_->client(), child)));
  }
  return children;
}
void RemoteSession::publish(std::span<const std::int32_t> token_ids) { impl_->publish(token_ids); }
std::int64_t RemoteSession::length(int layer) const { return impl_->length(layer); }
std::int64_t RemoteSession::length() const { return impl_->length(); }
void RemoteSession::refresh() { impl_->refresh(); }

}  // namespace kvtier
