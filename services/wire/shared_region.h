#pragma once

#include "services/wire/descriptor.h"

#include <cstddef>
#include <memory>
#include <span>

namespace kvtier::services {

/// Anonymous memory that processes share, mapped here until it is destroyed; left out of core
/// dumps. The one that makes it seals its size, so that no other can shrink it under a reader.
/// Processes that are forked have this mapping too.
class SharedRegion {
 public:
  SharedRegion() = default;
  enum class Others : bool { kWrite, kRead };
  /// Makes `bytes` of zeros, which are written here, and by others if they may. Takes address
  /// space; memory is taken by writing. Throws `kResourceExhausted`.
  [[nodiscard]] static SharedRegion create(std::size_t bytes, Others others = Others::kWrite);
  /// Maps what another process has made. Throws `kInvalidArgument` unless `file` is memory of at
  /// least `bytes` whose size is sealed.
  [[nodiscard]] static SharedRegion map(Descriptor file, std::size_t bytes, bool writable);

  [[nodiscard]] std::span<std::byte> bytes() const noexcept {
    return {data_.get(), data_ ? data_.get_deleter().bytes : 0};
  }
  [[nodiscard]] int descriptor() const noexcept { return file_.get(); }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* data) const noexcept;
  };
  using Mapping = std::unique_ptr<std::byte, Unmap>;
  static Mapping map_file(int file, std::size_t bytes, bool writable);

  Descriptor file_;
  Mapping data_;
};

}  // namespace kvtier::services
