#include "services/server/grpc_call.h"

#include <chrono>

namespace kvtier::services {
namespace {

constexpr std::string_view kBearer = "Bearer ";

Credentials credentials_of(const grpc::CallbackServerContext& context) {
  Credentials credentials;
  const auto [first, last] = context.client_metadata().equal_range("authorization");
  for (auto it = first; it != last; ++it) {
    const std::string_view value(it->second.data(), it->second.size());
    if (value.starts_with(kBearer)) credentials.bearer_token = value.substr(kBearer.size());
  }
  const auto auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    for (const grpc::string_ref& name : auth->GetPeerIdentity()) {
      credentials.certificate_names.emplace_back(name.data(), name.size());
    }
  }
  return credentials;
}

/// gRPC's deadlines are of the system clock, which may jump: only the time that is left counts.
TimePoint deadline_of(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return TimePoint::max();
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<TimePoint::duration>(
                                                deadline - std::chrono::system_clock::now());
}

}  // namespace

Call make_call(const Core& core, const grpc::CallbackServerContext& context) {
  return {.tenant = &core.tenants().authenticate(credentials_of(context)),
          .deadline = deadline_of(context),
          .cancelled = [&context] { return context.IsCancelled(); }};
}

grpc::Status to_status(const ServiceError& error) {
  return {static_cast<grpc::StatusCode>(error.code()), sanitized_message(error),
          error_details(error)};
}

}  // namespace kvtier::services
