#include "services/server/grpc_stream.h"

namespace kvtier::services {
namespace {

enum class Writes : bool { kLetFinish, kCancel };

void end(StreamState& state, const grpc::Status& status, Writes writes) {
  if (state.end_status || state.phase == StreamState::Phase::kFinished) return;
  state.end_status = status;
  if (state.phase == StreamState::Phase::kReading) {
    state.phase = StreamState::Phase::kFinished;
    state.finish(status);
  } else if (state.phase == StreamState::Phase::kWriting && writes == Writes::kCancel) {
    state.cancel();  // the write then fails, and its reaction finishes
  }
}

}  // namespace

void StreamRegistry::add(const std::shared_ptr<StreamState>& state) {
  std::optional<grpc::Status> ended;
  {
    const std::lock_guard lock(mutex_);
    states_.insert(state);
    ended = ended_;
  }
  if (ended) {
    const std::lock_guard lock(state->mutex);
    end(*state, *ended, Writes::kLetFinish);
  }
}

void StreamRegistry::remove(const std::shared_ptr<StreamState>& state) {
  const std::lock_guard lock(mutex_);
  states_.erase(state);
}

std::vector<std::shared_ptr<StreamState>> StreamRegistry::all() {
  const std::lock_guard lock(mutex_);
  return {states_.begin(), states_.end()};
}

template <typename Applies>
void StreamRegistry::end_where(const ServiceError& why, Applies applies) {
  const grpc::Status status = to_status(why);
  for (const auto& state : all()) {
    const std::lock_guard lock(state->mutex);
    if (state->end_status || state->phase == StreamState::Phase::kFinished) continue;
    if (!applies(*state)) continue;
    ++ended_idle_;
    end(*state, status, Writes::kCancel);
  }
}

void StreamRegistry::end_idle(TimePoint since) {
  end_where({Code::kFailedPrecondition, "STREAM_IDLE", "nothing moved for too long"},
            [&](const StreamState& state) {
              return state.phase != StreamState::Phase::kWorking && state.active < since;
            });
}

void StreamRegistry::end_unread(TimePoint since) {
  end_where({Code::kResourceExhausted, "SLOW_CLIENT", "the client does not read its reply"},
            [&](const StreamState& state) {
              return !state.is_bulk && state.phase == StreamState::Phase::kWriting &&
                     state.active < since;
            });
}

void StreamRegistry::end_slow(TimePoint now, const MinimumRate& rate) {
  end_where({Code::kResourceExhausted, "SLOW_CLIENT", "the client sends or reads too slowly"},
            [&](StreamState& state) { return state.is_bulk && state.rate.too_slow(now, rate); });
}

void StreamRegistry::end_all(const grpc::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    ended_ = status;
  }
  for (const auto& state : all()) {
    const std::lock_guard lock(state->mutex);
    end(*state, status, Writes::kLetFinish);
  }
}

}  // namespace kvtier::services
