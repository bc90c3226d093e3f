#pragma once

#include "runtime/paging/page_pool.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace kvtier::runtime {

class EngineState;
class SessionState;

/// A thread that brings pages back before the call that is likely to read them: those that the last
/// step of a layer needed, asked for when the layer before it has been attended to. Submits like
/// any call, and unlocks the engine while pages come.
class PagePrefetch {
 public:
  explicit PagePrefetch(EngineState& engine);
  PagePrefetch(const PagePrefetch&) = delete;  // has a thread
  PagePrefetch& operator=(const PagePrefetch&) = delete;
  /// Waits for the pages that are coming.
  ~PagePrefetch();

  /// Asks for the pages that the layer after this one has needed last, as far as they are evicted.
  /// Within a submission scope; what is asked for and not begun when many others have been since is
  /// forgotten.
  void attended(const SessionState& session, int layer);

 private:
  void work();

  EngineState& engine_;
  std::mutex mutex_;  // guards what follows; taken after the engine's, never before
  std::condition_variable changed_;
  std::deque<std::vector<PagePool::Ticket>> wanted_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kvtier::runtime
