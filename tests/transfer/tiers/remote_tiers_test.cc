#include "tests/transfer/tiers/remote_fixture.h"
#include "transfer/tiers/remote_tier.h"

#include <thread>

namespace kvtier::tiers {
namespace {

using std::chrono::milliseconds;
using testing::Engine;
using testing::eventually;
using testing::RawClient;
using testing::ScriptedServer;

TEST_P(RemoteTiers, RestoresPagesOfEverySizeInOneBatch) {
  start();
  std::vector<Page> pages;
  for (const std::size_t size : {std::size_t{1}, kPartBytes - 1, kPartBytes, kPartBytes + 1,
                                 2 * kPartBytes, 5 * kPartBytes + 17}) {
    for (std::uint64_t i = 0; i < 20; ++i) pages.emplace_back(100 * size + i, size);
  }
  std::vector<TierPut> puts;
  std::vector<TierGet> gets;
  std::vector<std::vector<std::byte>> found;
  for (const Page& page : pages) {
    puts.push_back({.key = page.key, .bytes = page.bytes});
    found.emplace_back(page.bytes.size());
    gets.push_back({.key = page.key, .bytes = found.back()});
  }

  tier_->put(puts, in(testing::kPatience));
  tier_->get(gets, in(testing::kPatience));

  for (std::size_t i = 0; i < pages.size(); ++i) {
    EXPECT_EQ(puts[i].status, TierStatus::kOk) << i;
    ASSERT_EQ(gets[i].status, TierStatus::kOk) << i;
    EXPECT_EQ(found[i], pages[i].bytes) << i;
  }
}

TEST_P(RemoteTiers, RestoresALargePageInPartsOfTheServersLimit) {
  remote_.value_limit = RemoteOptions{}.value_limit;
  start();
  const Page page(1, std::size_t{5} << 19);

  EXPECT_EQ(put(*tier_, page), TierStatus::kOk);
  EXPECT_EQ(get(*tier_, page), TierStatus::kOk);
}

TEST_P(RemoteTiers, AnswersTheSamePageTwiceInOneBatch) {
  start();
  const Page page(1, 2 * kPartBytes);
  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
  std::vector<std::byte> first(page.bytes.size()), second(page.bytes.size());
  std::vector<TierGet> gets{{.key = page.key, .bytes = first}, {.key = page.key, .bytes = second}};

  tier_->get(gets, in(testing::kPatience));

  EXPECT_EQ(first, page.bytes);
  EXPECT_EQ(second, page.bytes);
}

TEST_P(RemoteTiers, MissesWhatIsNotThereRemovedFlushedOrOfAnotherSize) {
  start();
  const Page page(1), other(1, 900), large(2, 3 * kPartBytes);
  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
  ASSERT_EQ(put(*tier_, large), TierStatus::kOk);

  EXPECT_EQ(get(*tier_, other), TierStatus::kMiss);
  EXPECT_EQ(get(*tier_, page), TierStatus::kOk);
  const std::vector<PageKey> keys{page.key, large.key, Page(3).key};
  tier_->remove(keys, in(testing::kPatience));
  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
  EXPECT_EQ(get(*tier_, large), TierStatus::kMiss);
  EXPECT_EQ(tier_->stats().removed, 2U);

  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
  server_->raw().flush();
  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
}

TEST_P(RemoteTiers, MissesAPageThatLacksAPartOrHasOneOfAnotherPut) {
  start();
  const Page page(1, 3 * kPartBytes);
  RawClient raw = server_->raw();
  for (std::uint32_t part = 0; part < 3; ++part) {
    ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
    const std::string value = raw.get(name_of(page, part));
    raw.remove(name_of(page, part));
    EXPECT_EQ(get(*tier_, page), TierStatus::kMiss) << "without part " << part;

    ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
    raw.set(name_of(page, part), value);
    EXPECT_EQ(get(*tier_, page), TierStatus::kMiss) << "with another put's part " << part;
  }
}

TEST_P(RemoteTiers, DetectsBitFlipsInTheServerAndRemovesThePage) {
  start();
  const Page page(1, 2 * kPartBytes + 200);
  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
  RawClient raw = server_->raw();
  std::vector<std::string> intact;
  for (std::uint32_t part = 0; part < 3; ++part) intact.push_back(raw.get(name_of(page, part)));
  std::mt19937_64 random(5);
  for (std::uint32_t i = 0; i < 300; ++i) {
    const std::uint32_t part = i % 3;
    std::string value = intact[part];
    const std::size_t bit = random() % (8 * value.size());
    value[bit / 8] = static_cast<char>(value[bit / 8] ^ (1 << (bit % 8)));
    raw.set(name_of(page, part), value);

    ASSERT_EQ(get(*tier_, page), TierStatus::kCorrupt) << "part " << part << ", bit " << bit;
    ASSERT_EQ(get(*tier_, page), TierStatus::kMiss) << "part " << part << ", bit " << bit;

    raw.set(name_of(page, 0), intact[0]);
    raw.set(name_of(page, part), intact[part]);
    ASSERT_EQ(get(*tier_, page), TierStatus::kOk) << "part " << part << ", bit " << bit;
  }
}

TEST_P(RemoteTiers, NeverServesAValueThatBelongsElsewhere) {
  start();
  const Page page(1), other(2);
  const auto bob = tier_of("bob");
  ASSERT_EQ(put(*bob, page), TierStatus::kOk);
  ASSERT_EQ(put(*tier_, other), TierStatus::kOk);
  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss) << "of another tenant";
  RawClient raw = server_->raw();
  const std::string bobs = raw.get(PageSealer("bob", secret(1)).name(page.key, 0));
  ASSERT_FALSE(bobs.empty());
  const std::string others = raw.get(name_of(other));

