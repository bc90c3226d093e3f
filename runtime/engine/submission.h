#pragma once

#include "kvtier/config.h"

#include "runtime/engine/workspace.h"
#include "transfer/device/device.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace kvtier::runtime {

class SubmissionScope;

/// The right of calls to enqueue on the engine's device, one call at a time: the engine's mutex,
/// its streams, and what has failed it.
class Submission {
 public:
  Submission(transfer::Device& device, Workspace& workspace, const Config& config);
  Submission(const Submission&) = delete;  // scopes point to it
  Submission& operator=(const Submission&) = delete;

  /// Guards what sessions share. Held by a `SubmissionScope`.
  [[nodiscard]] std::mutex& mutex() noexcept { return mutex_; }
  /// The engine's stream, for calls without one.
  [[nodiscard]] transfer::Stream& main() noexcept { return *main_; }
  /// The scope in progress.
  [[nodiscard]] SubmissionScope& scope() noexcept { return *scope_; }
  /// Makes the host wait for everything enqueued on `stream`, which within a scope is ordered after
  /// all earlier ones. A fault of the device fails the engine.
  void wait(transfer::Stream& stream);

 private:
  friend class SubmissionScope;
  /// Throws what failed the engine, if anything did.
  void check_alive() const;
  transfer::Stream* adopted(StreamRef stream);

  transfer::Device& device_;
  Workspace& workspace_;
  const Config& config_;
  std::mutex mutex_;
  std::unique_ptr<transfer::Stream> main_;
  std::unordered_map<void*, std::unique_ptr<transfer::Stream>> adopted_;
  SubmissionScope* scope_ = nullptr;
  std::uint64_t num_scopes_ = 0;  ///< One that locks again counts anew.
  std::string failure_;
};

/// The scope of one call that enqueues. Locks the engine's mutex and makes the stream wait for the
/// previous use of the workspace; its end records the new last use. `stream()` is the caller's
/// stream, or the engine's own when none was given; `finish()` then waits for the outputs. The
/// engine's GPU is current in the thread meanwhile.
///
/// A call under graph capture takes no part in that order: its replays must be ordered with other
/// calls of the engine by the caller.
class SubmissionScope {
 public:
  SubmissionScope(Submission& submission, StreamRef stream);
  SubmissionScope(const SubmissionScope&) = delete;  // one owner of the mutex
  SubmissionScope& operator=(const SubmissionScope&) = delete;
  ~SubmissionScope();

  [[nodiscard]] transfer::Stream& stream() noexcept { return *stream_; }
  /// True when the call returns with its outputs written.
  [[nodiscard]] bool synchronous() const noexcept { return synchronous_; }
  [[nodiscard]] bool capturing() const noexcept { return capturing_; }
  /// Throws `kFailedPrecondition` in a capture, in which `call` must not be.
  void refuse_capture(const char* call) const;
  /// Waits when the call is synchronous. A fault of the device fails the engine.
  void finish();
  /// Switches to the engine's own stream, ordered after the call's work; the caller's stream does
  /// not wait for what follows. Not during a capture.
  void continue_on_engine_stream();

  /// Waits for all that was enqueued, unlocks the engine, runs `work`, and locks it again. `work`
  /// must not touch what the mutex guards. Throws what `work` throws, or what has failed the engine
  /// meanwhile.
  void run_unlocked(const std::function<void()>& work);
  /// Returns true, and clears the flag, if another call used the workspace while the engine was
  /// unlocked: its contents are then lost.
  [[nodiscard]] bool workspace_lost() noexcept { return std::exchange(workspace_lost_, false); }

 private:
  void begin_use();
  void end_use();

  Submission& submission_;
  std::unique_lock<std::mutex> lock_;
  transfer::CurrentDevice current_;
  transfer::Stream* stream_ = nullptr;
  bool synchronous_ = false;
  bool capturing_ = false;
  bool workspace_lost_ = false;
};

}  // namespace kvtier::runtime
