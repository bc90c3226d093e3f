#include "kvtier/client.h"

#include "llama/kv_store.h"

namespace kvtier::llama {
namespace {

class ServerSession final : public KvSession {
 public:
  explicit ServerSession(RemoteSession session) : session_(std::move(session)) {}
  void append(int layer, const TensorView& keys, const TensorView& values,
              StreamRef /*stream*/) override {
    session_.append(layer, keys, values);
  }
  void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
              StreamRef /*stream*/, const AttendOptions& options) override {
    session_.decode(layer, inputs, outputs, options);
  }
  void truncate(std::int64_t tokens) override { session_.truncate(tokens); }
  [[nodiscard]] std::int64_t length(int layer) const override { return session_.length(layer); }
  [[nodiscard]] std::int64_t length() const override { return session_.length(); }

 private:
  RemoteSession session_;
};

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
