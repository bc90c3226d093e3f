#include "kvtier/error.h"
#include "kvtier/remote_tiers.h"

namespace kvtier {

std::vector<std::shared_ptr<PageTier>> make_remote_tiers(const RemoteTiersConfig& config) {
  if (config.empty()) return {};
  throw Error(ErrorCode::kUnimplemented,
              "remote tiers: expected a build with KVTIER_BUILD_REMOTE_TIERS=ON, found OFF");
}

}  // namespace kvtier
