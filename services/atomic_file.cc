#include "services/atomic_file.h"

#include "kvtier/error.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace kvtier::services {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& reason) {
  throw Error(ErrorCode::kUnavailable, path.string() + ": cannot be written: " + reason);
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path)
    : path_(std::move(path)), temporary_(path_.string() + ".tmp." + std::to_string(::getpid())) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path_, ignored)) fail(path_, "is a directory");
  errno = 0;
  const std::ofstream file(temporary_, std::ios::binary | std::ios::trunc);
  if (!file) fail(path_, std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

void AtomicFile::commit(std::string_view text) {
  errno = 0;
  std::ofstream file(temporary_, std::ios::binary | std::ios::trunc);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file) fail(path_, std::strerror(errno));
  std::error_code error;
  std::filesystem::rename(temporary_, path_, error);
  if (error) fail(path_, error.message());
}

}  // namespace kvtier::services
