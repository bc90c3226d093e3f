#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace kvtier::bench {

/// Reads blocks of header fields of one connection (RFC 7541), as far as a client needs that looks
/// for plain values: strings in Huffman's code are skipped.
class HpackReader {
 public:
  /// Returns the value of a field of the next block, which must be read even when nothing is looked
  /// for. Throws `std::runtime_error` for what is no such block.
  std::optional<std::string> find(std::string_view block, std::string_view name);

 private:
  struct Field {
    std::string name, value;
  };
  [[nodiscard]] Field at(std::size_t index) const;
  void insert(Field field);
  void evict();

  std::deque<Field> table_;  ///< The newest first.
  std::size_t bytes_ = 0, most_bytes_ = 4096;
};

}  // namespace kvtier::bench
