#pragma once

#include <cstddef>
#include <pthread.h>

namespace kvtier::testing {

/// While it lives, no thread can be made that does not choose the size of its stack: the default is
/// more than there are addresses.
class NoNewThreads {
 public:
  NoNewThreads() {
    pthread_getattr_default_np(&old_);
    pthread_attr_t attributes = old_;
    pthread_attr_setstacksize(&attributes, std::size_t{1} << 60U);
    pthread_setattr_default_np(&attributes);
  }
  NoNewThreads(const NoNewThreads&) = delete;  // restores once
  NoNewThreads& operator=(const NoNewThreads&) = delete;
  ~NoNewThreads() { pthread_setattr_default_np(&old_); }

 private:
  pthread_attr_t old_{};
};

}  // namespace kvtier::testing
