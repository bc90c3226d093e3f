#include "services/client/remote_session.h"

#include "include/types/failure.h"

#include <algorithm>
#include <utility>

namespace kvtier {

namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;

/// Whether an error leaves open that an append was stored, or says that it may be stored already.
bool is_open(ErrorCode code) {
  return code == ErrorCode::kUnavailable || code == ErrorCode::kDeadlineExceeded ||
         code == ErrorCode::kCancelled || code == ErrorCode::kAborted;
}

}  // namespace

void RemoteSession::Impl::append(int layer, const TensorView& keys, const TensorView& values) {
  services::check_readable({"keys"}, keys, client_->memories);
  services::check_readable({"values"}, values, client_->memories);
  if (keys.shape[0] != values.shape[0]) {
    throw_invalid("values", join(keys.shape[0], " tokens"), values.shape[0]);
  }
  const std::int64_t tokens = keys.shape[0];
  const std::int64_t chunk = chunk_tokens(keys, values);
  v1::AppendResponse response;
  if (append_over_plane(layer, keys, values, chunk)) return;
  const auto attempt = [&](grpc::ClientContext& context) {
    const auto stream = steps_.stub().Append(&context, &response);
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
      take_lengths(response);
    }
    return status;
  };
  try {
    client_->connection.call_once(attempt);
  } catch (const ClientError& error) {
    if (!is_open(error.code())) take_lengths_of_chunks();
    throw;
  }
}

void RemoteSession::Impl::take_lengths_of_chunks() {
  try {
    take_lengths(
        client_->connection.call_once<v1::GetSessionResponse>(named<v1::GetSessionRequest>())
            .session());
  } catch (const ClientError&) {
    // The caller hears of the append.
  }
}

void RemoteSession::Impl::decode(const DecodeItem& item) {
  v1::DecodeRequest request;
  services::RequestTensors tensors(client_->memories);
  start(request, tensors, -1, item);
  v1::DecodeResponse response;
  if (!client_->run_over_plane(request, tensors, response)) {
    tensors.fill();
    decode_over_grpc(request, response);
  }
  take(response, -1, item);
}

void RemoteSession::Impl::fetch(const FetchItem& item) {
  const TensorView& tokens = item.tokens;
  const FetchOutputs& outputs = item.outputs;
  services::check_fetch(-1, tokens, outputs, client_->memories);
  const std::int64_t n = tokens.shape[1];
  const std::int64_t token_bytes = outputs.keys.shape[0] * outputs.keys.shape[2] * 2;
  const std::int64_t piece = std::max<std::int64_t>(kChunkBytes / token_bytes, 1);
  for (std::int64_t first = 0; first < n || first == 0; first += piece) {
    const std::int64_t count = std::min(piece, n - first);
    call<v1::FetchRequest, v1::FetchResponse>(
        FetchItem{.layer = item.layer,
                  .tokens = services::columns_of(tokens, first, count),
                  .outputs = {.keys = services::columns_of(outputs.keys, first, count),
                              .values = services::columns_of(outputs.values, first, count)}});
  }
}

bool RemoteSession::Impl::append_over_plane(int layer, const TensorView& keys,
                                            const TensorView& values, std::int64_t chunk) {
  const services::ChannelPool::Lent channel = client_->channels.borrow();
  if (!channel) return false;
  const std::int64_t tokens = keys.shape[0];
  for (std::int64_t first = 0; first < tokens || first == 0; first += chunk) {
    v1::AppendRequest request;
    services::RequestTensors tensors(client_->memories);
    start(request, tensors, layer, keys, values, first, std::min(chunk, tokens - first));
    if (known_layer(layer)) request.set_position(length(layer));
    v1::AppendResponse response;
    if (!services::call_over(*channel, request, tensors, response)) {
      if (first == 0) return false;
      throw Error(ErrorCode::kInvalidArgument, "keys: expected chunks of equal size");
    }
    take_lengths(response);
  }
  return true;
}

void RemoteSession::Impl::decode_over_grpc(const v1::DecodeRequest& request,
                                           v1::DecodeResponse& response) {
  client_->connection.retry([&] {
    grpc::Status status = steps_.exchange(request, response);
    // The server ends streams that stand still; the session lives on.
    if (services::reason_of(status) == "STREAM_IDLE") status = steps_.exchange(request, response);
    return status;
  });
}

std::int64_t RemoteSession::Impl::chunk_tokens(const TensorView& keys,
                                               const TensorView& values) const {
  constexpr std::int64_t kMaxTokens = 8192;
  const services::DeviceMemories& memories = client_->memories;
  if (memories.place_of(keys) && memories.place_of(values)) return kMaxTokens;
  const auto row =
      static_cast<std::int64_t>(services::tensor_bytes(services::rows_of(keys, 0, 1)) +
                                services::tensor_bytes(services::rows_of(values, 0, 1)));
  return std::clamp<std::int64_t>(kChunkBytes / std::max<std::int64_t>(row, 1), 1, kMaxTokens);
}

std::int64_t RemoteSession::Impl::length(int layer) const {
  if (!known_layer(layer)) {
    throw_invalid("layer", join("0..", lengths_.size() - 1), layer);
  }
  return lengths_[static_cast<std::size_t>(layer)];
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
  impl_->call<v1::SelectRequest, v1::SelectResponse>(
      SelectItem{this, layer, query, outputs, options});
}
void RemoteSession::attend(int layer, const AttendInputs& inputs, const AttendOutputs& outputs,
                           const AttendOptions& options) {
  impl_->call<v1::AttendRequest, v1::AttendResponse>(
      AttendItem{this, layer, inputs, outputs, options});
}
void RemoteSession::decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
                           const AttendOptions& options) {
  impl_->decode({this, layer, inputs, outputs, options});
}
void RemoteSession::fetch(int layer, const TensorView& tokens, const FetchOutputs& outputs) {
  impl_->fetch({this, layer, tokens, outputs});
}
void RemoteSession::truncate(std::int64_t tokens) {
  auto request = impl_->named<v1::TruncateSessionRequest>();
  request.set_tokens(tokens);
  request.set_request_id(services::make_request_id());
  const auto response = impl_->client()->connection.call<v1::TruncateSessionResponse>(request);
  impl_->take_lengths(response.session());
}
std::vector<RemoteSession> RemoteSession::fork(int count) {
  auto request = impl_->named<v1::ForkSessionRequest>();
  request.set_count(count);
  request.set_request_id(services::make_request_id());
  const auto response = impl_->client()->connection.call<v1::ForkSessionResponse>(request);
  std::vector<RemoteSession> children;
  for (const v1::Session& child : response.sessions()) {
    children.push_back(RemoteSession(std::make_unique<Impl>(impl_->client(), child)));
  }
  return children;
}
void RemoteSession::publish(std::span<const std::int32_t> token_ids) {
  auto request = impl_->named<v1::PublishPrefixRequest>();
  request.mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
  static_cast<void>(impl_->client()->connection.call<v1::PublishPrefixResponse>(request));
}
std::int64_t RemoteSession::length(int layer) const { return impl_->length(layer); }
std::int64_t RemoteSession::length() const {
  return impl_->lengths().empty() ? 0 : std::ranges::min(impl_->lengths());
}
void RemoteSession::refresh() {
  const auto request = impl_->named<v1::GetSessionRequest>();
  const auto response = impl_->client()->connection.call<v1::GetSessionResponse>(request);
  impl_->take_lengths(response.session());
}

}  // namespace kvtier
