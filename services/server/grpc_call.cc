#include "services/server/grpc_call.h"

#include "services/wire/grpc_time.h"

#include <grpc/grpc_security_constants.h>

#include <iterator>

namespace kvtier::services {
namespace {

constexpr std::string_view kBearer = "Bearer ";

Credentials credentials_of(const grpc::CallbackServerContext& context) {
  Credentials credentials;
  const auto [first, last] = context.client_metadata().equal_range("authorization");
  if (std::distance(first, last) > 1) {
    throw ServiceError(Code::kUnauthenticated, "UNAUTHENTICATED",
                       "expected one authorization header, found several");
  }
  if (first != last) {
    const std::string_view value(first->second.data(), first->second.size());
    if (value.starts_with(kBearer)) credentials.bearer_token = value.substr(kBearer.size());
  }
  const auto auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    for (const grpc::string_ref& name : auth->GetPeerIdentity()) {
      credentials.certificate_names.emplace_back(name.data(), name.size());
    }
    for (const grpc::string_ref& pem : auth->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME)) {
      credentials.certificate.assign(pem.data(), pem.size());
    }
  }
  return credentials;
}

}  // namespace

Call make_call(const ServiceCore& core, const grpc::CallbackServerContext& context) {
  return {.tenant = &core.tenants().authenticate(credentials_of(context)),
          .deadline = steady_time(context.raw_deadline()),
          .cancelled = [&context] { return context.IsCancelled(); }};
}

grpc::Status to_status(const ServiceError& error) {
  return {static_cast<grpc::StatusCode>(error.code()), sanitized_message(error),
          error_details(error)};
}

}  // namespace kvtier::services
