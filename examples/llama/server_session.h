#pragma once

#include "kvtier/client.h"

#include "llama/kv_store.h"

#include <cstdint>
#include <utility>

namespace kvtier::llama {

/// A session of a server, which has its own streams.
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

}  // namespace kvtier::llama