  for (const std::string& value :
       {bobs, others, std::string(), std::string("x"), others.substr(1), others + "x",
        std::string(kValueLimit, 'x'), std::string(800'000, 'x')}) {
    raw.set(name_of(page), value);
    EXPECT_EQ(get(*tier_, page), TierStatus::kCorrupt) << value.size();
    EXPECT_EQ(raw.get(name_of(page)), "") << "is removed";
  }
  EXPECT_EQ(get(*tier_, other), TierStatus::kOk);
  EXPECT_EQ(get(*bob, page), TierStatus::kOk);
}

TEST_P(RemoteTiers, RefusesAValueOutOfAllProportion) {
  start(GetParam() == Engine::kMemcached ? std::vector<std::string>{"-I", "8m"}
                                         : std::vector<std::string>{});
  const Page page(1);
  RawClient raw = server_->raw();
  raw.set(name_of(page), std::string(3'000'000, 'x'));

  EXPECT_EQ(get(*tier_, page), TierStatus::kUnavailable);
  raw.remove(name_of(page));
  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
}

TEST_P(RemoteTiers, MissesAfterARestart) {
  start();
  const Page page(1);
  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);

  server_->kill();
  server_->start();

  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss) << "by a new connection, at once";
  EXPECT_EQ(put(*tier_, page), TierStatus::kOk);
  EXPECT_EQ(get(*tier_, page), TierStatus::kOk);
}

TEST_P(RemoteTiers, IsUnavailableWhileTheServerIsDownAndRecovers) {
  start();
  const Page page(1);
  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
  server_->kill();

  for (int i = 0; i < 4; ++i) EXPECT_EQ(get(*tier_, page), TierStatus::kUnavailable);
  EXPECT_EQ(put(*tier_, page), TierStatus::kUnavailable);
  tier_->remove({&page.key, 1}, in(testing::kPatience));
  EXPECT_EQ(tier_->stats().removed, 0U);
  EXPECT_EQ(tier_->stats().remove_failures, 1U);
  EXPECT_EQ(cluster_->servers()[0].circuit, CircuitState::kOpen);
  EXPECT_EQ(cluster_->servers()[0].failed, 2U) << "nothing is sent while the circuit is open";
  EXPECT_NE(cluster_->servers()[0].last_failure, "");

  server_->start();
  EXPECT_EQ(get(*tier_, page), TierStatus::kUnavailable) << "before the back-off is over";
  ASSERT_TRUE(recovers());
  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
}

TEST_P(RemoteTiers, LeavesAPausedServerAtTheDeadlineAndRecovers) {
  start();
  const Page page(1);
  ASSERT_EQ(put(*tier_, page), TierStatus::kOk);
  server_->pause();

  EXPECT_EQ(get(*tier_, page, milliseconds(20)), TierStatus::kUnavailable);
  EXPECT_EQ(put(*tier_, Page(2), milliseconds(20)), TierStatus::kUnavailable);
  EXPECT_EQ(get(*tier_, page), TierStatus::kUnavailable) << "silent for longer than io_timeout";
  EXPECT_TRUE(eventually([&] { return cluster_->servers()[0].circuit == CircuitState::kOpen; }));

  server_->go_on();
  ASSERT_TRUE(recovers());
  EXPECT_EQ(get(*tier_, page), TierStatus::kOk);
}

TEST_P(RemoteTiers, DoesNothingAfterTheDeadline) {
  start();
  const Page page(1);

  EXPECT_EQ(put(*tier_, page, milliseconds(-1)), TierStatus::kUnavailable);
  EXPECT_EQ(get(*tier_, page, milliseconds(-1)), TierStatus::kUnavailable);

  EXPECT_EQ(cluster_->servers()[0].failed, 0U);
  EXPECT_EQ(server_->raw().get(name_of(page)), "");
}

TEST_P(RemoteTiers, SurvivesServersThatSayAnything) {
  int number = 0;
  for (const char* answer :
       {"", "nonsense\r\n", "\r\n\r\n", "VALUE a 0 99999999999999999999\r\n",
        "VALUE b 0 4000000000\r\nx", "VALUE other 0 1\r\nx\r\nEND\r\n",
        "SERVER_ERROR out of order\r\n", "ERROR\r\n", "$4000000000\r\nx", "$-2\r\n",
        "*2147483647\r\n", "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        ":1\r\n", "-LOADING Redis is loading the dataset in memory\r\n", "+OK\r\n+OK\r\n"}) {
    const ScriptedServer server(folder_ / std::to_string(number++), answer);
    connect(server.endpoint());

    EXPECT_EQ(get(*tier_, Page(1), milliseconds(20)), TierStatus::kUnavailable) << answer;
  }
}

TEST_P(RemoteTiers, ServesManyThreads) {
  remote_.connections = 2;
  start();
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto tier = tier_of("tenant" + std::to_string(t % 2));
      for (std::uint64_t i = 0; i < 50; ++i) {
        const Page page(1000 * (t % 2) + i, 500 + 100 * i);
        // Two threads put one page: a reader between the parts of both finds none.
        const bool stored = put(*tier, page) == TierStatus::kOk;
        const TierStatus found = get(*tier, page);
        right += stored && (found == TierStatus::kOk || found == TierStatus::kMiss);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(right, 200);
}

TEST_P(RemoteTiers, ThrowsForMisuseAndChangesNothing) {
  start();
  const Page page(1);
  std::vector<TierPut> puts{{.key = page.key, .bytes = page.bytes},
                            {.key = Page(2).key, .bytes = {}}};
  std::vector<std::byte> huge(std::size_t{65} << 20);
  TierGet get_huge{.key = page.key, .bytes = huge};

  EXPECT_THROW(tier_->put(puts, in(testing::kPatience)), Error);
  EXPECT_THROW(tier_->get({&get_huge, 1}, in(testing::kPatience)), Error);

  EXPECT_EQ(get(*tier_, page), TierStatus::kMiss);
}

INSTANTIATE_TEST_SUITE_P(Engines, RemoteTiers,
                         ::testing::Values(Engine::kMemcached, Engine::kRedis),
                         [](const auto& engine) {
                           return engine.param == Engine::kMemcached ? "Memcached" : "Redis";
                         });

}  // namespace
}  // namespace kvtier::tiers
