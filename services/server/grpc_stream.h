#pragma once

#include "services/base/minimum_rate.h"
#include "services/server/checked_message.h"
#include "services/server/grpc_call.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_set>

namespace kvtier::services {

/// Where a stream stands. gRPC forbids to start anything after Finish, and to finish while a write
/// is outstanding; the mutex orders the stream's own reactions against those who end it from
/// outside.
struct StreamState {
  enum class Phase : std::uint8_t { kReading, kWorking, kWriting, kFinished };

  std::mutex mutex;  ///< Guards all below.
  Phase phase = Phase::kReading;
  TimePoint active{};    ///< When something last moved.
  bool is_bulk = false;  ///< Carries pages: held against a rate.
  RateWindow rate;
  std::optional<grpc::Status> end_status;           ///< How to end, decided from outside.
  std::function<void(const grpc::Status&)> finish;  ///< Valid until finished.
  std::function<void()> cancel;                     ///< As `finish`.
};

/// The streams there are, so that idle and slow ones, or all of them, can be ended. Thread-safe.
class StreamRegistry {
 public:
  explicit StreamRegistry(std::function<TimePoint()> now) : now_(std::move(now)) {}

  [[nodiscard]] TimePoint now() const { return now_(); }
  void add(const std::shared_ptr<StreamState>& state);
  void remove(const std::shared_ptr<StreamState>& state);
  /// Ends streams that wait for their client, to send or to read, since before `since`.
  void end_idle(TimePoint since);
  /// Ends calls and streams that wait for their client to read a reply since before `since`; those
  /// of bulk bytes have a rate instead.
  void end_unread(TimePoint since);
  /// Ends streams of bulk bytes whose client falls short of `rate`.
  void end_slow(TimePoint now, const MinimumRate& rate);
  /// Streams that the two have ended.
  [[nodiscard]] std::uint64_t num_ended_idle() const noexcept { return ended_idle_; }
  /// Ends all streams: those at work when the work is done and answered. Those added later end at
  /// once.
  void end_all(const grpc::Status& status);

 private:
  [[nodiscard]] std::vector<std::shared_ptr<StreamState>> all();
  /// Ends those that `applies` to, and counts them.
  template <typename Applies>
  void end_where(const ServiceError& why, Applies applies);

  const std::function<TimePoint()> now_;
  std::atomic<std::uint64_t> ended_idle_{0};
  std::mutex mutex_;  ///< Guards both below.
  std::unordered_set<std::shared_ptr<StreamState>> states_;
  std::optional<grpc::Status> ended_;
};

/// A reactor that can be ended from outside. `Reactor` is gRPC's. Deletes itself when the call is
/// over.
template <typename Reactor>
class RegisteredStream : public Reactor {
 public:
  RegisteredStream(StreamRegistry& registry, grpc::CallbackServerContext& context)
      : registry_(registry), state_(std::make_shared<StreamState>()) {
    state_->active = registry.now();
    state_->finish = [this](const grpc::Status& status) { this->Finish(status); };
    state_->cancel = [&context] { context.TryCancel(); };
  }

  void OnDone() override {
    {
      const std::lock_guard lock(state_->mutex);
      state_->phase = Phase::kFinished;  // its context is not to be used any more
    }
    registry_.remove(state_);
    delete this;
  }

 protected:
  using Phase = StreamState::Phase;

  /// From now on the stream can be ended from outside.
  void enlist() { registry_.add(state_); }

  /// Moves on with `action`, unless the stream has finished or is to end. Returns whether it did.
  template <typename Action>
  bool enter(Phase phase, Action action) {
    const std::shared_ptr<StreamState> state = state_;  // outlives this object
    const std::lock_guard lock(state->mutex);
    if (state->phase == Phase::kFinished) return false;
    if (state->end_status) {
      finish_locked(*state, *state->end_status);
      return false;
    }
    state->phase = phase;
    state->active = registry_.now();
    if (phase == Phase::kWorking) {
      state->rate.go_on(state->active);
    } else {
      state->rate.wait(state->active);
    }
    action();
    return true;
  }

  /// From now on it is not the client that the stream waits for.
  void work_on() {
    const std::lock_guard lock(state_->mutex);
    if (state_->phase == Phase::kFinished) return;
    state_->phase = Phase::kWorking;
    state_->active = registry_.now();
    state_->rate.go_on(state_->active);
  }

  /// Holds the stream against the minimum rate. Called before `enlist`.
  void hold_to_rate() { state_->is_bulk = true; }
  void moved(std::size_t bytes) {
    const std::lock_guard lock(state_->mutex);
    state_->rate.moved(static_cast<std::int64_t>(bytes));
  }

