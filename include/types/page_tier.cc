#include "kvtier/page_tier.h"

namespace kvtier {

std::string_view tier_status_name(TierStatus status) noexcept {
  switch (status) {
    case TierStatus::kOk:
      return "ok";
    case TierStatus::kMiss:
      return "miss";
    case TierStatus::kCorrupt:
      return "corrupt";
    case TierStatus::kFull:
      return "full";
    case TierStatus::kUnavailable:
      return "unavailable";
  }
  return "unknown";
}

}  // namespace kvtier
