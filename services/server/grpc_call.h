#pragma once

#include "services/core/service_core.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

namespace kvtier::services {

/// Returns who calls and until when. Throws UNAUTHENTICATED. The context must outlive the call.
[[nodiscard]] Call make_call(const ServiceCore& core, const grpc::CallbackServerContext& context);

/// Returns the status with its details.
[[nodiscard]] grpc::Status to_status(const ServiceError& error);

}  // namespace kvtier::services
