#pragma once

#include "services/wire/descriptor.h"

#include <cstddef>
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
  ~SharedRegion();
  SharedRegion(SharedRegion&& other) noexcept;
  SharedRegion& operator=(SharedRegion&& other) noexcept;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, size_}; }
  [[nodiscard]] int descriptor() const noexcept { return file_.get(); }

 private:
  Descriptor file_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvtier::services
