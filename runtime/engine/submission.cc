#include "runtime/engine/submission.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <exception>

namespace kvtier::runtime {

Submission::Submission(transfer::Device& device, Workspace& workspace, const Config& config)
    : device_(device), workspace_(workspace), config_(config), main_(device.make_stream()) {}

void Submission::wait(transfer::Stream& stream) {
  try {
    stream.synchronize();
  } catch (const std::exception& error) {
    failure_ = error.what();
    if (config_.log) config_.log(LogLevel::kError, "engine failed: " + failure_);
    throw Error(ErrorCode::kInternal, failure_);
  }
}

void Submission::check_alive() const {
  if (!failure_.empty()) throw_error(ErrorCode::kInternal, "the engine has failed: ", failure_);
}

transfer::Stream* Submission::adopted(StreamRef stream) {
  std::unique_ptr<transfer::Stream>& slot = adopted_[stream.handle()];
  if (!slot) slot = device_.adopt(stream);
  return slot.get();
}

SubmissionScope::SubmissionScope(Submission& submission, StreamRef stream)
    : submission_(submission),
      lock_(submission.mutex_),
      current_(submission.device_),
      synchronous_(!stream.given()) {
  submission_.check_alive();
  submission_.workspace_.staging.discard();
  stream_ = stream.given() ? submission_.adopted(stream) : submission_.main_.get();
  capturing_ = stream_->capturing();
  begin_use();
}

SubmissionScope::~SubmissionScope() {
  submission_.scope_ = nullptr;
  end_use();
}

void SubmissionScope::begin_use() {
  submission_.scope_ = this;
  ++submission_.num_scopes_;
  if (!capturing_) submission_.workspace_.begin_use(*stream_);
}

void SubmissionScope::end_use() {
  if (capturing_) return;
  try {
    submission_.workspace_.end_use(*stream_);
  } catch (const std::exception& error) {
    submission_.failure_ = error.what();
  }
}

void SubmissionScope::refuse_capture(const char* call) const {
  if (!capturing_) return;
  throw_error(ErrorCode::kFailedPrecondition, call,
              ": expected a stream that is not being captured, found a capture");
}

void SubmissionScope::finish() {
  if (synchronous_) submission_.wait(*stream_);
}

void SubmissionScope::continue_on_engine_stream() {
  end_use();
  stream_ = submission_.main_.get();
  begin_use();
}

void SubmissionScope::run_unlocked(const std::function<void()>& work) {
  submission_.wait(*stream_);
  end_use();
  submission_.scope_ = nullptr;
  const std::uint64_t scopes = submission_.num_scopes_;
  std::exception_ptr failure;
  const auto& on_tier_wait = submission_.config_.on_tier_wait;
  lock_.unlock();
  if (on_tier_wait) on_tier_wait(true);
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  lock_.lock();
  if (on_tier_wait) on_tier_wait(false);
  if (submission_.num_scopes_ != scopes) {
    workspace_lost_ = true;
    submission_.workspace_.staging.discard();
  }
  begin_use();
  if (failure) std::rethrow_exception(failure);
  submission_.check_alive();
}

}  // namespace kvtier::runtime
