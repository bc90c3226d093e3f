#include "transfer/tiers/page_tier.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

namespace kvtier::tiers {
namespace {

template <typename Page>
void check(std::span<const Page> pages, std::size_t max_bytes) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::size_t size = pages[i].bytes.size();
    if (size >= 1 && size <= max_bytes) continue;
    throw_error(ErrorCode::kInvalidArgument, "page ", i, " of a batch: expected 1 to ", max_bytes,
                " bytes, found ", size);
  }
}

}  // namespace

void check_pages(std::span<const TierPut> pages, std::size_t max_bytes) { check(pages, max_bytes); }

void check_pages(std::span<const TierGet> pages, std::size_t max_bytes) { check(pages, max_bytes); }

}  // namespace kvtier::tiers
