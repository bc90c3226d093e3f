#pragma once

#include "kvtier/engine.h"

#include "arguments.h"
#include "config.h"
#include "process.h"

#include <atomic>
#include <cstdint>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>
#include <optional>
#include <utility>
#include <vector>

namespace kvtier_engine {

namespace nb = nanobind;

using Stream = std::optional<std::uintptr_t>;

/// A session of Python: may be closed, and refuses a second call while one is under way, and calls
/// in a fork of the process. Calls hold no GIL while the library works.
class Session {
 public:
  Session(kvtier::Session session, const Place& place)
      : session_(std::move(session)), place_(place) {}
  ~Session();
  Session(const Session&) = delete;  // one owner of the library's session
  Session& operator=(const Session&) = delete;

  /// Holds the session for one call. Throws `kFailedPrecondition` for a closed session, one that
  /// another thread is using, and in a fork of the process.
  class Use {
   public:
    explicit Use(Session& session);
    ~Use();
    Use(Use&& other) noexcept : session_(std::exchange(other.session_, nullptr)) {}
    Use& operator=(Use&&) = delete;
    kvtier::Session* operator->() const noexcept { return &*session_->session_; }
    kvtier::Session* get() const noexcept { return &*session_->session_; }

   private:
    Session* session_;
  };

  void append(int layer, nb::handle keys, nb::handle values, Stream stream);
  void reserve(std::int64_t tokens, Stream stream);
  void select(int layer, nb::handle query, nb::handle ids, nb::handle scores, nb::handle bias,
              Stream stream, const Options& options);
  void attend(int layer, nb::handle query, nb::handle selected, nb::handle bias, nb::handle out,
              nb::handle lse, nb::handle ids, nb::handle missed, Stream stream,
              const Options& options);
  void decode(int layer, nb::handle query, nb::handle key, nb::handle value, nb::handle selected,
              nb::handle bias, nb::handle out, nb::handle lse, nb::handle ids, nb::handle missed,
              Stream stream, const Options& options);
  void prefetch(int layer, nb::handle query, Stream stream, const Options& options);
  void fetch(int layer, nb::handle tokens, nb::handle keys, nb::handle values);
  std::int64_t length(std::optional<int> layer);
  void truncate(std::int64_t tokens, Stream stream, std::optional<int> layer);
  std::vector<Session*> fork(int count, Stream stream);
  void publish(const std::vector<std::int32_t>& token_ids, Stream stream);
  void advance(int layer, std::int64_t tokens);
  void close();

  [[nodiscard]] kvtier::Backend backend() const noexcept { return place_.backend; }

 private:
  /// Ends the session; in a fork of the process leaves it as it is.
  void end();

  Process process_;
  std::optional<kvtier::Session> session_;
  Place place_;
  std::atomic<bool> used_ = false;
};

}  // namespace kvtier_engine
