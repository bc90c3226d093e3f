#pragma once

#include "transfer/tiers/remote_cluster.h"

#include <memory>
#include <string>
#include <vector>

namespace kvtier::tiers {

struct RedisOptions {
  /// One node. Empty where sentinels are named.
  std::string server;
  /// Asked in this order for the master's address, whenever a connection is made.
  std::vector<std::string> sentinels{};
  std::string master{};  ///< Its name at the sentinels.
  std::string user{};    ///< Empty: Redis's default user.
  std::string password{};
  RemoteOptions remote{};
};

/// Returns one Redis node, or the master that sentinels name, by hiredis; commands are pipelined. A
/// server that is loading, is no master any more or refuses the password has failed, as one that
/// does not answer. Throws `kInvalidArgument`.
[[nodiscard]] std::shared_ptr<RemoteCluster> make_redis_cluster(const RedisOptions& options);

}  // namespace kvtier::tiers
