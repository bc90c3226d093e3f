#include "tests/transfer/tiers/remote_fixture.h"

#include <fstream>

namespace kvtier::tiers {
namespace {

using std::chrono::milliseconds;
using ::testing::AnyOf;
using testing::Engine;
using testing::eventually;
using ::testing::HasSubstr;
using testing::RawClient;
using testing::RemoteServerProcess;

class MemcachedTier : public RemoteTiers {
 protected:
  void start_three() {
    MemcachedOptions options{.servers = {}, .remote = remote_};
    for (int i = 0; i < 3; ++i) {
      servers_.push_back(std::make_unique<RemoteServerProcess>(
          Engine::kMemcached, folder_ / ("socket" + std::to_string(i))));
      options.servers.push_back(servers_.back()->endpoint());
    }
    cluster_ = make_memcached_cluster(options);
    tier_ = tier_of("alice");
    for (std::uint64_t i = 0; i < 60; ++i) {
      pages_.emplace_back(i);
      ASSERT_EQ(put(*tier_, pages_.back()), TierStatus::kOk);
    }
  }
  std::vector<std::size_t> held() const {
    std::vector<std::size_t> counts(3, 0);
    for (const Page& page : pages_) {
      for (std::size_t i = 0; i < 3; ++i)
        counts[i] += !servers_[i]->raw().get(name_of(page)).empty();
    }
    return counts;
  }

  std::vector<std::unique_ptr<RemoteServerProcess>> servers_;
  std::vector<Page> pages_;
};

TEST_P(MemcachedTier, LosesAndReplacesOnlyTheShareOfAKilledServer) {
  start_three();
  const std::vector<std::size_t> before = held();
  EXPECT_EQ(before[0] + before[1] + before[2], 60U);
  for (const std::size_t share : before) EXPECT_GT(share, 5U);
  servers_[1]->kill();
  EXPECT_TRUE(eventually([&] {
    for (const Page& page : pages_) (void)get(*tier_, page);
    return cluster_->servers()[1].circuit == CircuitState::kOpen;
  }));

  std::size_t found = 0;
  for (const Page& page : pages_) {
    const TierStatus status = get(*tier_, page);
    EXPECT_THAT(status, AnyOf(TierStatus::kOk, TierStatus::kMiss));
    found += status == TierStatus::kOk;
  }
  EXPECT_EQ(found, before[0] + before[2]);
  for (const Page& page : pages_) EXPECT_EQ(put(*tier_, page), TierStatus::kOk);
  for (const Page& page : pages_) EXPECT_EQ(get(*tier_, page), TierStatus::kOk);

  servers_[1]->start();
  ASSERT_TRUE(recovers());
  std::size_t back = 0;
  for (const Page& page : pages_) {
    const TierStatus status = get(*tier_, page);
    EXPECT_THAT(status, AnyOf(TierStatus::kOk, TierStatus::kMiss));
    back += status == TierStatus::kOk;
  }
  EXPECT_EQ(back, before[0] + before[2]) << "the share is the empty server's again";
}

TEST_P(MemcachedTier, AnswersForOtherServersWhileOneIsPaused) {
  start_three();
  const std::vector<std::size_t> before = held();
  std::vector<std::vector<std::byte>> found(pages_.size(), std::vector<std::byte>(1000));
  std::vector<TierGet> gets;
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    gets.push_back({.key = pages_[i].key, .bytes = found[i]});
  }
  servers_[2]->pause();

  tier_->get(gets, in(testing::kPatience));

  std::size_t served = 0, unknown = 0;
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    served += gets[i].status == TierStatus::kOk && found[i] == pages_[i].bytes;
    unknown += gets[i].status == TierStatus::kUnavailable;
  }
  EXPECT_EQ(served, before[0] + before[1]);
  EXPECT_EQ(unknown, before[2]);
  servers_[2]->go_on();
}

TEST_P(MemcachedTier, RefusesWhatIsOverTheServersLimit) {
  remote_.value_limit = std::size_t{2} << 20;
  start();

  EXPECT_EQ(put(*tier_, Page(1, std::size_t{3} << 19)), TierStatus::kFull);
  EXPECT_EQ(put(*tier_, Page(2)), TierStatus::kOk);
}

INSTANTIATE_TEST_SUITE_P(Cluster, MemcachedTier, ::testing::Values(Engine::kMemcached));

class RedisTier : public RemoteTiers {};

TEST_P(RedisTier, NeedsTheRightPassword) {
  server_ = std::make_unique<RemoteServerProcess>(
      Engine::kRedis, folder_ / "socket", std::vector<std::string>{"--requirepass", "right"});
  const Page page(1);
  for (const char* password : {"right", "wrong", ""}) {
    cluster_ = make_redis_cluster(
        {.server = server_->endpoint(), .password = password, .remote = remote_});
    tier_ = tier_of("alice");
    const bool right = std::string(password) == "right";

    EXPECT_EQ(put(*tier_, page), right ? TierStatus::kOk : TierStatus::kUnavailable) << password;
    EXPECT_EQ(get(*tier_, page), right ? TierStatus::kOk : TierStatus::kUnavailable) << password;
    const std::string failure = cluster_->servers()[0].last_failure;
    if (!right) {
      EXPECT_THAT(failure, AnyOf(HasSubstr("WRONGPASS"), HasSubstr("NOAUTH")));
    }
  }
}

