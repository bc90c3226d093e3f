#include "benchmarks/service/hpack_reader.h"

#include <stdexcept>

namespace kvtier::bench {
namespace {

constexpr std::size_t kStaticFields = 61;
constexpr std::size_t kFieldOverhead = 32;

/// The rest of a block.
class Rest {
 public:
  explicit Rest(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }
  [[nodiscard]] unsigned first() const { return static_cast<unsigned char>(bytes_[0]); }

  /// A number in the low `bits` of a byte and what follows.
  std::size_t number(unsigned bits) {
    const std::size_t most = (std::size_t{1} << bits) - 1;
    std::size_t value = byte() & most;
    if (value < most) return value;
    for (unsigned shift = 0;; shift += 7) {
      if (shift > 28) throw std::runtime_error("header fields: expected a number, found a longer");
      const unsigned next = byte();
      value += static_cast<std::size_t>(next & 127U) << shift;
      if (next < 128) return value;
    }
  }
  /// A string; empty in place of one in Huffman's code.
  std::string text() {
    if (empty()) throw ended();
    const bool is_coded = first() >= 128;
    const std::size_t size = number(7);
    if (size > bytes_.size()) throw ended();
    const std::string found(is_coded ? std::string_view() : bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return found;
  }

 private:
  static std::runtime_error ended() {
    return std::runtime_error("header fields: expected more bytes, found the end");
  }
  unsigned byte() {
    if (empty()) throw ended();
    const unsigned value = first();
    bytes_.remove_prefix(1);
    return value;
  }

  std::string_view bytes_;
};

}  // namespace

std::optional<std::string> HpackReader::find(std::string_view block, std::string_view name) {
  std::optional<std::string> found;
  for (Rest rest(block); !rest.empty();) {
    const unsigned first = rest.first();
    Field field;
    if ((first & 0x80U) != 0) {
      field = at(rest.number(7));
    } else if ((first & 0xE0U) == 0x20U) {
      most_bytes_ = rest.number(5);
      evict();
      continue;
    } else {
      const bool is_kept = (first & 0x40U) != 0;
      const std::size_t index = rest.number(is_kept ? 6 : 4);
      field.name = index == 0 ? rest.text() : at(index).name;
      field.value = rest.text();
      if (is_kept) insert(field);
    }
    if (field.name == name) found = field.value;
  }
  return found;
}

HpackReader::Field HpackReader::at(std::size_t index) const {
  if (index <= kStaticFields) return {};  // none that is looked for
  if (index - kStaticFields > table_.size()) {
    throw std::runtime_error("header fields: expected a field that was sent before, found none");
  }
  return table_[index - kStaticFields - 1];
}

void HpackReader::insert(Field field) {
  bytes_ += field.name.size() + field.value.size() + kFieldOverhead;
  table_.push_front(std::move(field));
  evict();
}

void HpackReader::evict() {
  while (bytes_ > most_bytes_) {
    bytes_ -= table_.back().name.size() + table_.back().value.size() + kFieldOverhead;
    table_.pop_back();
  }
}

}  // namespace kvtier::bench
