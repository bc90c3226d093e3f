#include "kvtier/client.h"

#include "services/client/client_impl.h"

namespace kvtier {

namespace {

constexpr int kNamesPerReply = 1000;

}  // namespace

std::vector<std::string> Client::list_sessions() {
  std::vector<std::string> names;
  v1::ListSessionsRequest request;
  request.set_page_size(kNamesPerReply);
  do {
    v1::ListSessionsResponse response;
    impl_->connection.call([&](grpc::ClientContext& context) {
      return impl_->connection.sessions().ListSessions(&context, request, &response);
    });
    names.insert(names.end(), response.names().begin(), response.names().end());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  return names;
}

RemoteSessionInfo Client::session_info(const std::string& name) {
  v1::GetSessionRequest request;
  request.set_name(name);
  v1::GetSessionResponse response;
  impl_->connection.call([&](grpc::ClientContext& context) {
    return impl_->connection.sessions().GetSession(&context, request, &response);
  });
  const v1::Session& session = response.session();
  return {.name = session.name(),
          .layer_lengths = {session.layer_lengths().begin(), session.layer_lengths().end()},
          .capacity_tokens = session.capacity_tokens(),
          .kv_bytes = session.kv_bytes(),
          .lease = services::milliseconds_of(session.lease_ttl())};
}

void Client::release(const std::string& name) {
  v1::ReleaseSessionRequest request;
  request.set_name(name);
  request.set_request_id(services::make_request_id());
  impl_->connection.call([&](grpc::ClientContext& context) {
    v1::ReleaseSessionResponse response;
    return impl_->connection.sessions().ReleaseSession(&context, request, &response);
  });
}

}  // namespace kvtier
