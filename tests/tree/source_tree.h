#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

/// What the tests of the whole repository read: sources, documents and presets as text.
namespace kvtier::testing {

struct SourceFile {
  std::string path;  ///< Relative to the root, with '/'.
  std::vector<std::string> lines;
};

/// Returns the root of the repository that this binary was built from. It may be gone when the
/// binary runs on another machine.
[[nodiscard]] std::filesystem::path source_root();

/// Reads the files below `folders` whose extension is one of `extensions`, in order of path.
/// Generated and hidden folders are left out; a folder that does not exist has no files.
[[nodiscard]] std::vector<SourceFile> read_tree(const std::filesystem::path& root,
                                                const std::vector<std::string>& folders,
                                                const std::vector<std::string>& extensions);

/// Reads one file; no lines when it cannot be opened.
[[nodiscard]] SourceFile read_source(const std::filesystem::path& root, const std::string& path);

/// Folders that hold C++ or CUDA sources.
[[nodiscard]] const std::vector<std::string>& source_folders();
[[nodiscard]] const std::vector<std::string>& source_extensions();

}  // namespace kvtier::testing
