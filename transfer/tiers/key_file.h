#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kvtier::tiers {

/// Returns all of a file of at most 4,096 bytes. Throws `kNotFound` for one that cannot be read and
/// `kInvalidArgument` for a longer one, with `what` before the message, such as "page cache: key
/// file".
[[nodiscard]] std::string read_small_file(const std::string& what, const std::string& path);

/// Returns a secret for `PageSealer`: all of a file of 16 to 4,096 bytes. Throws as
/// `read_small_file`, and `kInvalidArgument` for a shorter one.
[[nodiscard]] std::vector<std::byte> read_key_file(const std::string& what,
                                                   const std::string& path);

}  // namespace kvtier::tiers
