#include "runtime/engine_state.h"

#include <exception>

namespace kvtier::runtime {

EngineState::Turn::Turn(EngineState& engine, StreamRef stream)
    : engine_(engine), lock_(engine.mutex), synchronous_(!stream.given()) {
  engine_.check_alive();
  engine_.staging->discard();
  stream_ = stream.given() ? engine_.adopted(stream) : engine_.main.get();
  capturing_ = stream_->capturing();
  take_workspace();
}

EngineState::Turn::~Turn() {
  engine_.turn_ = nullptr;
  mark_last_use();
}

void EngineState::Turn::take_workspace() {
  engine_.turn_ = this;
  ++engine_.num_turns_;
  if (!capturing_ && engine_.workspace_last_stream_ != stream_) {
    stream_->wait(engine_.workspace_last_use_);
  }
}

void EngineState::Turn::mark_last_use() {
  if (capturing_) return;
  try {
    engine_.workspace_last_use_ = stream_->record();
    engine_.workspace_last_stream_ = stream_;
  } catch (const std::exception& error) {
    engine_.failure_ = error.what();
  }
}

void EngineState::Turn::finish() {
  if (synchronous_) engine_.wait(*stream_);
}

void EngineState::Turn::go_behind() {
  mark_last_use();
  stream_ = engine_.main.get();
  take_workspace();
}

void EngineState::Turn::step_aside(const std::function<void()>& work) {
  engine_.wait(*stream_);
  mark_last_use();
  engine_.turn_ = nullptr;
  const std::uint64_t turns = engine_.num_turns_;
  std::exception_ptr failure;
  const auto& step_aside = engine_.config.step_aside;
  lock_.unlock();
  if (step_aside) step_aside(true);
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  lock_.lock();
  if (step_aside) step_aside(false);
  if (engine_.num_turns_ != turns) {
    displaced_ = true;
    engine_.staging->discard();
  }
  take_workspace();
  if (failure) std::rethrow_exception(failure);
  engine_.check_alive();
}

}  // namespace kvtier::runtime
