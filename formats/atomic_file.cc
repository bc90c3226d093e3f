#include "formats/atomic_file.h"

#include "kvtier/error.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace kvtier::formats {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& reason) {
  throw Error(ErrorCode::kUnavailable, path.string() + ": cannot be written: " + reason);
}

/// Returns why nothing may take the place of what is at `path`; empty: it may.
std::string reason_against(const std::filesystem::path& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) return "is a directory";
  const bool there = std::filesystem::exists(status);
  // The file that /dev/stdout leads to may be a regular one; the link is not to go.
  const bool to_process =
      std::filesystem::read_symlink(path, ignored).string().starts_with("/proc/");
  if (to_process || (there && !std::filesystem::is_regular_file(status))) {
    return "expected a regular file or none, found something else";
  }
  return {};
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  if (const std::string reason = reason_against(path_); !reason.empty()) fail(path_, reason);
  // A name that is there, be it a link of another user, is not written through.
  constexpr int kTries = 100;
  for (int i = 0; fd_ < 0; ++i) {
    temporary_ = path_.string() + ".tmp." + std::to_string(::getpid()) + "." + std::to_string(i);
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd_ < 0 && (errno != EEXIST || i == kTries)) fail(path_, std::strerror(errno));
  }
}

AtomicFile::~AtomicFile() {
  ::close(fd_);
  if (!committed_) (void)::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, std::strerror(errno));
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit(std::string_view rest) {
  write(rest);
  // Some special files cannot be synced, and need not be.
  if (::fsync(fd_) != 0 && errno != EINVAL) fail(path_, std::strerror(errno));
  std::error_code error;
  std::filesystem::rename(temporary_, path_, error);
  if (error) fail(path_, error.message());
  committed_ = true;
}

}  // namespace kvtier::formats
