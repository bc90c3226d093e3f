#include "kvtier/client.h"

#include "services/client/client_impl.h"
#include "services/client/decode_stream.h"
#include "services/client/plane_calls.h"
#include "services/wire/to_message.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace kvtier {

namespace v1 = ::kvtier::v1;

namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 16;  ///< Of heads, and of a row.

[[noreturn]] void invalid(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what);
}

/// The server checks what a tensor means; here only what is needed to read it.
void check_readable(const char* name, const TensorView& view) {
  if (view.empty() || view.rank < 1 || view.rank > kMaxTensorRank) {
    invalid(std::string(name) + ": expected a tensor of rank 1 to 4, found " +
            (view.empty() ? "none" : describe(view)));
  }
  const auto last = static_cast<std::size_t>(view.rank) - 1;
  const bool dense_rows = view.shape[last] <= 1 || view.strides[last] == 1;
  const bool extents = std::all_of(view.shape.begin(), view.shape.begin() + view.rank,
                                   [](std::int64_t extent) { return extent >= 0; });
  if (view.space != MemorySpace::kHost || !dense_rows || !extents) {
    invalid(std::string(name) + ": expected host memory with rows that are dense, found " +
            describe(view));
  }
}

void fill(v1::Tensor& message, const char* name, const TensorView& view) {
  check_readable(name, view);
  services::copy_rows(view, 0, view.shape[0], message);
}

void take(const v1::Tensor& message, const char* name, const MutableTensorView& view) {
  if (view.empty()) return;
  if (view.space == MemorySpace::kHost && services::copy_back(message, view)) return;
  std::string found = "[";
  for (const std::int64_t extent : message.shape()) {
    found += (found.size() == 1 ? "" : ", ") + std::to_string(extent);
  }
  invalid(std::string(name) + ": expected host memory for " + found + "] of " +
          v1::DataType_Name(message.dtype()) + ", found " + describe(view));
}

void check_options(const AttendOptions& options) {
  if (options.recall_target) {
    throw Error(ErrorCode::kUnimplemented, "recall_target: expected none over a service");
  }
}

void check_call(const TensorView& query, const AttendOutputs& outputs,
                const AttendOptions& options) {
  check_options(options);
  if (!outputs.missed.empty()) {
    throw Error(ErrorCode::kUnimplemented, "missed: expected no output over a service");
  }
  if (!outputs.selected.empty()) {
    throw Error(ErrorCode::kUnimplemented, "selected: ids are told by select, expected no output");
  }
  if (outputs.out.dtype != query.dtype) {
    invalid("out: expected the dtype of the query, " + std::string(dtype_name(query.dtype)) +
            ", found " + std::string(dtype_name(outputs.out.dtype)));
  }
}

void take(const v1::Tensor& out, const v1::Tensor& lse, const AttendOutputs& outputs) {
  take(out, "out", outputs.out);
  take(lse, "lse", outputs.lse);
}

/// Rows of a fetch: their number is told by the ids, the rest by the server.
void check_fetched(const char* name, const MutableTensorView& view, const TensorView& tokens) {
  check_readable(name, view);
  const bool fits = view.rank == 3 && view.shape[0] == tokens.shape[0] &&
                    view.shape[1] == tokens.shape[1] && view.shape[0] > 0 && view.shape[2] > 0 &&
                    view.shape[0] <= kMaxExtent && view.shape[2] <= kMaxExtent;
  if (fits) return;
  invalid(std::string(name) + ": expected [" + std::to_string(tokens.shape[0]) + ", " +
          std::to_string(tokens.shape[1]) + ", head_dim], found " + describe(view));
}

/// Columns [first, first + count) of dimension 1.
template <typename View>
View columns(View view, std::int64_t first, std::int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, const std::byte, std::byte>;
  view.data = static_cast<Byte*>(view.data) +
              first * view.strides[1] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  view.shape[1] = count;
  return view;
}

}  // namespace

