#include "formats/atomic_file.h"

#include "kvtier/error.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace kvtier::formats {
namespace {

using services::read_text;

class AtomicFileTest : public services::FolderTest {};

TEST_F(AtomicFileTest, AppearsWholeOnCommit) {
  {
    AtomicFile atomic(file("a.json"));
    EXPECT_FALSE(std::filesystem::exists(file("a.json")));
    atomic.commit("text");
  }

  EXPECT_EQ(read_text(file("a.json")), "text");
  EXPECT_EQ(listing(), std::vector<std::string>{"a.json"});
}

TEST_F(AtomicFileTest, KeepsTheFormerFileWithoutCommit) {
  std::ofstream(file("a.json")) << "former";
  { const AtomicFile atomic(file("a.json")); }

  EXPECT_EQ(read_text(file("a.json")), "former");
  EXPECT_EQ(listing(), std::vector<std::string>{"a.json"});
}

TEST_F(AtomicFileTest, ReplacesTheFormerFile) {
  std::ofstream(file("a.json")) << "a longer former text";
  AtomicFile(file("a.json")).commit("new");

  EXPECT_EQ(read_text(file("a.json")), "new");
}

TEST_F(AtomicFileTest, WritesThroughNoLinkOfItsTemporaryName) {
  std::ofstream(file("victim")) << "kept";
  const std::string temporary = file("a.json").string() + ".tmp." + std::to_string(::getpid());
  for (const std::string& name : {temporary, temporary + ".0"}) {
    std::filesystem::create_symlink(file("victim"), name);
  }
  AtomicFile(file("a.json")).commit("new");

  EXPECT_EQ(read_text(file("victim")), "kept");
  EXPECT_EQ(read_text(file("a.json")), "new");
  EXPECT_FALSE(std::filesystem::is_symlink(file("a.json")));
}

TEST_F(AtomicFileTest, RejectsPlacesThatCannotBeWrittenAtOnce) {
  for (const std::filesystem::path& path : {folder_, folder_ / "missing" / "a.json"}) {
    try {
      const AtomicFile atomic(path);
      ADD_FAILURE() << "expected an error for " << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    }
  }
  EXPECT_TRUE(listing().empty());
}

TEST_F(AtomicFileTest, TakesThePlaceOfRegularFilesAlone) {
  ASSERT_EQ(::mkfifo(file("pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink(file("pipe"), file("link"));
  for (const std::filesystem::path& path : {file("pipe"), file("link")}) {
    try {
      const AtomicFile atomic(path);
      ADD_FAILURE() << "expected an error for " << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_EQ(error.what(), path.string() +
                                  ": cannot be written: expected a regular file or none, found "
                                  "something else");
    }
  }
  EXPECT_THROW(AtomicFile("/dev/stdout"), Error);
  EXPECT_EQ(listing(), (std::vector<std::string>{"link", "pipe"}));
  EXPECT_TRUE(std::filesystem::is_fifo(file("pipe")));
}

TEST_F(AtomicFileTest, ReportsAPlaceThatVanished) {
  const std::filesystem::path inner = folder_ / "inner";
  std::filesystem::create_directory(inner);
  AtomicFile atomic(inner / "a.json");
  std::filesystem::remove_all(inner);

  EXPECT_THROW(atomic.commit("text"), Error);
  EXPECT_TRUE(listing().empty());
}

}  // namespace
}  // namespace kvtier::formats
