#include "tests/tree/source_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <regex>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

namespace kvtier::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

std::vector<std::string> all_matches(const std::string& text, const std::regex& pattern) {
  std::vector<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) {
    found.push_back((*it)[1].str());
  }
  return found;
}

/// What a document promises to exist.
struct Promises {
  std::set<std::string> links;     ///< Relative targets of [text](target), anchors cut off.
  std::set<std::string> commands;  ///< Programs of the repository named in code.
  std::set<std::string> presets;   ///< Of `cmake --preset`, `ctest --preset`.
};

Promises find_promises(const SourceFile& document) {
  static const std::regex link(R"(\]\(([^)#:\s]+)(#[^)]*)?\))");
  static const std::regex command(R"((?:^|[\s`])((?:\./)?(?:scripts/[a-z_]+\.sh|\.ci/run)))");
  static const std::regex preset(R"((?:cmake|ctest|\.sh)\b[^`]*?--preset[ =]([a-z]+))");
  Promises promises;
  for (const std::string& line : document.lines) {
    for (auto& target : all_matches(line, link)) promises.links.insert(target);
    for (auto& program : all_matches(line, command)) promises.commands.insert(program);
    for (auto& name : all_matches(line, preset)) promises.presets.insert(name);
  }
  return promises;
}

std::set<std::string> preset_names() {
  std::set<std::string> names;
  for (const std::string& line : read_source(source_root(), "CMakePresets.json").lines) {
    for (auto& name : all_matches(line, std::regex(R"re("name": "([a-z]+)")re")))
      names.insert(name);
  }
  return names;
}

std::vector<SourceFile> documents() {
  std::vector<std::string> folders = source_folders();
  folders.insert(folders.end(), {"docs", "cmake", "data", "deploy", "python", "scripts"});
  std::vector<SourceFile> found = read_tree(source_root(), folders, {".md"});
  for (const char* name : {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}) {
    found.push_back(read_source(source_root(), name));
  }
  return found;
}

TEST(Promises, AreFoundInText) {
  const SourceFile document{
      "x.md",
      {"See [the rules](docs/a.md#part), [site](https://example.org).", "`scripts/demo.sh --help`",
       "    ./scripts/test.sh -R x", ".ci/run", "cmake --preset dev && ctest --preset=asan"}};

  const Promises promises = find_promises(document);

  EXPECT_THAT(promises.links, ElementsAre("docs/a.md"));
  EXPECT_THAT(promises.commands,
              UnorderedElementsAre("scripts/demo.sh", "./scripts/test.sh", ".ci/run"));
  EXPECT_THAT(promises.presets, UnorderedElementsAre("dev", "asan"));
}

TEST(Documents, NameProgramsThatExistAndAreExecutable) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  for (const SourceFile& document : documents()) {
    for (const std::string& program : find_promises(document).commands) {
      const fs::path path = source_root() / program;
      EXPECT_EQ(::access(path.c_str(), X_OK), 0) << program << " in " << document.path;
    }
  }
}

TEST(Documents, NamePresetsThatExist) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  for (const SourceFile& document : documents()) {
    for (const std::string& preset : find_promises(document).presets) {
      EXPECT_THAT(preset_names(), Contains(preset)) << document.path;
    }
  }
}

TEST(Documents, LinkToFilesThatExist) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  for (const SourceFile& document : documents()) {
    const fs::path folder = (source_root() / document.path).parent_path();
    for (const std::string& target : find_promises(document).links) {
      EXPECT_TRUE(fs::exists(folder / target)) << target << " in " << document.path;
    }
  }
}

/// Returns the names by which a page is linked within a document: its headings in lower case,
/// without punctuation, '-' for spaces.
std::set<std::string> anchors(const SourceFile& document) {
  std::set<std::string> found;
  bool in_code = false;
  for (const std::string& line : document.lines) {
    if (line.starts_with("```")) in_code = !in_code;
    const std::size_t title = line.find_first_not_of('#');
    if (in_code || title == 0 || title == std::string::npos || line[title] != ' ') continue;
    std::string anchor;
    for (const char c : line.substr(title + 1)) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == ' ') anchor += '-';
      if (std::isalnum(byte) != 0 || c == '-' || c == '_') {
        anchor += static_cast<char>(std::tolower(byte));
      }
    }
    found.insert(anchor);
  }
  return found;
}

