#pragma once

#include "transfer/device/host_device.h"

#include <cassert>
#include <cstdint>

namespace kvtier::transfer {

inline constexpr int kMaxBatch = 64;

/// Up to `kMaxBatch` items handed to a kernel by value, so that a launch needs no upload and can be
/// captured in a graph. `T` is trivially copyable.
template <typename T, int Capacity = kMaxBatch>
struct Batch {
  T items[static_cast<unsigned>(Capacity)];
  int count = 0;

  void push(const T& item) {
    assert(count < Capacity);
    items[count++] = item;
  }
  KVTIER_HOST_DEVICE const T& operator[](int i) const { return items[i]; }
  KVTIER_HOST_DEVICE T& operator[](int i) { return items[i]; }
};

}  // namespace kvtier::transfer
