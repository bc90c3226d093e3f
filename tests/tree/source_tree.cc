#include "tests/tree/source_tree.h"

#include <algorithm>
#include <fstream>

namespace kvtier::testing {

namespace fs = std::filesystem;

fs::path source_root() { return KVTIER_SOURCE_DIR; }

SourceFile read_source(const fs::path& root, const std::string& path) {
  SourceFile file{path, {}};
  std::ifstream in(root / path);
  for (std::string line; std::getline(in, line);) file.lines.push_back(line);
  return file;
}

std::vector<SourceFile> read_tree(const fs::path& root, const std::vector<std::string>& folders,
                                  const std::vector<std::string>& extensions) {
  std::vector<std::string> paths;
  for (const std::string& folder : folders) {
    if (!fs::is_directory(root / folder)) continue;
    for (auto it = fs::recursive_directory_iterator(root / folder);
         it != fs::recursive_directory_iterator(); ++it) {
      const std::string name = it->path().filename().string();
      if (it->is_directory() && (name.starts_with('.') || name == "build")) {
        it.disable_recursion_pending();
      }
      const std::string extension = it->path().extension().string();
      if (it->is_regular_file() && std::ranges::count(extensions, extension) != 0) {
        paths.push_back(fs::relative(it->path(), root).generic_string());
      }
    }
  }
  std::ranges::sort(paths);
  std::vector<SourceFile> files;
  files.reserve(paths.size());
  for (const std::string& path : paths) files.push_back(read_source(root, path));
  return files;
}

const std::vector<std::string>& source_folders() {
  static const std::vector<std::string> folders{"include",   "transfer", "hashing",    "scoring",
                                                "attention", "runtime",  "formats",    "proto",
                                                "services",  "tests",    "benchmarks", "examples"};
  return folders;
}

const std::vector<std::string>& source_extensions() {
  static const std::vector<std::string> extensions{".h", ".cc", ".c", ".cu", ".cuh"};
  return extensions;
}

}  // namespace kvtier::testing
