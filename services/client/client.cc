#include "kvtier/client.h"

#include "include/types/failure.h"
#include "services/client/client_impl.h"
#include "services/client/remote_session.h"
#include "services/wire/to_message.h"

#include <map>
#include <utility>

namespace kvtier {

namespace {

constexpr int kNamesPerReply = 1000;

/// The results of a batch; `take(i, response)` takes the outputs of an item that succeeded.
template <typename Response, typename Take>
std::vector<ItemResult> results_of(const Response& response, std::size_t count, Take take) {
  if (static_cast<std::size_t>(response.items_size()) != count) {
    throw ClientError(
        ErrorCode::kInternal,
        join("batch: expected ", count, " items in the reply, found ", response.items_size()), "");
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

/// The session of an item. Throws unless it is one of `client`.
template <typename Item>
RemoteSession::Impl& session_of(const std::shared_ptr<Client::Impl>& client, std::size_t index,
                                const Item& item) {
  RemoteSession::Impl* const impl =
      item.session == nullptr ? nullptr : Client::Impl::impl_of(*item.session);
  if (impl != nullptr && impl->client() == client) return *impl;
  throw_invalid(join("items[", index, "].session"), "one of this client",
                impl == nullptr ? "none" : "another's");
}

template <typename Request, typename Response, typename Item>
std::vector<ItemResult> call_batch(const std::shared_ptr<Client::Impl>& client,
                                   std::span<const Item> items) {
  Request request;
  services::RequestTensors tensors(client->memories);
  // Tokens of a layer that items before one, not executed yet, will have stored.
  std::map<std::pair<const RemoteSession*, int>, std::int64_t> stored_before;
  for (std::size_t i = 0; i < items.size(); ++i) {
    RemoteSession::Impl& session = session_of(client, i, items[i]);
    auto& message = *request.add_items();
    session.start(message, tensors, static_cast<int>(i), items[i]);
    if constexpr (std::is_same_v<Item, DecodeItem>) {
      std::int64_t& tokens = stored_before[{items[i].session, items[i].layer}];
      if (message.has_position()) message.set_position(message.position() + tokens);
      tokens += items[i].inputs.key.shape[0];
    }
  }
  return results_of(client->run<Response>(request, tensors), items.size(),
                    [&](int i, const auto& response) {
                      const Item& item = items[static_cast<std::size_t>(i)];
                      Client::Impl::impl_of(*item.session)->take(response, i, item);
                    });
}

}  // namespace

/// In a fork it is left: its thread, and those of gRPC, are not there to end.
Client::Client(const ClientOptions& options)
    : impl_(new Impl(options), [](Impl* impl) {
        if (!impl->connection.is_forked()) delete impl;
      }) {}
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
  const auto response = impl_->connection.call<v1::CreateSessionResponse>(request);
  return RemoteSession(std::make_unique<RemoteSession::Impl>(impl_, response.session()));
}

std::vector<std::string> Client::list_sessions() {
  std::vector<std::string> names;
  v1::ListSessionsRequest request;
  request.set_page_size(kNamesPerReply);
  do {
    const auto response = impl_->connection.call<v1::ListSessionsResponse>(request);
    names.insert(names.end(), response.names().begin(), response.names().end());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  return names;
}

RemoteSessionInfo Client::session_info(const std::string& name) {
  v1::GetSessionRequest request;
  request.set_name(name);
  const auto response = impl_->connection.call<v1::GetSessionResponse>(request);
  const v1::Session& session = response.session();
  const v1::SessionMemory& memory = session.memory();
  return {.name = session.name(),
          .layer_lengths = {session.layer_lengths().begin(), session.layer_lengths().end()},
          .capacity_tokens = session.capacity_tokens(),
          .kv_bytes = session.kv_bytes(),
          .memory = {.tokens = session.capacity_tokens(),
                     .pages = static_cast<std::size_t>(memory.page_bytes()),
                     .sketches = static_cast<std::size_t>(memory.sketch_bytes()),
                     .tables = static_cast<std::size_t>(memory.table_bytes()),
                     .row_cache = static_cast<std::size_t>(memory.row_cache_bytes())},
          .lease = services::milliseconds_of(session.lease_ttl())};
}

void Client::release(const std::string& name) {
  v1::ReleaseSessionRequest request;
  request.set_name(name);
  request.set_request_id(services::make_request_id());
  static_cast<void>(impl_->connection.call<v1::ReleaseSessionResponse>(request));
}

std::vector<ItemResult> Client::batch_select(std::span<const SelectItem> items) {
  return call_batch<v1::BatchSelectRequest, v1::BatchSelectResponse>(impl_, items);
}
std::vector<ItemResult> Client::batch_attend(std::span<const AttendItem> items) {
  return call_batch<v1::BatchAttendRequest, v1::BatchAttendResponse>(impl_, items);
}
std::vector<ItemResult> Client::batch_decode(std::span<const DecodeItem> items) {
  return call_batch<v1::BatchDecodeRequest, v1::BatchDecodeResponse>(impl_, items);
}
std::vector<ItemResult> Client::batch_fetch(std::span<const FetchItem> items) {
  return call_batch<v1::BatchFetchRequest, v1::BatchFetchResponse>(impl_, items);
}

}  // namespace kvtier