TEST(Documents, LinkToHeadingsThatExist) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  const std::regex link(R"(\]\(([^)#:\s]*\.md)?#([^)]+)\))");
  std::size_t count = 0;
  for (const SourceFile& document : documents()) {
    const fs::path folder = (source_root() / document.path).parent_path();
    for (const std::string& line : document.lines) {
      for (std::sregex_iterator it(line.begin(), line.end(), link), end; it != end; ++it) {
        const std::string file = (*it)[1].str();
        const SourceFile target = file.empty() ? document : read_source(folder, file);
        EXPECT_TRUE(anchors(target).contains((*it)[2].str()))
            << it->str() << " in " << document.path;
        ++count;
      }
    }
  }
  EXPECT_GT(count, 5U);
}

TEST(Documents, NameTestsThatExist) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  std::set<std::string> tests;
  const std::regex test(R"(^TEST(?:_F|_P)?\((\w+, \w+)\))");
  for (const SourceFile& source : read_tree(source_root(), {"tests"}, {".cc"})) {
    for (const std::string& line : source.lines) {
      for (auto& name : all_matches(line, test)) tests.insert(name);
    }
  }
  const std::regex named(R"(`([A-Z]\w+\.[A-Z]\w+)`)");
  std::size_t count = 0;
  for (const std::string& line : read_source(source_root(), "docs/faults.md").lines) {
    for (auto& name : all_matches(line, named)) {
      name.replace(name.find('.'), 1, ", ");
      EXPECT_TRUE(tests.contains(name)) << name;
      ++count;
    }
  }
  EXPECT_GT(count, 50U);
}

/// Adds the identifiers of a line: runs of letters, digits and '_'.
void add_identifiers(const std::string& line, std::set<std::string>& identifiers) {
  const auto in_word = [](char c) {
    return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0;
  };
  for (auto begin = line.begin(); begin != line.end();) {
    begin = std::find_if(begin, line.end(), in_word);
    const auto end = std::find_if_not(begin, line.end(), in_word);
    if (begin != end) identifiers.emplace(begin, end);
    begin = end;
  }
}

TEST(Documents, GlossaryNamesIdentifiersThatExist) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  std::set<std::string> identifiers;
  std::vector<std::string> folders = source_folders();
  std::erase(folders, "tests");
  for (const SourceFile& source : read_tree(source_root(), folders, source_extensions())) {
    for (const std::string& line : source.lines) add_identifiers(line, identifiers);
  }
  const std::regex named(R"(`([A-Za-z_]\w*)(?:::(\w+))?`)");
  std::size_t count = 0;
  for (const std::string& line : read_source(source_root(), "docs/glossary.md").lines) {
    const std::string last_column = line.substr(line.find_last_of('|', line.size() - 2) + 1);
    for (std::sregex_iterator it(last_column.begin(), last_column.end(), named), end; it != end;
         ++it) {
      for (std::size_t part = 1; part <= 2; ++part) {
        const std::string name = (*it)[part].str();
        EXPECT_TRUE(name.empty() || identifiers.contains(name)) << name;
      }
      ++count;
    }
  }
  EXPECT_GT(count, 60U);
}

TEST(Documents, OverlapNamesEveryFileThatLaunchesSuchAKernel) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  std::set<std::string> named;
  for (const std::string& line : read_source(source_root(), "docs/notes/overlap.md").lines) {
    for (auto& file : all_matches(line, std::regex(R"(^\| `([^`]+)` \|)"))) named.insert(file);
  }
  std::set<std::string> launching;
  const std::regex launch(R"(\b(launch_overlapping(?:_clusters)?)\()");
  std::vector<std::string> folders = source_folders();
  std::erase(folders, "tests");
  for (const SourceFile& source : read_tree(source_root(), folders, source_extensions())) {
    if (source.path == "transfer/device/launch_cuda.cuh") continue;  // defines it
    for (const std::string& line : source.lines) {
      if (std::regex_search(line, launch)) launching.insert(source.path);
    }
  }
  EXPECT_EQ(named, launching);
  EXPECT_GT(launching.size(), 10U);
}

/// Returns the lines of the program that a tutorial links to, without indentation.
std::set<std::string> program_lines(const SourceFile& tutorial) {
  std::set<std::string> lines;
  const fs::path folder = (source_root() / tutorial.path).parent_path();
  for (const std::string& target : find_promises(tutorial).links) {
    if (target.find("examples/tutorials/") == std::string::npos) continue;
    for (const std::string& line : read_source(folder, target).lines) {
      lines.insert(line.substr(std::min(line.find_first_not_of(' '), line.size())));
    }
  }
  return lines;
}

