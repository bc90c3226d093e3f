#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace kvtier::services {

/// Returns the host memory that can be had without swapping: the kernel's estimate, or less where
/// a control group limits it. Files are looked up below `root`.
[[nodiscard]] std::optional<std::size_t> available_host_bytes(
    const std::filesystem::path& root = "/");

}  // namespace kvtier::services