  void finish(const grpc::Status& status) {
    const std::shared_ptr<StreamState> state = state_;  // outlives this object
    const std::lock_guard lock(state->mutex);
    if (state->phase == Phase::kFinished) return;
    finish_locked(*state, state->end_status.value_or(status));
  }
  /// As `finish`, of what was not enlisted: the client is still to read its only reply.
  void finish_unread(const grpc::Status& status) {
    state_->phase = Phase::kWriting;
    state_->active = registry_.now();
    enlist();
    this->Finish(status);
  }
  /// Of a stream whose work is all done: its client has the outcome, even if it was to end.
  void finish_anyhow(const grpc::Status& status) {
    const std::shared_ptr<StreamState> state = state_;  // outlives this object
    const std::lock_guard lock(state->mutex);
    if (state->phase != Phase::kFinished) finish_locked(*state, status);
  }

 private:
  static void finish_locked(StreamState& state, const grpc::Status& status) {
    state.phase = Phase::kFinished;
    state.finish(status);
  }

  StreamRegistry& registry_;
  std::shared_ptr<StreamState> state_;
};

/// A unary call. Its reservation lasts until gRPC has written the reply, or given it up.
class UnaryCall final : public RegisteredStream<grpc::ServerUnaryReactor> {
 public:
  using RegisteredStream::RegisteredStream;

  void hold(std::shared_ptr<InflightReservation> reservation) noexcept {
    reservation_ = std::move(reservation);
  }
  /// Answers with a reply of so many bytes.
  void answer(const grpc::Status& status, std::size_t bytes) {
    // The message itself, and what gRPC makes of it.
    if (reservation_) reservation_->cover(2 * static_cast<std::int64_t>(bytes));
    finish_unread(status);
  }

 private:
  std::shared_ptr<InflightReservation> reservation_;
};

/// What the streams that read share: one request at a time is read, worked on and answered.
/// `Reactor` reads `Request`: bytes, or a `CheckedMessage`.
template <typename Reactor, typename Request>
class Stream : public RegisteredStream<Reactor> {
 public:
  using RegisteredStream<Reactor>::RegisteredStream;

  void OnReadDone(bool ok) override {
    if (!ok) return at_end();
    if constexpr (kIsBulk) {
      this->moved(request_.Length());
    } else if (!request_.is_valid) {
      return this->finish(to_status(invalid_message()));
    }
    if (this->enter(StreamState::Phase::kWorking, [] {})) {
      work([this](const ServiceError* error) { worked(error); });
    }
  }

 protected:
  using Phase = StreamState::Phase;
  static constexpr bool kIsBulk = std::is_same_v<Request, grpc::ByteBuffer>;

  /// Called by the constructor of the last class.
  void start() {
    if constexpr (kIsBulk) this->hold_to_rate();
    this->StartSendInitialMetadata();  // shows the client that its call has arrived
    this->enter(Phase::kReading, [this] { this->StartRead(&request_); });
    this->enlist();
  }
  /// Executes `request_`, then calls `Done`.
  virtual void work(Done done) = 0;
  /// Called when a request has succeeded: reads the next, or writes first.
  virtual void go_on() = 0;
  /// Ends a call whose client has sent all.
  virtual void at_end() { this->finish(grpc::Status::OK); }

  void read_next() {
    this->enter(Phase::kReading, [this] {
      request_.Clear();
      this->StartRead(&request_);
    });
  }

  Request request_;

 private:
  void worked(const ServiceError* error) {
    if (error != nullptr) {
      this->finish(to_status(*error));
    } else {
      go_on();
    }
  }
};

/// A stream of requests and replies that strictly alternate. `reservation`, which `work` is to
/// charge, is held until the reply is written.
template <typename Request, typename Response>
class AlternatingStream final : public Stream<grpc::ServerBidiReactor<Request, Response>, Request> {
 public:
  /// Executes a request. Its arguments live until `Done` is called.
  using Work = std::function<void(const Request&, Response&, Done)>;

  AlternatingStream(StreamRegistry& registry, grpc::CallbackServerContext& context,
                    std::shared_ptr<InflightReservation> reservation, Work work)
      : Stream<grpc::ServerBidiReactor<Request, Response>, Request>(registry, context),
        reservation_(std::move(reservation)),
        work_(std::move(work)) {
    this->start();
  }

  void OnWriteDone(bool ok) override {
    reservation_->give(reservation_->bytes());
    if (ok) {
      this->read_next();
    } else {
      this->finish(grpc::Status::CANCELLED);
    }
  }

