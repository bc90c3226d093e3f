#pragma once

#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/page.pb.h"
#include "kvtier/v1/session.pb.h"

#include "services/wire/frame.h"

#include <google/protobuf/descriptor.h>

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

/// The calls of kvtier.v1 by the types of their requests. A new call is an rpc in proto/, an entry
/// in a list of `Rpc`s below, and what executes it in services/core; its name follows from its
/// request's.
namespace kvtier::services {

/// A call with one request and one response.
template <typename RequestT, typename ResponseT>
struct Rpc {
  using Request = RequestT;
  using Response = ResponseT;
};

/// Returns "/kvtier.v1.SessionService/GetSession" for a GetSessionRequest: each service has a file
/// of its own, and each request the name of its method.
[[nodiscard]] inline std::string rpc_path(const google::protobuf::Descriptor& request) {
  const std::string& name = request.name();
  return "/" + request.file()->service(0)->full_name() + "/" +
         name.substr(0, name.size() - std::string_view("Request").size());
}
template <typename Request>
[[nodiscard]] const std::string& rpc_path() {
  static const std::string path = rpc_path(*Request::descriptor());
  return path;
}
/// Returns "SessionService/GetSession" for a GetSessionRequest.
template <typename Request>
[[nodiscard]] std::string_view rpc_name() {
  return std::string_view(rpc_path<Request>()).substr(std::string_view("/kvtier.v1.").size());
}

// The calls with one request and one response, which the core executes: a list for each service.
using SessionRpcs = std::tuple<Rpc<v1::CreateSessionRequest, v1::CreateSessionResponse>,
                               Rpc<v1::GetSessionRequest, v1::GetSessionResponse>,
                               Rpc<v1::TruncateSessionRequest, v1::TruncateSessionResponse>,
                               Rpc<v1::ForkSessionRequest, v1::ForkSessionResponse>,
                               Rpc<v1::PublishPrefixRequest, v1::PublishPrefixResponse>,
                               Rpc<v1::ReleaseSessionRequest, v1::ReleaseSessionResponse>>;
using AttentionRpcs = std::tuple<Rpc<v1::SelectRequest, v1::SelectResponse>,
                                 Rpc<v1::BatchSelectRequest, v1::BatchSelectResponse>,
                                 Rpc<v1::AttendRequest, v1::AttendResponse>,
                                 Rpc<v1::BatchAttendRequest, v1::BatchAttendResponse>,
                                 Rpc<v1::BatchDecodeRequest, v1::BatchDecodeResponse>,
                                 Rpc<v1::FetchRequest, v1::FetchResponse>,
                                 Rpc<v1::BatchFetchRequest, v1::BatchFetchResponse>>;
using PageRpcs = std::tuple<Rpc<v1::OpenLeaseRequest, v1::OpenLeaseResponse>,
                            Rpc<v1::CloseLeaseRequest, v1::CloseLeaseResponse>,
                            Rpc<v1::LookupPrefixRequest, v1::LookupPrefixResponse>,
                            Rpc<v1::BatchLookupPagesRequest, v1::BatchLookupPagesResponse>,
                            Rpc<v1::BatchReservePagesRequest, v1::BatchReservePagesResponse>,
                            Rpc<v1::BatchCommitPagesRequest, v1::BatchCommitPagesResponse>,
                            Rpc<v1::BatchAbortPagesRequest, v1::BatchAbortPagesResponse>,
                            Rpc<v1::BatchDeletePagesRequest, v1::BatchDeletePagesResponse>,
                            Rpc<v1::BatchPinPagesRequest, v1::BatchPinPagesResponse>,
                            Rpc<v1::BatchUnpinPagesRequest, v1::BatchUnpinPagesResponse>>;

/// The calls that a frame of the data plane may carry, in the order of `Method`.
using PlaneRpcs = std::tuple<
    Rpc<v1::AppendRequest, v1::AppendResponse>, Rpc<v1::SelectRequest, v1::SelectResponse>,
    Rpc<v1::AttendRequest, v1::AttendResponse>, Rpc<v1::DecodeRequest, v1::DecodeResponse>,
    Rpc<v1::BatchDecodeRequest, v1::BatchDecodeResponse>,
    Rpc<v1::BatchAttendRequest, v1::BatchAttendResponse>, Rpc<v1::FetchRequest, v1::FetchResponse>,
    Rpc<v1::BatchSelectRequest, v1::BatchSelectResponse>,
    Rpc<v1::BatchFetchRequest, v1::BatchFetchResponse>,
    Rpc<v1::BatchLookupPagesRequest, v1::BatchLookupPagesResponse>>;

/// Calls `visit(Rpc())` for each call of a list.
template <typename Rpcs, typename Visit>
constexpr void each_rpc(Visit visit) {
  std::apply([&visit](auto... rpc) { (visit(rpc), ...); }, Rpcs());
}
/// Calls `visit(Rpc(), method)` for each call of the data plane.
template <typename Visit>
constexpr void each_plane_rpc(Visit visit) {
  std::uint16_t method = 0;
  each_rpc<PlaneRpcs>([&](auto rpc) { visit(rpc, static_cast<Method>(++method)); });
}

/// Returns the method of a request in `PlaneRpcs`.
template <typename Request>
[[nodiscard]] constexpr Method method_of() {
  Method found{};
  each_plane_rpc([&found](auto rpc, Method method) {
    if (std::is_same_v<typename decltype(rpc)::Request, Request>) found = method;
  });
  return found;
}

}  // namespace kvtier::services