class RemoteSession::Impl {
 public:
  Impl(std::shared_ptr<Client::Impl> client, const v1::Session& session)
      : client_(std::move(client)),
        name_(session.name()),
        lengths_(session.layer_lengths().begin(), session.layer_lengths().end()),
        steps_(client_->connection) {
    client_->add(name_, std::chrono::milliseconds(session.lease_ttl().seconds() * 1000 +
                                                  session.lease_ttl().nanos() / 1'000'000));
  }
  ~Impl() {
    client_->remove(name_);
    steps_.close();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + services::kCloseTime);
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
    check_readable("keys", keys);
    check_readable("values", values);
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
        if (first == 0) request.set_session(name_);
        request.set_layer(layer);
        if (known_layer(layer)) request.set_position(length(layer) + first);
        const std::int64_t count = std::min(chunk, tokens - first);
        services::copy_rows(keys, first, count, *request.mutable_key());
        services::copy_rows(values, first, count, *request.mutable_value());
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
    check_options(options);
    v1::SelectRequest request;
    request.set_session(name_);
    request.set_layer(layer);
    check_readable("query", query);
    *request.mutable_options() = services::message_of(options);
    request.set_with_scores(!outputs.scores.empty());
    v1::SelectResponse response;
    const bool done = over_plane([&](services::DataChannel& channel) {
      return services::select_over(channel, request, query, response);
    });
    if (!done) {
      fill(*request.mutable_query(), "query", query);
      client_->connection.call([&](grpc::ClientContext& context) {
        return client_->connection.attention().Select(&context, request, &response);
      });
    }
    take(response.ids(), "ids", outputs.ids);
    take(response.scores(), "scores", outputs.scores);
  }

  void attend(int layer, const AttendInputs& inputs, const AttendOutputs& outputs,
              const AttendOptions& options) {
    check_call(inputs.query, outputs, options);
    v1::AttendRequest request;
    request.set_session(name_);
    request.set_layer(layer);
    check_readable("query", inputs.query);
    if (!inputs.selected.empty()) check_readable("selected", inputs.selected);
    *request.mutable_options() = services::message_of(options);
    v1::AttendResponse response;
    const bool done = over_plane([&](services::DataChannel& channel) {
      return services::attend_over(channel, request, inputs, response);
    });
    if (!done) {
      fill(*request.mutable_query(), "query", inputs.query);
      if (!inputs.selected.empty()) fill(*request.mutable_selected(), "selected", inputs.selected);
      client_->connection.call([&](grpc::ClientContext& context) {
        return client_->connection.attention().Attend(&context, request, &response);
      });
    }
    take(response.out(), response.lse(), outputs);
  }

  void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
              const AttendOptions& options) {
    check_call(inputs.query, outputs, options);
    v1::DecodeRequest request;
    request.set_session(name_);
    request.set_layer(layer);
    request.set_step(++step_);
    if (known_layer(layer)) request.set_position(length(layer));
    check_readable("query", inputs.query);
    check_readable("key", inputs.key);
    check_readable("value", inputs.value);
    if (!inputs.selected.empty()) check_readable("selected", inputs.selected);
    *request.mutable_options() = services::message_of(options);
    v1::DecodeResponse response;
    const bool done = over_plane([&](services::DataChannel& channel) {
      return services::decode_over(channel, request, inputs, response);
    });
    if (!done) decode_over_grpc(request, inputs, response);
    lengths_[static_cast<std::size_t>(layer)] += inputs.key.shape[0];
    take(response.out(), response.lse(), outputs);
  }

  void fetch(int layer, const TensorView& tokens, const FetchOutputs& outputs) {
    check_readable("tokens", tokens);
    if (tokens.rank != 2) invalid("tokens: expected [kv_heads, n], found " + describe(tokens));
    const std::int64_t n = tokens.shape[1];
    check_fetched("keys", outputs.keys, tokens);
    check_fetched("values", outputs.values, tokens);
    const std::int64_t token_bytes = outputs.keys.shape[0] * outputs.keys.shape[2] * 2;
    const std::int64_t piece = std::max<std::int64_t>(kChunkBytes / token_bytes, 1);
    for (std::int64_t first = 0; first < n || first == 0; first += piece) {
      const std::int64_t count = std::min(piece, n - first);
      const TensorView ids = columns(tokens, first, count);
      v1::FetchRequest request;
      request.set_session(name_);
      request.set_layer(layer);
      v1::FetchResponse response;
      const bool done = over_plane([&](services::DataChannel& channel) {
        return services::fetch_over(channel, request, ids,
                                    static_cast<std::uint64_t>(token_bytes * count), response);
      });
      if (!done) {
        fill(*request.mutable_tokens(), "tokens", ids);
        client_->connection.call([&](grpc::ClientContext& context) {
          return client_->connection.attention().Fetch(&context, request, &response);
        });
      }
      take(response.key(), "keys", columns(outputs.keys, first, count));
      take(response.value(), "values", columns(outputs.values, first, count));
    }
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
  /// Runs a call over the data plane. Returns false when it must be made over gRPC, which is safe
  /// for calls that may be repeated: there was no channel, the tensors did not fit, or the server
  /// could not take it.
  template <typename Run>
  bool over_plane(Run run) {
    const services::ChannelPool::Lent channel = client_->channels.borrow();
    if (!channel) return false;
    try {
      return run(*channel);
    } catch (const ClientError& error) {
      if (error.code() == ErrorCode::kUnavailable ||
          error.code() == ErrorCode::kResourceExhausted || error.reason() == "REPLY_TOO_LARGE") {
        return false;
      }
      throw;
    }
  }

  /// Returns false when nothing was sent.
  bool append_over_plane(int layer, const TensorView& keys, const TensorView& values,
                         std::int64_t chunk) {
    const services::ChannelPool::Lent channel = client_->channels.borrow();
    if (!channel) return false;
    const std::int64_t tokens = keys.shape[0];
    for (std::int64_t first = 0; first < tokens || first == 0; first += chunk) {
      v1::AppendRequest request;
      request.set_session(name_);
      request.set_layer(layer);
      if (known_layer(layer)) request.set_position(length(layer));
      v1::AppendResponse response;
      if (!services::append_over(*channel, request, keys, values, first,
                                 std::min(chunk, tokens - first), response)) {
        if (first == 0) return false;
        invalid("keys: expected chunks of equal size");
      }
      lengths_.assign(response.layer_lengths().begin(), response.layer_lengths().end());
    }
    return true;
  }

  void decode_over_grpc(v1::DecodeRequest& request, const DecodeInputs& inputs,
                        v1::DecodeResponse& response) {
    fill(*request.mutable_query(), "query", inputs.query);
    fill(*request.mutable_key(), "key", inputs.key);
    fill(*request.mutable_value(), "value", inputs.value);
    if (!inputs.selected.empty()) fill(*request.mutable_selected(), "selected", inputs.selected);
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
  static std::int64_t chunk_tokens(const TensorView& keys, const TensorView& values) {
    std::int64_t row = 0;
    for (const TensorView* view : {&keys, &values}) {
      auto bytes = static_cast<std::int64_t>(dtype_bytes(view->dtype));
      for (int i = 1; i < view->rank; ++i) bytes *= view->shape[static_cast<std::size_t>(i)];
      row += bytes;
    }
    return std::clamp<std::int64_t>(kChunkBytes / std::max<std::int64_t>(row, 1), 1, 8192);
  }

  std::shared_ptr<Client::Impl> client_;
  std::string name_;
  std::vector<std::int64_t> lengths_;
  std::int64_t step_ = 0;
  services::DecodeStream steps_;
};

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
