#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Host memory that a GPU can read, obtained in every way that the driver offers, for the benchmark
/// host_gather.
namespace kvtier::benchmarks {

/// One region: chunks of equal size that kernels and the CPU read at the same addresses.
struct Region {
  std::vector<std::byte*> chunks;
  std::size_t chunk_bytes = 0;
  double obtain_seconds = 0.0;  ///< From nothing to pinned, touched pages included.
  double huge_share = -1.0;  ///< Of the region, in huge pages by /proc/self/smaps; -1: not known.
  std::vector<std::function<void()>> undo;  ///< Run last to first.

  Region() = default;
  Region(const Region&) = delete;  // owns the memory
  Region& operator=(const Region&) = delete;
  ~Region() {
    while (!undo.empty()) {
      undo.back()();
      undo.pop_back();
    }
  }
};

struct Method {
  std::string name;
  std::string what;
  std::function<void(Region&, std::size_t bytes)> obtain;  ///< Throws std::runtime_error.
};

/// All methods. `obtain` fills a region of `bytes`, a multiple of 1 GiB.
[[nodiscard]] const std::vector<Method>& methods();

/// Calls `work(i)` for i in [0, count) on all cores.
void on_all_cores(std::size_t count, const std::function<void(std::size_t)>& work);

}  // namespace kvtier::benchmarks
