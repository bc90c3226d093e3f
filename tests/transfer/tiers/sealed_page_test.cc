#include "transfer/tiers/sealed_page.h"

#include "kvtier/error.h"

#include "transfer/tiers/circuit_breaker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvtier::tiers {
namespace {

using std::chrono::milliseconds;

std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}
const std::vector<std::byte> kSecret = random_bytes(32, 1);

PageKey key_of(std::uint8_t n) {
  PageKey key{};
  key.fill(n);
  return key;
}

struct Sealed {
  PageSealer sealer{"alice", kSecret};
  PagePart part{.page = key_of(1), .page_bytes = 1000, .index = 1, .num_parts = 3};
  Generation generation = draw_generation();
  std::vector<std::byte> text = random_bytes(400, 2);
  std::vector<std::byte> value = sealer.seal(part, generation, text);
  std::vector<std::byte> out = std::vector<std::byte>(400);

  TierStatus open(const PageSealer& by, const PagePart& as) {
    Generation found{};
    return by.open(as, value, out, found);
  }
};

TEST(SealedPage, OpensAsItWasSealed) {
  for (const std::size_t size : {1U, 15U, 16U, 17U, 4096U, 100'003U}) {
    const PageSealer sealer("alice", kSecret);
    const PagePart part{.page = key_of(7), .page_bytes = size};
    const Generation generation = draw_generation();
    const std::vector<std::byte> text = random_bytes(size, size);
    std::vector<std::byte> out(size);
    Generation found{};

    const std::vector<std::byte> value = sealer.seal(part, generation, text);

    EXPECT_EQ(value.size(), size + PageSealer::kOverhead);
    EXPECT_EQ(sealer.open(part, value, out, found, &generation), TierStatus::kOk);
    EXPECT_EQ(out, text);
    EXPECT_EQ(found, generation);
  }
}

TEST(SealedPage, ShowsNothingOfItsText) {
  Sealed sealed;
  const std::string value(reinterpret_cast<const char*>(sealed.value.data()), sealed.value.size());
  const std::string text(reinterpret_cast<const char*>(sealed.text.data()), 16);

  EXPECT_EQ(value.find(text), std::string::npos);
  EXPECT_NE(sealed.sealer.seal(sealed.part, draw_generation(), sealed.text), sealed.value);
}

TEST(SealedPage, DetectsTenThousandBitFlips) {
  Sealed sealed;
  std::mt19937_64 random(3);
  const std::vector<std::byte> intact = sealed.value;
  int other = 0;
  for (int i = 0; i < 10'000; ++i) {
    const std::size_t bit = random() % (8 * intact.size());
    sealed.value = intact;
    sealed.value[bit / 8] ^= std::byte{1} << (bit % 8);

    ASSERT_EQ(sealed.open(sealed.sealer, sealed.part), TierStatus::kCorrupt) << "bit " << bit;
    other += sealed.value != intact;
  }
  sealed.value = intact;
  EXPECT_EQ(sealed.open(sealed.sealer, sealed.part), TierStatus::kOk);
  EXPECT_EQ(other, 10'000);
}

TEST(SealedPage, DetectsEveryOtherLength) {
  Sealed sealed;
  const std::vector<std::byte> intact = sealed.value;
  for (std::size_t size = 0; size < intact.size() + 20; ++size) {
    if (size == intact.size()) continue;
    sealed.value = intact;
    sealed.value.resize(size);
    EXPECT_EQ(sealed.open(sealed.sealer, sealed.part), TierStatus::kCorrupt) << size;
  }
}

TEST(SealedPage, OpensOnlyForItsTenantPageAndPart) {
  Sealed sealed;
  PagePart page = sealed.part, part = sealed.part;
  page.page = key_of(2);
  part.index = 2;

  EXPECT_EQ(sealed.open(PageSealer("bob", kSecret), sealed.part), TierStatus::kCorrupt);
  EXPECT_EQ(sealed.open(PageSealer("alice", random_bytes(32, 9)), sealed.part),
            TierStatus::kCorrupt);
  EXPECT_EQ(sealed.open(sealed.sealer, page), TierStatus::kCorrupt);
  EXPECT_EQ(sealed.open(sealed.sealer, part), TierStatus::kCorrupt);
}

TEST(SealedPage, IsAMissInAnotherGenerationOrGeometry) {
  Sealed sealed;
  Generation found{};
  const Generation other = draw_generation();
  PagePart larger = sealed.part, finer = sealed.part;
  larger.page_bytes = 2000;
  finer.num_parts = 4;

  EXPECT_EQ(sealed.sealer.open(sealed.part, sealed.value, sealed.out, found, &other),
            TierStatus::kMiss);
  EXPECT_EQ(sealed.open(sealed.sealer, larger), TierStatus::kMiss);
  EXPECT_EQ(sealed.open(sealed.sealer, finer), TierStatus::kMiss);
}

TEST(SealedPage, IsNamedByTenantPageAndPart) {
  const PageSealer alice("alice", kSecret), bob("bob", kSecret), again("alice", kSecret);
  const std::set<std::string> names{alice.name(key_of(1), 0), alice.name(key_of(1), 1),
                                    alice.name(key_of(2), 0), bob.name(key_of(1), 0)};

  EXPECT_EQ(names.size(), 4U);
  EXPECT_EQ(alice.name(key_of(1), 0), again.name(key_of(1), 0));
  for (const std::string& name : names) {
    EXPECT_THAT(name, ::testing::MatchesRegex("kvtier:[0-9a-f]{48}"));
  }
}

TEST(SealedPage, RefusesAShortSecretAndNoTenant) {
  for (const auto& [tenant, bytes] : {std::pair{"alice", 15U}, std::pair{"", 32U}}) {
    try {
      const PageSealer sealer(tenant, random_bytes(bytes, 1));
      ADD_FAILURE() << "made for '" << tenant << "', " << bytes;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("expected"));
    }
  }
}

struct Circuit {
  std::chrono::steady_clock::time_point time{};
  CircuitBreaker breaker{{.failures = 3,
                          .min_backoff = milliseconds(100),
                          .max_backoff = milliseconds(300),
                          .now = [this] { return time; }}};

  void open() {
    for (int i = 0; i < 3; ++i) breaker.failed();
  }
};

TEST(CircuitBreaker, OpensAfterConsecutiveFailuresOnly) {
  Circuit circuit;
  for (int i = 0; i < 2; ++i) circuit.breaker.failed();
  circuit.breaker.succeeded();
  for (int i = 0; i < 2; ++i) circuit.breaker.failed();
  EXPECT_EQ(circuit.breaker.state(), CircuitState::kClosed);

  circuit.breaker.failed();

  EXPECT_EQ(circuit.breaker.state(), CircuitState::kOpen);
  EXPECT_FALSE(circuit.breaker.probe_due());
}

TEST(CircuitBreaker, OwesOneProbeAfterTheBackOff) {
  Circuit circuit;
  circuit.open();
  circuit.time += milliseconds(99);
  EXPECT_FALSE(circuit.breaker.probe_due());

  circuit.time += milliseconds(1);

  EXPECT_TRUE(circuit.breaker.probe_due());
  EXPECT_FALSE(circuit.breaker.probe_due());
  EXPECT_EQ(circuit.breaker.state(), CircuitState::kHalfOpen);
}

TEST(CircuitBreaker, DoublesTheBackOffUpToItsLimitAndForgetsItOnSuccess) {
  Circuit circuit;
  circuit.open();
  for (const int wait : {100, 200, 300, 300}) {
    circuit.time += milliseconds(wait - 1);
    EXPECT_FALSE(circuit.breaker.probe_due()) << wait;
    circuit.time += milliseconds(1);
    EXPECT_TRUE(circuit.breaker.probe_due()) << wait;
    circuit.breaker.failed();
  }

  circuit.breaker.succeeded();
  EXPECT_EQ(circuit.breaker.state(), CircuitState::kClosed);
  circuit.open();

  circuit.time += milliseconds(100);
  EXPECT_TRUE(circuit.breaker.probe_due());
}

}  // namespace
}  // namespace kvtier::tiers
