#include "benchmarks/service/pipe_text.h"

#include <cstdint>
#include <stdexcept>
#include <unistd.h>

namespace kvtier::bench {
namespace {

void read_all(int fd, void* data, std::size_t size) {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t bytes = ::read(fd, at, size);
    if (bytes <= 0) throw std::runtime_error("expected bytes from the other process, found none");
    at += bytes;
    size -= static_cast<std::size_t>(bytes);
  }
}

void write_all(int fd, const void* data, std::size_t size) {
  const auto* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t bytes = ::write(fd, at, size);
    if (bytes <= 0) throw std::runtime_error("expected to write to the other process");
    at += bytes;
    size -= static_cast<std::size_t>(bytes);
  }
}

}  // namespace

void write_text(int fd, const std::string& text) {
  const std::uint64_t size = text.size();
  write_all(fd, &size, sizeof(size));
  write_all(fd, text.data(), size);
}

std::string read_text(int fd) {
  std::uint64_t size = 0;
  read_all(fd, &size, sizeof(size));
  std::string text(size, '\0');
  read_all(fd, text.data(), size);
  return text;
}

}  // namespace kvtier::bench
