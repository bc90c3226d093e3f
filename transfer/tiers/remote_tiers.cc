#include "kvtier/remote_tiers.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/tiers/key_file.h"
#include "transfer/tiers/memcached_cluster.h"
#include "transfer/tiers/redis_cluster.h"
#include "transfer/tiers/remote_tier.h"

#include <cstddef>

namespace kvtier {
namespace {

void expect(bool good, const std::string& what, const std::string& expected,
            const std::string& found) {
  if (good) return;
  throw_error(ErrorCode::kInvalidArgument, "remote tiers: ", what, ": expected ", expected,
              ", found ", found);
}

std::vector<std::byte> secret_of(const RemoteTiersConfig& config) {
  if (!config.key_file.empty()) {
    return tiers::read_key_file("remote tiers: key file", config.key_file);
  }
  std::vector<std::byte> secret;
  for (int i = 0; i < 2; ++i) {
    for (const std::uint8_t byte : tiers::draw_generation()) secret.push_back(std::byte{byte});
  }
  return secret;
}

std::string password_of(const RemoteTiersConfig& config) {
  if (config.redis_password_file.empty()) return {};
  const std::string text =
      tiers::read_small_file("remote tiers: Redis password file", config.redis_password_file);
  const std::string line = text.substr(0, text.find_first_of("\r\n"));
  expect(!line.empty(), "Redis password file", "a password in its first line",
         "none in " + config.redis_password_file);
  return line;
}

}  // namespace

std::vector<std::shared_ptr<PageTier>> make_remote_tiers(const RemoteTiersConfig& config) {
  const bool redis = !config.redis.empty() || !config.redis_sentinels.empty();
  const std::string redis_options =
      config.redis_master + config.redis_user + config.redis_password_file;
  expect(redis || redis_options.empty(), "Redis", "a server or sentinels",
         "none beside \"" + redis_options + "\"");
  expect(!config.empty() || config.key_file.empty(), "servers", "some with a key file",
         "none beside " + config.key_file);
  if (config.empty()) return {};

  tiers::RemoteOptions remote;
  remote.ttl = config.ttl;
  std::vector<std::shared_ptr<tiers::RemoteCluster>> clusters;
  if (!config.memcached.empty()) {
    clusters.push_back(
        tiers::make_memcached_cluster({.servers = config.memcached, .remote = remote}));
  }
  if (redis) {
    clusters.push_back(tiers::make_redis_cluster({.server = config.redis,
                                                  .sentinels = config.redis_sentinels,
                                                  .master = config.redis_master,
                                                  .user = config.redis_user,
                                                  .password = password_of(config),
                                                  .remote = remote}));
  }
  const std::vector<std::byte> secret = secret_of(config);
  std::vector<std::shared_ptr<PageTier>> made;
  for (auto& cluster : clusters) {
    made.push_back(std::make_shared<tiers::RemoteTier>(
        std::move(cluster), tiers::RemoteTierOptions{.tenant = config.owner, .secret = secret}));
  }
  return made;
}

}  // namespace kvtier
