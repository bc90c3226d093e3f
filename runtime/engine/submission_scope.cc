#include "runtime/engine/engine_state.h"

#include <exception>

namespace kvtier::runtime {

EngineState::SubmissionScope::SubmissionScope(EngineState& engine, StreamRef stream)
    : engine_(engine), lock_(engine.mutex), synchronous_(!stream.given()) {
  engine_.check_alive();
  engine_.staging->discard();
  stream_ = stream.given() ? engine_.adopted(stream) : engine_.main.get();
  capturing_ = stream_->capturing();
  take_workspace();
}

EngineState::SubmissionScope::~SubmissionScope() {
  engine_.scope_ = nullptr;
  mark_last_use();
}

void EngineState::SubmissionScope::take_workspace() {
  engine_.scope_ = this;
  ++engine_.num_submissions_;
  if (!capturing_ && engine_.workspace_last_stream_ != stream_) {
    stream_->wait(engine_.workspace_last_use_);
  }
}

void EngineState::SubmissionScope::mark_last_use() {
  if (capturing_) return;
  try {
    engine_.workspace_last_use_ = stream_->record();
    engine_.workspace_last_stream_ = stream_;
  } catch (const std::exception& error) {
    engine_.failure_ = error.what();
  }
}

void EngineState::SubmissionScope::finish() {
  if (synchronous_) engine_.wait(*stream_);
}

void EngineState::SubmissionScope::continue_on_engine_stream() {
  mark_last_use();
  stream_ = engine_.main.get();
  take_workspace();
}

void EngineState::SubmissionScope::run_unlocked(const std::function<void()>& work) {
  engine_.wait(*stream_);
  mark_last_use();
  engine_.scope_ = nullptr;
  const std::uint64_t submissions = engine_.num_submissions_;
  std::exception_ptr failure;
  const auto& on_tier_wait = engine_.config.on_tier_wait;
  lock_.unlock();
  if (on_tier_wait) on_tier_wait(true);
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  lock_.lock();
  if (on_tier_wait) on_tier_wait(false);
  if (engine_.num_submissions_ != submissions) {
    workspace_lost_ = true;
    engine_.staging->discard();
  }
  take_workspace();
  if (failure) std::rethrow_exception(failure);
  engine_.check_alive();
}

}  // namespace kvtier::runtime
