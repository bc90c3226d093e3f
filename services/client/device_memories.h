#pragma once

#include "kvtier/tensor.h"

#include "services/wire/to_message.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace kvtier::services {

/// Device memory that tensors of a client's calls may lie in.
struct ClientMemory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::string region{};  ///< As the server knows it; empty: tensors go through host memory.
  CopyBytes copy{};      ///< Between this memory and the host's.
};

/// That of one client. Thread-safe.
class DeviceMemories {
 public:
  void add(std::shared_ptr<const ClientMemory> memory);
  void remove(const ClientMemory* memory);
  /// Returns the memory that all elements of a device tensor lie in; null for one of the host, or
  /// when there is none.
  [[nodiscard]] std::shared_ptr<const ClientMemory> of(const TensorView& view) const;
  /// Returns the place by which the server finds a device tensor of floats: one that is dense and
  /// aligned, in memory that it shares.
  [[nodiscard]] std::optional<v1::DeviceMemory> place_of(const TensorView& view) const;

 private:
  mutable std::mutex mutex_;  ///< Guards `all_`.
  std::vector<std::shared_ptr<const ClientMemory>> all_;
};

}  // namespace kvtier::services
