#include "transfer/tiers/page_tier.h"

#include "kvtier/error.h"

namespace kvtier::tiers {
namespace {

template <typename Page>
void check(std::span<const Page> pages, std::size_t max_bytes) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::size_t size = pages[i].bytes.size();
    if (size >= 1 && size <= max_bytes) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "page " + std::to_string(i) + " of a batch: expected 1 to " +
                    std::to_string(max_bytes) + " bytes, found " + std::to_string(size));
  }
}

}  // namespace

void check_pages(std::span<const TierPut> pages, std::size_t max_bytes) { check(pages, max_bytes); }

void check_pages(std::span<const TierGet> pages, std::size_t max_bytes) { check(pages, max_bytes); }

}  // namespace kvtier::tiers
