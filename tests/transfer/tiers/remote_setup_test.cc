#include "kvtier/remote_tiers.h"

#include "tests/transfer/tiers/remote_fixture.h"

#include <fstream>

namespace kvtier::tiers {
namespace {

using ::testing::HasSubstr;

class RemoteSetup : public ::testing::Test {
 protected:
  RemoteSetup() {
    std::string pattern = "/tmp/kvtier-remote-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~RemoteSetup() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }

  std::filesystem::path folder_;
};

TEST_F(RemoteSetup, MakesOneTierOfEachKindInOrder) {
  EXPECT_TRUE(make_remote_tiers({}).empty());
  const testing::RemoteServerProcess memcached(testing::Engine::kMemcached, folder_ / "memcached");
  const testing::RemoteServerProcess redis(testing::Engine::kRedis, folder_ / "redis",
                                           {"--requirepass", "hunter2"});
  const auto tiers = make_remote_tiers({.memcached = {memcached.endpoint()},
                                        .redis = redis.endpoint(),
                                        .redis_password_file = file("password", "hunter2\r\nx\n"),
                                        .ttl = std::chrono::seconds(1000)});
  ASSERT_EQ(tiers.size(), 2U);
  EXPECT_THAT(tiers[0]->describe(), HasSubstr("memcached"));
  EXPECT_THAT(tiers[1]->describe(), HasSubstr("redis"));
  EXPECT_EQ(tiers[0]->kind(), "memcached");
  EXPECT_EQ(tiers[1]->kind(), "redis");
  const Page page(1);
  for (const auto& tier : tiers) {
    EXPECT_FALSE(tier->retains());
    EXPECT_EQ(tier->stats().servers, 1U);
    EXPECT_EQ(tier->stats().servers_open, 0U);
    EXPECT_EQ(put(*tier, page), TierStatus::kOk);
    EXPECT_EQ(get(*tier, page), TierStatus::kOk);
  }
  testing::RawClient raw = redis.raw();
  ASSERT_EQ(raw.command("AUTH hunter2"), "+OK");
  const std::string size = raw.command("RANDOMKEY");
  EXPECT_EQ(size, "$55");  // "kvtier:" and 48 hexadecimal digits
}

TEST_F(RemoteSetup, WhoHasTheKeyFileReadsWhatOthersWrote) {
  const testing::RemoteServerProcess redis(testing::Engine::kRedis, folder_ / "redis");
  const std::string key = file("key", std::string(16, 'k'));
  const auto tier = [&](const std::string& key_file) {
    return make_remote_tiers({.redis = redis.endpoint(), .key_file = key_file}).front();
  };
  const Page page(1);
  ASSERT_EQ(put(*tier(key), page), TierStatus::kOk);
  EXPECT_EQ(get(*tier(key), page), TierStatus::kOk);
  EXPECT_EQ(get(*tier(file("other", std::string(16, 'o'))), page), TierStatus::kMiss);
  EXPECT_EQ(get(*tier(""), page), TierStatus::kMiss);
  // Keys that are drawn are drawn afresh.
  ASSERT_EQ(put(*tier(""), page), TierStatus::kOk);
  EXPECT_EQ(get(*tier(""), page), TierStatus::kMiss);
}

TEST_F(RemoteSetup, SaysWhatWasExpectedAndFound) {
  struct Case {
    RemoteTiersConfig config;
    ErrorCode code;
    std::string message;
  };
  const std::string none = (folder_ / "none").string();
  for (const Case& c : std::vector<Case>{
           {{.memcached = {"host"}}, ErrorCode::kInvalidArgument, "found 'host'"},
           {{.redis = "host:0"}, ErrorCode::kInvalidArgument, "found 'host:0'"},
           {{.redis_sentinels = {"s:1"}}, ErrorCode::kInvalidArgument, "1 sentinels, master ''"},
           {{.redis = "r:1", .redis_master = "m"}, ErrorCode::kInvalidArgument, "master 'm'"},
           {{.redis = "r:1", .redis_user = "u"}, ErrorCode::kInvalidArgument, "a password with"},
           {{.memcached = {"m:1"}, .redis_master = "pages"},
            ErrorCode::kInvalidArgument,
            "expected a server or sentinels, found none beside \"pages\""},
           {{.key_file = "k"}, ErrorCode::kInvalidArgument, "found none beside k"},
           {{.redis = "r:1", .redis_password_file = none}, ErrorCode::kNotFound, none},
           {{.redis = "r:1", .redis_password_file = file("empty", "\nx")},
            ErrorCode::kInvalidArgument,
            "expected a password in its first line, found none"},
           {{.redis = "r:1", .key_file = none}, ErrorCode::kNotFound, "readable file, found"},
           {{.redis = "r:1", .key_file = folder_.string()}, ErrorCode::kNotFound, "readable file"},
           {{.redis = "r:1", .key_file = file("short", "0123456789abcde")},
            ErrorCode::kInvalidArgument,
            "expected 16 to 4096 bytes, found 15"},
           {{.redis = "r:1", .key_file = file("long", std::string(4097, 'x'))},
            ErrorCode::kInvalidArgument,
            "expected at most 4096 bytes"},
           {{.redis = "r:1", .ttl = std::chrono::seconds(0)},
            ErrorCode::kInvalidArgument,
            "found 0"}}) {
    try {
      (void)make_remote_tiers(c.config);
      ADD_FAILURE() << "made, without: " << c.message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), c.code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(c.message));
    }
  }
}

}  // namespace
}  // namespace kvtier::tiers
