#pragma once

namespace kvtier::transfer {

/// True when the CUDA half is compiled in. The discarded branch of `if constexpr` leaves no
/// reference, so a build without CUDA links with no stub. Included by the sources that choose a
/// backend alone: all others are the same in both builds, and a compiler's cache serves them.
#if defined(KVTIER_WITH_CUDA)
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

}  // namespace kvtier::transfer
