#pragma once

#include <grpc/grpc.h>

#include <openssl/crypto.h>

namespace kvtier::services {

/// OpenSSL frees nothing at exit: threads of gRPC, which go on until the process ends, use it. Set
/// when the program is loaded, because it must precede OpenSSL's first use.
inline const bool keeps_openssl = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr) == 1;

/// Keeps gRPC running until the process ends. It would shut down with its last object, and that can
/// take 10 s: it joins a thread that polls for so long.
inline void keep_grpc() {
  [[maybe_unused]] static const bool kept = [] {
    grpc_init();
    return true;
  }();
}

}  // namespace kvtier::services
