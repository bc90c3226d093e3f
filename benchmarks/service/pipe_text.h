#pragma once

#include <string>

namespace kvtier::bench {

/// Texts between two processes, by a pipe or a socket. Both throw `std::runtime_error` when the
/// other process has gone.
void write_text(int fd, const std::string& text);
[[nodiscard]] std::string read_text(int fd);

}  // namespace kvtier::bench
