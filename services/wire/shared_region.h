#pragma once

#include "services/wire/descriptor.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::services {

/// Anonymous memory that two processes share, mapped here until it is destroyed. The one that makes
/// it seals its size, so that the other cannot shrink it under a reader.
class SharedRegion {
 public:
  SharedRegion() = default;
  /// Makes `bytes` of zeros, readable and writable on both sides; left out of core dumps. Throws
  /// `kResourceExhausted`.
  [[nodiscard]] static SharedRegion create(std::size_t bytes);
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
