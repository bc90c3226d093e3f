#pragma once

#include <grpc/grpc.h>

namespace kvtier::services {

/// Keeps gRPC running until the process ends. It would shut down with its last object, and that can
/// take 10 s: it joins a thread that polls for so long.
inline void keep_grpc() {
  [[maybe_unused]] static const bool kept = [] {
    grpc_init();
    return true;
  }();
}

}  // namespace kvtier::services