TEST_P(RedisTier, IsFullWhenTheServerMayNotEvict) {
  start({"--maxmemory", "3mb", "--maxmemory-policy", "noeviction"});
  remote_.value_limit = std::size_t{1} << 20;
  connect(server_->endpoint());
  TierStatus status = TierStatus::kOk;
  for (std::uint64_t i = 0; i < 10 && status == TierStatus::kOk; ++i) {
    status = put(*tier_, Page(i, 900'000));
  }

  EXPECT_EQ(status, TierStatus::kFull);
  EXPECT_EQ(cluster_->servers()[0].circuit, CircuitState::kClosed);
}

TEST_P(RedisTier, TreatsAReplicaAsFailed) {
  start();
  ASSERT_EQ(server_->raw().command("REPLICAOF 127.0.0.1 1"), "+OK");

  EXPECT_EQ(put(*tier_, Page(1)), TierStatus::kUnavailable);
  EXPECT_THAT(cluster_->servers()[0].last_failure, HasSubstr("READONLY"));
}

TEST_P(RedisTier, RemovesAValueOfAnotherType) {
  start();
  const Page page(1);
  RawClient raw = server_->raw();
  ASSERT_EQ(raw.command("LPUSH " + name_of(page) + " x"), ":1");

  EXPECT_EQ(get(*tier_, page), TierStatus::kCorrupt);
  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
}

TEST_P(RedisTier, GivesEveryValueATimeToLive) {
  start();
  const Page page(1, 2 * kPartBytes);
  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
  RawClient raw = server_->raw();
  for (std::uint32_t part = 0; part < 2; ++part) {
    const std::string ttl = raw.command("TTL " + name_of(page, part));
    ASSERT_TRUE(ttl.starts_with(':')) << ttl;
    const int seconds = std::stoi(ttl.substr(1));
    EXPECT_LE(seconds, 86'400);
    EXPECT_GT(seconds, 86'400 - testing::kPatience.count());
  }
}

TEST_P(RedisTier, FollowsTheMasterThatSentinelsName) {
  std::vector<std::unique_ptr<RemoteServerProcess>> masters;
  std::vector<int> ports;
  for (int i = 0; i < 2; ++i) {
    ports.push_back(testing::free_port());
    masters.push_back(std::make_unique<RemoteServerProcess>(
        Engine::kRedis, folder_ / ("master" + std::to_string(i)),
        std::vector<std::string>{"--port", std::to_string(ports[static_cast<std::size_t>(i)])}));
  }
  const auto monitor = [&](std::size_t i) {
    return "monitor pages 127.0.0.1 " + std::to_string(ports[i]) + " 1";
  };
  const std::string path = folder_ / "sentinel";
  std::ofstream(path + ".conf") << "port 0\nunixsocket " << path << "\nsentinel " << monitor(0)
                                << "\n";
  testing::Program sentinel("/usr/bin/redis-server", {"redis-server", path + ".conf", "--sentinel"},
                            {}, path + ".err");
  ASSERT_TRUE(eventually([&] { return RawClient(Engine::kRedis, path).connected(); }));
  // The first is down: the second is asked.
  cluster_ = make_redis_cluster({.server = {},
                                 .sentinels = {"unix:" + path + ".none", "unix:" + path},
                                 .master = "pages",
                                 .remote = remote_});
  tier_ = tier_of("alice");
  const Page page(1);
  EXPECT_EQ(put(*tier_, page), TierStatus::kOk);
  EXPECT_NE(masters[0]->raw().get(name_of(page)), "");

  masters[0]->kill();
  RawClient raw(Engine::kRedis, path);
  ASSERT_EQ(raw.command("SENTINEL remove pages"), "+OK");
  EXPECT_EQ(get(*tier_, page), TierStatus::kUnavailable) << "no master is named";
  ASSERT_EQ(raw.command("SENTINEL " + monitor(1)), "+OK");

  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
  EXPECT_EQ(put(*tier_, page), TierStatus::kOk);
  EXPECT_NE(masters[1]->raw().get(name_of(page)), "");
}

INSTANTIATE_TEST_SUITE_P(Node, RedisTier, ::testing::Values(Engine::kRedis));

TEST(RemoteOptions, SayWhatWasExpectedAndFound) {
  const auto message = [](const auto& make) {
    try {
      make();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string("nothing thrown");
  };
  for (const char* text : {"", "host", "host:", "host:0", "host:65536", "host:1x", ":1", "a:b:1",
                           "unix:", "unix:relative"}) {
    EXPECT_THAT(message([&] { (void)RemoteEndpoint::parse(text); }), HasSubstr("expected")) << text;
  }
  EXPECT_EQ(RemoteEndpoint::parse("[::1]:11211").host, "::1");
  EXPECT_EQ(RemoteEndpoint::parse("cache:11211").port, 11211);
  EXPECT_EQ(RemoteEndpoint::parse("unix:/run/a").path, "/run/a");

  RemoteOptions options;
  options.ttl = std::chrono::hours(24 * 31);
  EXPECT_THAT(message([&] {
                (void)make_memcached_cluster({{"unix:/x"}, options});
              }),
              HasSubstr("found 2678400"));
  EXPECT_THAT(message([] { (void)make_memcached_cluster({}); }), HasSubstr("found none"));
  EXPECT_THAT(message([] { (void)make_redis_cluster({}); }), HasSubstr("found server ''"));
  EXPECT_THAT(message([] { (void)make_redis_cluster({.server = "unix:/x", .user = "me"}); }),
              HasSubstr("expected a password"));
}

}  // namespace
}  // namespace kvtier::tiers
