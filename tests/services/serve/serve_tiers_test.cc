#include "tests/services/serve/serve_fixture.h"
#include "tests/support/open_segments.h"
#include "tests/transfer/tiers/remote_servers.h"

#include <cstdint>
#include <numeric>
#include <random>

namespace kvtier::services {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kTokens = 8192;  // 2 MiB, in a server with 1 MiB
constexpr int kHeadDim = 64;

/// Random numbers in bf16 that are finite.
std::vector<std::uint16_t> random_rows(std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(kTokens) * kHeadDim);
  for (auto& bits : rows) bits = static_cast<std::uint16_t>(0x3F80U | (random() & 0x807FU));
  return rows;
}

/// A session that does not fit into the host memory of its server.
class LargeSession {
 public:
  explicit LargeSession(Client& client) : session_(open(client)) {
    session_.append(0, view(keys_, {kTokens, 1, kHeadDim}), view(values_, {kTokens, 1, kHeadDim}));
  }

  /// Whether all rows come back as they were appended; throws what the server says.
  [[nodiscard]] bool whole() {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(kTokens));
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<std::uint16_t> keys(keys_.size()), values(values_.size());
    session_.fetch(0, {ids.data(), DType::kInt32, {1, kTokens}},
                   {view(keys, {1, kTokens, kHeadDim}), view(values, {1, kTokens, kHeadDim})});
    return keys == keys_ && values == values_;
  }

 private:
  static RemoteSession open(Client& client) {
    RemoteSessionConfig config;
    config.model = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = kHeadDim};
    config.capacity_tokens = kTokens;
    return client.open(config);
  }
  static MutableTensorView view(std::vector<std::uint16_t>& rows, std::array<std::int64_t, 3> n) {
    return {rows.data(), DType::kBFloat16, {n[0], n[1], n[2]}};
  }

  std::vector<std::uint16_t> keys_ = random_rows(1), values_ = random_rows(2);
  RemoteSession session_;
};

class ServeTiersTest : public ServeTest {
 protected:
  void SetUp() override {
    ServeTest::SetUp();
    if (IsSkipped()) return;
#ifndef KVTIER_WITH_REMOTE_TIERS
    GTEST_SKIP() << "built without remote tiers";
#endif
    cache_ = folder_ / "cache";
  }
  std::string address() const { return "unix:" + (folder_ / "x.sock").string(); }
  std::unique_ptr<Program> serve_small(const std::vector<std::string>& more) {
    std::vector<std::string> arguments{
        "--listen",     address(),       "--backend",    "cpu", "--host-memory-mib", "1",
        "--disk-cache", cache_.string(), "--max-models", "1",   "--data-listen",     "none"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return serve(arguments, {}, {"--log-level=info"});
  }
  /// Loses what is on the disk, as a dying one does.
  void wipe_disk(const Program& server) const {
    std::size_t wiped = 0;
    for (const fs::path& path :
         kvtier::testing::open_segments(cache_, std::to_string(server.pid()))) {
      std::fstream out(path, std::ios::in | std::ios::out | std::ios::binary);
      const std::string zeros(fs::file_size(path), '\0');
      out.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
      ASSERT_TRUE(out.flush().good());
      ++wiped;
    }
    EXPECT_GT(wiped, 0U);
  }

  fs::path cache_;
};

TEST_F(ServeTiersTest, ServersRestoreWhatTheDiskHasLost) {
  for (const auto engine : {kvtier::testing::Engine::kMemcached, kvtier::testing::Engine::kRedis}) {
    const bool memcached = engine == kvtier::testing::Engine::kMemcached;
    SCOPED_TRACE(memcached ? "memcached" : "redis");
    const kvtier::testing::RemoteServerProcess copies(engine, folder_ / "copies");
    const auto server = serve_small({memcached ? "--memcached" : "--redis", copies.endpoint()});
    ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
    EXPECT_THAT(err(), HasSubstr("copies of pages go to"));
    Client client({.server = address(), .attempts = 1});
    LargeSession session(client);
    EXPECT_TRUE(session.whole());

    wipe_disk(*server);
    EXPECT_TRUE(session.whole());

    wipe_disk(*server);
    copies.raw().flush();
    try {
      (void)session.whole();
      FAIL() << "neither the disk nor the server has the pages";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << error.what();
    }
  }
}

TEST_F(ServeTiersTest, OptionsComeFromTheEnvironmentAndFromTheFileToo) {
  const kvtier::testing::RemoteServerProcess a(kvtier::testing::Engine::kMemcached, folder_ / "a");
  const kvtier::testing::RemoteServerProcess b(kvtier::testing::Engine::kMemcached, folder_ / "b");
  const kvtier::testing::RemoteServerProcess redis(
      kvtier::testing::Engine::kRedis, folder_ / "redis", {"--requirepass", "open sesame"});
  const std::string file = write("serve.toml", "memcached = [\"" + a.endpoint() + "\", \"" +
                                                   b.endpoint() + "\"]\nverify-rows = true\n");
  const auto server = serve({"--config", file, "--listen", address(), "--backend", "cpu"},
                            {"KVTIER_HOST_MEMORY_MIB=1", "KVTIER_DISK_CACHE=" + cache_.string(),
                             "KVTIER_REDIS=" + redis.endpoint(),
                             "KVTIER_REDIS_PASSWORD_FILE=" + write("password", "open sesame\n"),
                             "KVTIER_REMOTE_KEY_FILE=" + write("key", "sixteen bytes or more"),
                             "KVTIER_REMOTE_TTL_SECONDS=1000"});
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
  Client client({.server = address(), .attempts = 1});
  LargeSession session(client);
  EXPECT_TRUE(session.whole());

  // Pages are on both memcached servers, and in Redis, with the time to live.
  for (const auto* one : {&a, &b}) {
    EXPECT_THAT(one->raw().command("stats items"), HasSubstr("STAT items:"));
  }
  kvtier::testing::RawClient raw = redis.raw();
  EXPECT_EQ(raw.command("AUTH \"open sesame\""), "+OK");
  ASSERT_TRUE(raw.command("RANDOMKEY").starts_with("$55"));  // "kvtier:" and 48 digits
}

TEST_F(ServeTiersTest, ServersThatAreDownLeaveTheDisk) {
  const auto server = serve_small({"--memcached", "unix:" + (folder_ / "nobody").string()});
  ASSERT_EQ(server->read_line(), "listening on " + address()) << err();
  Client client({.server = address(), .attempts = 1});
  LargeSession session(client);
  EXPECT_TRUE(session.whole());
}

}  // namespace
}  // namespace kvtier::services
