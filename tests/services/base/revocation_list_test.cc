#include "services/base/revocation_list.h"

#include "kvtier/error.h"

#include "tests/services/base/certificates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>
#include <stdlib.h>
#include <string>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

class RevocationListFiles {
 public:
  RevocationListFiles() {
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~RevocationListFiles() { std::filesystem::remove_all(folder_); }
  RevocationListFiles(const RevocationListFiles&) = delete;
  RevocationListFiles& operator=(const RevocationListFiles&) = delete;
  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }

 private:
  std::filesystem::path folder_;
};

std::string refusal(const std::string& lists, const std::string& authorities) {
  try {
    const RevocationList list(lists, authorities);
    return "none";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
}

TEST(RevocationList, HasWhatItsAuthorityHasRevoked) {
  const RevocationListFiles files;
  const Authority authority(files.folder(), "ca");
  const Authority other(files.folder(), "other");
  const Certificate good = authority.issue("good");
  const Certificate bad = authority.issue("bad");
  const Certificate foreign = other.issue("bad");
  const std::string authorities = read_pem(authority.certificate()) + read_pem(other.certificate());

  const RevocationList list(read_pem(authority.revoke({bad})) + read_pem(other.revoke({}, 3600)),
                            authorities);

  for (int again = 0; again < 2; ++again) {
    EXPECT_TRUE(list.has(read_pem(bad.certificate)));
    EXPECT_FALSE(list.has(read_pem(good.certificate)));
    EXPECT_FALSE(list.has(read_pem(foreign.certificate)));
    EXPECT_TRUE(list.has("no certificate"));
  }
  EXPECT_NEAR(static_cast<double>(list.next_update()),
              static_cast<double>(std::time(nullptr)) + 3600, 300);
}

TEST(RevocationList, RefusesWhatIsNoneOrNotOfTheAuthority) {
  const RevocationListFiles files;
  const Authority authority(files.folder(), "ca");
  const Authority other(files.folder(), "other");
  std::filesystem::create_directory(files.folder() / "same");
  const Authority same_name(files.folder() / "same", "ca");
  const std::string own = read_pem(authority.certificate());

  EXPECT_THAT(refusal("", own), HasSubstr("expected revocation lists in PEM, found none"));
  EXPECT_THAT(refusal(own, own), HasSubstr("found none"));
  EXPECT_THAT(refusal(read_pem(other.revoke({})), own), HasSubstr("CN=other that none has"));
  EXPECT_THAT(refusal(read_pem(same_name.revoke({})), own), HasSubstr("CN=ca that none has"));
  EXPECT_THAT(refusal(read_pem(authority.revoke({}, -60)), own), HasSubstr("that has expired"));
  EXPECT_EQ(refusal(read_pem(authority.revoke({})), own), "none");
}

}  // namespace
}  // namespace kvtier::services::testing
