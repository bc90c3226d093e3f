#pragma once

#include "kvtier/device_memory.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <sys/types.h>
#include <vector>

namespace kvtier::testing {

/// Another process that has allocated memory of the GPU: this program, started anew, because a
/// context does not survive a fork. It serves the commands of this object and ends with this
/// object.
class DeviceExporter {
 public:
  /// Throws `std::runtime_error` unless the process starts and has the memory.
  explicit DeviceExporter(std::size_t bytes);
  ~DeviceExporter();
  DeviceExporter(const DeviceExporter&) = delete;  // owns a process
  DeviceExporter& operator=(const DeviceExporter&) = delete;

  [[nodiscard]] const DeviceMemoryHandle& handle() const noexcept { return handle_; }
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  [[nodiscard]] std::vector<std::byte> read(std::uint64_t offset, std::size_t bytes);
  /// Gives the memory back.
  void free_memory();
  /// Ends the process without notice.
  void kill();

 private:
  int socket_ = -1;
  pid_t process_ = -1;
  DeviceMemoryHandle handle_;
};

}  // namespace kvtier::testing
