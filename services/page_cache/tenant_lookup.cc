#include "services/page_cache/tenant_pages.h"

#include <algorithm>

namespace kvtier::services {

FoundPages TenantPages::lookup(PageLease& lease, const PageQuery& query) {
  FoundPages found{.hits = std::vector<bool>(query.hashes.size()), .pages = {}};
  const std::size_t layers = query.layers.size();
  if (layers == 0) return found;
  std::vector<PageDigest> digests;
  digests.reserve(query.hashes.size() * layers);
  for (const std::string_view hash : query.hashes) {
    for (const std::uint32_t layer : query.layers) {
      digests.push_back(digest_of(lease, {.layer = layer, .hash = hash}));
    }
  }
  if (!backing_.empty()) bring(lease, query, digests);
  const bool wants_pages = query.pages || query.pin;
  std::vector<PageSlot*> pages(layers);
  for (std::size_t i = 0; i < query.hashes.size(); ++i) {
    const Lock lock(mutex_);
    if (lease.closed) throw lease_ended();
    bool hit = true;
    for (std::size_t j = 0; hit && j < layers; ++j) {
      const PageDigest& digest = digests[i * layers + j];
      pages[j] = find(digest);
      hit = pages[j] != nullptr || (!wants_pages && on_disk(digest, lease.config.page_bytes));
    }
    if (!hit) {
      counters_.lookup_misses += query.prefix ? query.hashes.size() - i : 1;
      if (query.prefix) return found;
      continue;
    }
    ++counters_.lookup_hits;
    found.hits[i] = true;
    for (PageSlot* page : pages) {
      if (page == nullptr) continue;  // on the disk
      use(*page);
      if (query.pin) {
        ++lease.pins[page->slot];
        add_pin(*page);
      }
      if (wants_pages) found.pages.push_back(info_of(*page));
    }
  }
  return found;
}

}  // namespace kvtier::services
