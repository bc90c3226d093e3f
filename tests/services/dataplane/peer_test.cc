#include "services/client/peer.h"

#include "kvtier/error.h"

#include "tests/support/program.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>

namespace kvtier::services {
namespace {

class PeerTest : public ::testing::Test {
 protected:
  static constexpr uid_t kSelf = 64001, kOther = 64002;

  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can be several users";
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    std::filesystem::permissions(folder_, std::filesystem::perms::all);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::string file_of(uid_t user) const {
    const std::string path = (folder_ / std::to_string(user)).string();
    std::ofstream(path) << "x";
    EXPECT_EQ(::chown(path.c_str(), user, user), 0);
    return path;
  }
  /// Whether user `kSelf` trusts who has made `path`.
  static bool trusts(const std::string& path) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setresuid(kSelf, kSelf, kSelf) != 0) ::_exit(2);
      try {
        check_owner(path);
      } catch (const Error& error) {
        ::_exit(error.code() == ErrorCode::kFailedPrecondition ? 1 : 2);
      }
      ::_exit(0);
    }
    const int code = kvtier::testing::wait_for_exit(child);
    EXPECT_TRUE(code == 0 || code == 1) << code;
    return code == 0;
  }

  std::filesystem::path folder_;
};

TEST_F(PeerTest, SocketsOfOthersAreNotTrusted) {
  EXPECT_TRUE(trusts(file_of(kSelf)));
  EXPECT_TRUE(trusts(file_of(0)));
  EXPECT_FALSE(trusts(file_of(kOther)));
  EXPECT_TRUE(trusts((folder_ / "none").string()));
  const std::string link = (folder_ / "link").string();
  std::filesystem::create_symlink(file_of(kSelf), link);
  ASSERT_EQ(::lchown(link.c_str(), kOther, kOther), 0);
  EXPECT_FALSE(trusts(link)) << "who has made the link can turn it";
}

}  // namespace
}  // namespace kvtier::services