 private:
  void work(Done done) override {
    response_.Clear();
    work_(this->request_, response_, std::move(done));
  }
  void go_on() override {
    reservation_->cover(2 * static_cast<std::int64_t>(response_.ByteSizeLong()));
    this->enter(StreamState::Phase::kWriting, [this] { this->StartWrite(&response_); });
  }

  const std::shared_ptr<InflightReservation> reservation_;
  Work work_;
  Response response_;
};

/// A stream of requests with one reply at its end.
template <typename Request>
class CollectingStream final : public Stream<grpc::ServerReadReactor<Request>, Request> {
 public:
  using Work = std::function<void(const Request&, Done)>;
  /// Fills the reply when the client has sent all, then calls `Done`, on any thread.
  using End = std::function<void(Done)>;

  CollectingStream(StreamRegistry& registry, grpc::CallbackServerContext& context, Work work,
                   End end = nullptr)
      : Stream<grpc::ServerReadReactor<Request>, Request>(registry, context),
        work_(std::move(work)),
        end_(std::move(end)) {
    this->start();
  }

 private:
  void work(Done done) override { work_(this->request_, std::move(done)); }
  void go_on() override { this->read_next(); }
  void at_end() override {
    if (!end_) return this->finish(grpc::Status::OK);
    if (!this->enter(StreamState::Phase::kWorking, [] {})) return;
    const auto finish = [this](const ServiceError* error) {
      this->finish_anyhow(error != nullptr ? to_status(*error) : grpc::Status::OK);
    };
    if (const auto failure = failure_of([&] { end_(finish); })) finish(&*failure);
  }

  Work work_;
  End end_;
};

/// A stream of replies to one request. The next is made while one is written: by the thread that
/// has begun the write, and by then has done most of it.
template <typename Response>
class ProducingStream final : public RegisteredStream<grpc::ServerWriteReactor<Response>> {
 public:
  /// Fills the next reply; returns false when there is none. May throw `ServiceError`.
  using Produce = std::function<bool(Response&)>;

  ProducingStream(StreamRegistry& registry, grpc::CallbackServerContext& context, Produce produce)
      : RegisteredStream<grpc::ServerWriteReactor<Response>>(registry, context),
        produce_(std::move(produce)) {
    if constexpr (kIsBulk) this->hold_to_rate();
    this->enlist();
    make(responses_[0]);
    write_on();
  }

  void OnWriteDone(bool ok) override {
    written_ = ok;
    if constexpr (kIsBulk) {
      if (ok) this->moved(responses_[current_].Length());
    }
    this->work_on();
    if (is_last()) go_on();
  }

 private:
  static constexpr bool kIsBulk = std::is_same_v<Response, grpc::ByteBuffer>;

  /// Called once when a reply is written and once when the next is made; the second of them
  /// goes on, and the first must not touch the stream any more, because it may be over.
  bool is_last() { return left_.fetch_sub(1) == 1; }

  void make(Response& response) {
    response.Clear();
    try {
      if (!produce_(response)) end_ = grpc::Status::OK;
    } catch (...) {
      end_ = to_status(to_service_error(std::current_exception()));
    }
  }
  void go_on() {
    if (!written_) {
      this->finish(grpc::Status::CANCELLED);
      return;
    }
    current_ = 1 - current_;
    write_on();
  }
  /// Writes what is made, and makes the next, until the write takes longer.
  void write_on() {
    for (;; current_ = 1 - current_) {
      if (end_) {
        produce_ = nullptr;  // what it holds is given back before the client sees the end
        this->finish(*end_);
        return;
      }
      Response& response = responses_[current_];
      Response& next = responses_[1 - current_];
      left_ = 2;
      if (!this->enter(StreamState::Phase::kWriting,
                       [this, &response] { this->StartWrite(&response); })) {
        return;
      }
      make(next);
      if (!is_last()) return;
      if (!written_) {
        this->finish(grpc::Status::CANCELLED);
        return;
      }
    }
  }

  Produce produce_;
  std::array<Response, 2> responses_;
  std::size_t current_ = 0;          ///< Which is being written.
  std::atomic<int> left_{0};         ///< Of the two that go on together.
  bool written_ = true;              ///< Whether the last write has succeeded.
  std::optional<grpc::Status> end_;  ///< How to end, when there are no more replies.
};

/// A call that is refused at once, in the form of `Reactor`.
template <typename Reactor>
class Refusal final : public Reactor {
 public:
  explicit Refusal(const grpc::Status& status) { this->Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace kvtier::services
