#pragma once

#include "transfer/tiers/remote_cluster.h"

#include <memory>
#include <string>
#include <vector>

namespace kvtier::tiers {

struct MemcachedOptions {
  /// As `RemoteEndpoint::parse` reads them. Every client of a cluster names them alike.
  std::vector<std::string> servers;
  RemoteOptions remote;
};

/// Returns a cluster of memcached servers by libmemcached: its weighted ketama ring chooses the
/// server of a name, its text protocol goes to each. While a server's circuit is open its share of
/// the ring belongs to the others. Throws `kInvalidArgument`.
[[nodiscard]] std::shared_ptr<RemoteCluster> make_memcached_cluster(
    const MemcachedOptions& options);

}  // namespace kvtier::tiers
