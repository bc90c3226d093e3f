#include "kvtier/client.h"

#include "llama/kv_store.h"
#include "llama/server_session.h"

namespace kvtier::llama {
namespace {

class ServerStore final : public KvStore {
 public:
  ServerStore(const Config& config, const std::string& server)
      : place_(server), client_(ClientOptions{.server = server}) {
    session_.model = config.model;
    session_.retrieval = config.retrieval;
    session_.extra_sketches = config.extra_sketches;
  }
  std::unique_ptr<KvSession> open(std::int64_t capacity_tokens) override {
    session_.capacity_tokens = capacity_tokens;
    return std::make_unique<ServerSession>(client_.open(session_));
  }
  [[nodiscard]] std::string place() const override { return place_; }
  [[nodiscard]] Stats stats() const override { return {}; }

 private:
  std::string place_;
  Client client_;
  RemoteSessionConfig session_;
};

}  // namespace
}  // namespace kvtier::llama

/// What `make_kv_store` calls for a server. The caller owns the result.
extern "C" __attribute__((visibility("default"))) kvtier::llama::KvStore*
kvtier_llama_make_remote_store(const kvtier::Config& config, const std::string& server) {
  return new kvtier::llama::ServerStore(config, server);
}
