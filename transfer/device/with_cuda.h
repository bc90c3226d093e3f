#pragma once

#include "transfer/device/device.h"

namespace kvtier::transfer {

/// True when the CUDA half is compiled in. The discarded branch of `if constexpr` leaves no
/// reference, so a build without CUDA links with no stub. Included by the sources that choose a
/// backend alone: all others are the same in both builds, and a compiler's cache serves them.
#if defined(KVTIER_WITH_CUDA)
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

/// Enqueues a kernel on the backend of `stream`: calls `kCuda` with the stream's `cudaStream_t`, or
/// runs `kCpu` as a task, with copies of the arguments.
template <auto kCpu, auto kCuda, typename... Arguments>
void enqueue(Stream& stream, const Arguments&... arguments) {
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) return kCuda(stream.native(), arguments...);
  }
  stream.run([=] { kCpu(arguments...); });
}

}  // namespace kvtier::transfer
