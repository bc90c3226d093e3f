#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvtier::bench {

/// Lloyd's k-means over halves of keys `[tokens, kv_heads, 128]`, 64 centroids for each of the `2 *
/// kv_heads` subspaces of 64 elements: the product quantisation of PQCache with m = 2, b = 6.
class KMeans {
 public:
  KMeans(std::int64_t tokens, int kv_heads);
  ~KMeans();
  KMeans(const KMeans&) = delete;  // owns memory
  KMeans& operator=(const KMeans&) = delete;

  /// Enqueues: centroids begin at the first tokens, then `iterations` times assign and average.
  void run(cudaStream_t stream, const __nv_bfloat16* keys, int iterations);
  /// Mean squared distance of the last assignment, over tokens and subspaces. Waits.
  [[nodiscard]] double mean_square(cudaStream_t stream) const;

 private:
  std::int64_t tokens_;
  int spaces_;
  float* memory_ = nullptr;  // centroids, sums, counts, squares
};

}  // namespace kvtier::bench
