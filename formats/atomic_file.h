#pragma once

#include <filesystem>
#include <string_view>

namespace kvtier::formats {

/// A file that appears whole or not at all: written under a temporary name beside its place, on the
/// disk, then renamed. Nothing that is there under such a name is opened.
///
/// The constructor creates the temporary file, so that a place that cannot be written is known
/// before the work whose result goes there; destruction without `commit` removes it.
class AtomicFile {
 public:
  /// Throws `kUnavailable` with the reason when the file cannot be created, or `path` is there and
  /// no regular file: a directory, a device such as /dev/null, a pipe, /dev/stdout.
  explicit AtomicFile(std::filesystem::path path);
  AtomicFile(const AtomicFile&) = delete;  // owns a name in the file system
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  /// Writes more. Throws `kUnavailable`, the former file untouched, as does `commit`.
  void write(std::string_view bytes);
  /// Writes `rest` and puts the file in its place.
  void commit(std::string_view rest = {});

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  bool committed_ = false;
};

}  // namespace kvtier::formats