TEST(Documents, TutorialsShowLinesOfTheirPrograms) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  std::size_t count = 0;
  for (const SourceFile& tutorial : read_tree(source_root(), {"docs/tutorials"}, {".md"})) {
    const std::set<std::string> program = program_lines(tutorial);
    bool in_code = false;
    for (const std::string& line : tutorial.lines) {
      if (line.starts_with("```")) {
        in_code = line == "```cpp" || line == "```python";
      } else if (in_code && !line.empty()) {
        const std::string code = line.substr(line.find_first_not_of(' '));
        EXPECT_TRUE(program.contains(code)) << code << " in " << tutorial.path;
        ++count;
      }
    }
  }
  EXPECT_GT(count, 20U);
}

TEST(Documents, KeepTheReadmeAndTheArchitectureShort) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  EXPECT_LE(read_source(source_root(), "README.md").lines.size(), 150U);
  EXPECT_LE(read_source(source_root(), "docs/architecture.md").lines.size(), 90U);
}

/// What docs/map.md names.
struct Map {
  std::set<std::string> rows;        ///< Files that have a row, relative to the root.
  std::set<std::string> folders;     ///< The headings.
  std::vector<std::string> unknown;  ///< Names of files that are not there.
};

Map read_map() {
  static const std::regex heading("## `([^`]+)`");
  static const std::regex row("\\| ((?:`[^`]+`(?:, )?)+) \\|(.*)");
  static const std::regex quoted("`([^`]+)`");
  static const std::regex path(R"(`([\w./]+/[\w.]+)`)");
  Map map;
  std::string folder;
  for (const std::string& line : read_source(source_root(), "docs/map.md").lines) {
    std::smatch found;
    if (std::regex_match(line, found, heading)) {
      folder = found[1].str();
      map.folders.insert(folder);
      continue;
    }
    const bool names = !folder.empty() && std::regex_match(line, found, row);
    if (names) {
      for (const std::string& name : all_matches(found[1].str(), quoted)) {
        map.rows.insert(folder + "/" + name);
      }
    }
    for (const std::string& name : all_matches(names ? found[2].str() : line, path)) {
      if (!fs::exists(source_root() / name)) map.unknown.push_back(name);
    }
  }
  for (const std::string& name : map.rows) {
    if (!fs::exists(source_root() / name)) map.unknown.push_back(name);
  }
  return map;
}

TEST(Documents, MapOnlyFilesThatExist) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  EXPECT_THAT(read_map().unknown, ElementsAre());
}

/// A header with a source of its own has its row there, and `x_kernels.h` only declares.
bool needs_row(const std::string& path, const std::set<std::string>& all) {
  if (path.ends_with("__init__.py") || path.ends_with("_kernels.h")) return false;
  if (!path.ends_with(".h")) return true;
  const std::string stem = path.substr(0, path.size() - 2);
  return !all.contains(stem + ".cc") && !all.contains(stem + ".cu") &&
         !all.contains(stem + "_cuda.cu");
}

TEST(Documents, MapEverySource) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  const Map map = read_map();
  std::set<std::string> all;
  for (const SourceFile& source : read_tree(source_root(),
                                            {"attention", "formats", "hashing", "include", "python",
                                             "runtime", "scoring", "services", "transfer"},
                                            {".h", ".cc", ".cu", ".cuh", ".py"})) {
    if (!source.path.starts_with("python/kvtier/v1/")) all.insert(source.path);  // generated
  }
  for (const std::string& path : all) {
    if (!needs_row(path, all)) continue;
    EXPECT_TRUE(map.rows.contains(path)) << path << ": add it to docs/map.md";
  }
  EXPECT_GT(map.rows.size(), 400U);
  EXPECT_GT(map.folders.size(), 30U);
}

TEST(Documents, GiveTheTwoCommandsInTheReadme) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  const Promises promises = find_promises(read_source(source_root(), "README.md"));

  EXPECT_THAT(promises.commands, Contains("scripts/demo.sh"));
  EXPECT_THAT(promises.commands, Contains("scripts/test.sh"));
}

TEST(Documents, NameEveryFolderOfSourcesInTheReadme) {
  if (!fs::exists(source_root())) GTEST_SKIP() << "no source tree on this machine";

  std::string text;
  for (const std::string& line : read_source(source_root(), "README.md").lines) text += line + "\n";

  for (const std::string& folder : source_folders()) {
    EXPECT_NE(text.find("`" + folder + "/"), std::string::npos) << folder;
    EXPECT_TRUE(fs::exists(source_root() / folder / "README.md")) << folder;
  }
}

}  // namespace
}  // namespace kvtier::testing
