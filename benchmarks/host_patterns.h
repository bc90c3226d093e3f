#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Which rows the calls of the benchmark host_gather read.
namespace kvtier::benchmarks {

inline constexpr int kRowBytes = 512;

/// Row sets that rotate: a call draws new rows until its window has been walked.
struct Pattern {
  enum class Order {
    kAsDrawn,
    kAscending,  ///< By address.
    kPerHead,    ///< Ascending within each of 8 heads, heads one after another: a selection.
  };

  std::string name = "random";
  std::uint64_t window = 0;   ///< Bytes that one call's rows come from; 0: the whole region.
  std::uint64_t run = 1;      ///< Neighbouring rows drawn together.
  std::uint64_t cluster = 0;  ///< Bytes that hold two rows drawn together, not neighbours.
  std::uint64_t hold = 1;     ///< Successive calls in one window.
  Order order = Order::kAsDrawn;
  bool same = false;  ///< Every call reads the rows of the first.
};

/// The patterns of a name on the command line. Throws std::runtime_error when it is not known.
[[nodiscard]] std::vector<Pattern> patterns(const std::string& name);

/// Row indices of `calls` calls of `rows` rows. `cursor` counts the calls of earlier measurements.
/// Throws std::runtime_error when the window has fewer rows than a call.
[[nodiscard]] std::vector<std::uint32_t> draw(const Pattern& pattern, std::uint64_t region_bytes,
                                              int calls, int rows, std::uint64_t& cursor);

/// Number of pages that rows lie in.
[[nodiscard]] std::uint64_t distinct_pages(std::vector<std::uint32_t> ids,
                                           std::uint64_t page_bytes);

}  // namespace kvtier::benchmarks
