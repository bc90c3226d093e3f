#pragma once

#include "kvtier/error.h"

#include "tests/transfer/tiers/remote_servers.h"
#include "transfer/tiers/memcached_cluster.h"
#include "transfer/tiers/redis_cluster.h"
#include "transfer/tiers/remote_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace kvtier::tiers {

inline constexpr std::size_t kValueLimit = 4096;
inline constexpr std::size_t kPartBytes = kValueLimit - PageSealer::kOverhead;

inline Deadline in(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

inline std::vector<std::byte> secret(std::uint8_t n) {
  return std::vector<std::byte>(32, std::byte{n});
}

struct Page {
  PageKey key{};
  std::vector<std::byte> bytes;

  explicit Page(std::uint64_t seed, std::size_t size = 1000) : bytes(size) {
    std::mt19937_64 random(seed);
    for (auto& byte : key) byte = static_cast<std::uint8_t>(random());
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  }
};

inline TierStatus put(PageTier& tier, const Page& page,
                      std::chrono::milliseconds time = testing::kPatience) {
  TierPut one{.key = page.key, .bytes = page.bytes};
  tier.put({&one, 1}, in(time));
  return one.status;
}

/// The status; with kOk the bytes have been compared too.
inline TierStatus get(PageTier& tier, const Page& page,
                      std::chrono::milliseconds time = testing::kPatience) {
  std::vector<std::byte> bytes(page.bytes.size());
  TierGet one{.key = page.key, .bytes = bytes};
  tier.get({&one, 1}, in(time));
  if (one.status == TierStatus::kOk) {
    EXPECT_EQ(bytes, page.bytes);
  }
  return one.status;
}

/// Any engine, with small values and a clock that stands still unless a test moves it.
class RemoteTiers : public ::testing::TestWithParam<testing::Engine> {
 protected:
  RemoteTiers() {
    std::string pattern = "/tmp/kvtier-remote-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    remote_.value_limit = kValueLimit;
    remote_.io_timeout = std::chrono::seconds(2);  // passes for a paused server alone
    remote_.circuit.failures = 2;
    remote_.circuit.now = [this] {
      return std::chrono::steady_clock::time_point(std::chrono::milliseconds(now_ms_.load()));
    };
  }
  ~RemoteTiers() override { std::filesystem::remove_all(folder_); }

  void start(std::vector<std::string> options = {}) {
    server_ =
        std::make_unique<testing::RemoteServerProcess>(GetParam(), folder_ / "socket", options);
    connect(server_->endpoint());
  }
  void connect(const std::string& endpoint) {
    cluster_ = GetParam() == testing::Engine::kMemcached
                   ? make_memcached_cluster({.servers = {endpoint}, .remote = remote_})
                   : make_redis_cluster({.server = endpoint, .remote = remote_});
    tier_ = tier_of("alice");
  }
  std::unique_ptr<RemoteTier> tier_of(const std::string& tenant) const {
    return std::make_unique<RemoteTier>(cluster_,
                                        RemoteTierOptions{.tenant = tenant, .secret = secret(1)});
  }
  static std::string name_of(const Page& page, std::uint32_t part = 0) {
    return PageSealer("alice", secret(1)).name(page.key, part);
  }
  /// Lets the back-off pass and waits until the circuits are closed again.
  [[nodiscard]] bool recovers() {
    return kvtier::testing::eventually([this] {
      now_ms_ += 60'000;
      (void)get(*tier_, Page(999), std::chrono::milliseconds(1000));
      for (const RemoteServerState& server : cluster_->servers()) {
        if (server.circuit != CircuitState::kClosed) return false;
      }
      return true;
    });
  }

  std::filesystem::path folder_;
  std::atomic<std::int64_t> now_ms_ = 1;
  RemoteOptions remote_;
  std::unique_ptr<testing::RemoteServerProcess> server_;
  std::shared_ptr<RemoteCluster> cluster_;
  std::unique_ptr<RemoteTier> tier_;
};

}  // namespace kvtier::tiers
