#include "kvtier/page_tier.h"

#include "include/types/failure.h"

namespace kvtier {

std::string_view tier_status_name(TierStatus status) noexcept {
  return enumerator_name(status, {"ok", "miss", "corrupt", "full", "unavailable"});
}

}  // namespace kvtier
