#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace kvtier::bench {

/// A new folder on the disk that is measured.
class BenchFolder {
 public:
  explicit BenchFolder(const std::filesystem::path& in) {
    std::string name = (in / "kvtier-bench-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("--folder: expected one to write to, found " + in.string());
    }
    path_ = name;
  }
  ~BenchFolder() { std::filesystem::remove_all(path_); }
  BenchFolder(const BenchFolder&) = delete;  // removes what it made
  BenchFolder& operator=(const BenchFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace kvtier::bench
