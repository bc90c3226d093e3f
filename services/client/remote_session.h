#pragma once

#include "services/client/client_impl.h"
#include "services/client/decode_stream.h"
#include "services/client/request_tensors.h"
#include "services/wire/to_message.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvtier {

/// A session of the server: its calls, alone and as items of a batch.
class RemoteSession::Impl {
 public:
  Impl(std::shared_ptr<Client::Impl> client, const v1::Session& session)
      : client_(std::move(client)), name_(session.name()), steps_(client_->connection) {
    take_lengths(session);
    client_->add(name_, services::milliseconds_of(session.lease_ttl()));
  }
  ~Impl() {
    client_->remove(name_);
    steps_.close();
    client_->connection.end<v1::ReleaseSessionResponse>(named<v1::ReleaseSessionRequest>());
  }
  Impl(const Impl&) = delete;  // owns a session
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::shared_ptr<Client::Impl>& client() const noexcept { return client_; }

  void append(int layer, const TensorView& keys, const TensorView& values);
  void decode(const DecodeItem& item);
  void fetch(const FetchItem& item);
  /// Makes any other call of an item.
  template <typename Request, typename Response, typename Item>
  void call(const Item& item) {
    Request request;
    services::RequestTensors tensors(client_->memories);
    start(request, tensors, -1, item);
    take(client_->run<Response>(request, tensors), -1, item);
  }

  // Requests, of an item of a batch where `index` is not below 0.

  void start(v1::AppendRequest& request, services::RequestTensors& tensors, int layer,
             const TensorView& keys, const TensorView& values, std::int64_t first,
             std::int64_t count) const {
    name_call(request, layer);
    tensors.add({"keys"}, services::rows_of(keys, first, count), *request.mutable_key());
    tensors.add({"values"}, services::rows_of(values, first, count), *request.mutable_value());
  }
  void start(v1::SelectRequest& request, services::RequestTensors& tensors, int index,
             const SelectItem& item) const {
    name_call(request, item.layer);
    *request.mutable_options() = services::message_of(item.options);
    request.set_with_scores(!item.outputs.scores.empty());
    request.set_with_bias(!item.outputs.bias.empty());
    tensors.add({"query", index}, item.query, *request.mutable_query());
    tensors.add_selection();
  }
  void start(v1::AttendRequest& request, services::RequestTensors& tensors, int index,
             const AttendItem& item) const {
    start_attention(request, tensors, index, item, [] {});
  }
  void start(v1::DecodeRequest& request, services::RequestTensors& tensors, int index,
             const DecodeItem& item) {
    start_attention(request, tensors, index, item, [&] {
      tensors.add({"key", index}, item.inputs.key, *request.mutable_key());
      tensors.add({"value", index}, item.inputs.value, *request.mutable_value());
    });
    request.set_step(++step_);
    if (known_layer(item.layer)) request.set_position(length(item.layer));
  }
  void start(v1::FetchRequest& request, services::RequestTensors& tensors, int index,
             const FetchItem& item) const {
    services::check_fetch(index, item.tokens, item.outputs, tensors.memories());
    name_call(request, item.layer);
    tensors.add({"tokens", index}, item.tokens, *request.mutable_tokens());
    tensors.add_rows(item.outputs);
  }

  // Results.

  void take(const v1::SelectResponse& response, int index, const SelectItem& item) const {
    const services::DeviceMemories& memories = client_->memories;
    services::take(response.ids(), {"ids", index}, item.outputs.ids, memories);
    services::take(response.scores(), {"scores", index}, item.outputs.scores, memories);
    services::take(response.bias(), {"bias", index}, item.outputs.bias, memories);
  }
  void take(const v1::AttendResponse& response, int index, const AttendItem& item) const {
    services::take(response, index, item.outputs, client_->memories);
  }
  void take(const v1::DecodeResponse& response, int index, const DecodeItem& item) {
    if (known_layer(item.layer)) {
      lengths_[static_cast<std::size_t>(item.layer)] += item.inputs.key.shape[0];
    }
    services::take(response, index, item.outputs, client_->memories);
  }
  void take(const v1::FetchResponse& response, int index, const FetchItem& item) const {
    services::take(response.key(), {"keys", index}, item.outputs.keys, client_->memories);
    services::take(response.value(), {"values", index}, item.outputs.values, client_->memories);
  }

  [[nodiscard]] std::int64_t length(int layer) const;
  [[nodiscard]] const std::vector<std::int64_t>& lengths() const noexcept { return lengths_; }
  /// Takes `layer_lengths` of a session, or of an append's response.
  template <typename Message>
  void take_lengths(const Message& message) {
    lengths_.assign(message.layer_lengths().begin(), message.layer_lengths().end());
  }
  /// A request about this session.
  template <typename Request>
  [[nodiscard]] Request named() const {
    Request request;
    request.set_name(name_);
    return request;
  }

 private:
  template <typename Request>
  void name_call(Request& request, int layer) const {
    request.set_session(name_);
    request.set_layer(layer);
  }
  /// `add` adds the tensors that stand behind the query.
  template <typename Request, typename Item, typename Add>
  void start_attention(Request& request, services::RequestTensors& tensors, int index,
                       const Item& item, Add add) const {
    services::check_attention(index, item.inputs.query, item.outputs, tensors.memories());
    name_call(request, item.layer);
    *request.mutable_options() = services::message_of(item.options);
    tensors.add({"query", index}, item.inputs.query, *request.mutable_query());
    add();
    tensors.add_optional(index, item.inputs, request);
    tensors.add_attention(item.inputs.query, item.outputs, request);
  }
  /// Returns false when nothing was sent.
  bool append_over_plane(int layer, const TensorView& keys, const TensorView& values,
                         std::int64_t chunk);
  /// After a chunk that was refused: those before it are stored.
  void take_lengths_of_chunks();
  [[nodiscard]] std::int64_t chunk_tokens(const TensorView& keys, const TensorView& values) const;
  void decode_over_grpc(const v1::DecodeRequest& request, v1::DecodeResponse& response);
  /// The server refuses a layer that is none; it needs no position for that.
  [[nodiscard]] bool known_layer(int layer) const {
    return layer >= 0 && static_cast<std::size_t>(layer) < lengths_.size();
  }

  std::shared_ptr<Client::Impl> client_;
  std::string name_;
  std::vector<std::int64_t> lengths_;
  std::int64_t step_ = 0;
  services::DecodeStream steps_;
};

}  // namespace kvtier
