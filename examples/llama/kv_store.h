#pragma once

#include "kvtier/engine.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace kvtier::llama {

/// What the decoder needs of a `Session`, wherever that lives.
class KvSession {
 public:
  virtual ~KvSession() = default;
  virtual void append(int layer, const TensorView& keys, const TensorView& values,
                      StreamRef stream) = 0;
  virtual void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
                      StreamRef stream, const AttendOptions& options) = 0;
  virtual void truncate(std::int64_t tokens) = 0;
  [[nodiscard]] virtual std::int64_t length(int layer) const = 0;
  [[nodiscard]] virtual std::int64_t length() const = 0;
};

/// Where sessions are opened: an engine of this process, or a server.
class KvStore {
 public:
  virtual ~KvStore() = default;
  [[nodiscard]] virtual std::unique_ptr<KvSession> open(std::int64_t capacity_tokens) = 0;
  /// Where the store is, for reports: "cpu", "cuda" or the server's address.
  [[nodiscard]] virtual std::string place() const = 0;
  /// All zero for a server, which reports them to its operators alone.
  [[nodiscard]] virtual Stats stats() const = 0;
};

/// A session of this process: held, or, by a reference, one that outlives the object.
template <typename Held>
class EmbeddedSession final : public KvSession {
 public:
  explicit EmbeddedSession(Held session) : session_(std::forward<Held>(session)) {}
  void append(int layer, const TensorView& keys, const TensorView& values,
              StreamRef stream) override {
    session_.append(layer, keys, values, stream);
  }
  void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs, StreamRef stream,
              const AttendOptions& options) override {
    session_.decode(layer, inputs, outputs, stream, options);
  }
  void truncate(std::int64_t tokens) override { session_.truncate(tokens); }
  [[nodiscard]] std::int64_t length(int layer) const override { return session_.length(layer); }
  [[nodiscard]] std::int64_t length() const override { return session_.length(); }

 private:
  Held session_;
};
EmbeddedSession(Session&)->EmbeddedSession<Session&>;

/// Returns a store for sessions of `config`: an engine of this process, or, unless `server` is
/// empty, the server of that address ("unix:PATH"). Throws what `Engine` throws; `kUnimplemented`
/// for a server where the program's module kvtier_llama_remote.so is not there.
[[nodiscard]] std::unique_ptr<KvStore> make_kv_store(const Config& config,
                                                     const std::string& server);

}  // namespace kvtier::llama
