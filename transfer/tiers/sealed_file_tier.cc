#include "transfer/tiers/sealed_file_tier.h"

#include <utility>

namespace kvtier::tiers {
namespace {

PagePart whole(const PageKey& key, std::size_t bytes) {
  return {.page = key, .page_bytes = bytes, .index = 0, .num_parts = 1};
}

FileTierOptions with_room_for_seals(FileTierOptions files) {
  files.max_page_bytes += PageSealer::kOverhead;
  return files;
}

}  // namespace

SealedFileTier::SealedFileTier(FileTierOptions files, const Owner& owner)
    : sealer_(owner.name, owner.secret), files_(with_room_for_seals(std::move(files))) {}

void SealedFileTier::put(std::span<TierPut> pages, Deadline deadline) {
  check_pages(pages, max_page_bytes());
  std::vector<std::vector<std::byte>> sealed(pages.size());
  std::vector<TierPut> puts;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const TierPut& page = pages[i];
    // Sealing is most of the work, and would be for nothing.
    if (contains(page.key, page.bytes.size())) {
      pages[i].status = TierStatus::kOk;
      continue;
    }
    sealed[i] = sealer_.seal(whole(page.key, page.bytes.size()), draw_generation(), page.bytes);
    puts.push_back({.key = page.key, .bytes = sealed[i]});
    places.push_back(i);
  }
  files_.put(puts, deadline);
  for (std::size_t i = 0; i < puts.size(); ++i) pages[places[i]].status = puts[i].status;
}

void SealedFileTier::get(std::span<TierGet> pages, Deadline deadline) {
  check_pages(pages, max_page_bytes());
  std::vector<std::vector<std::byte>> sealed(pages.size());
  std::vector<TierGet> gets;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    sealed[i].resize(pages[i].bytes.size() + PageSealer::kOverhead);
    gets.push_back({.key = pages[i].key, .bytes = sealed[i]});
  }
  files_.get(gets, deadline);
  std::vector<PageKey> corrupt;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    pages[i].status = gets[i].status;
    if (pages[i].status != TierStatus::kOk) continue;
    Generation generation{};
    pages[i].status = sealer_.open(whole(pages[i].key, pages[i].bytes.size()), sealed[i],
                                   pages[i].bytes, generation);
    if (pages[i].status != TierStatus::kOk) corrupt.push_back(pages[i].key);
  }
  if (!corrupt.empty()) files_.remove(corrupt, deadline);
}

void SealedFileTier::remove(std::span<const PageKey> keys, Deadline deadline) {
  files_.remove(keys, deadline);
}

bool SealedFileTier::contains(const PageKey& key, std::size_t bytes) const {
  return files_.contains(key, bytes + PageSealer::kOverhead);
}

std::size_t SealedFileTier::max_page_bytes() const noexcept {
  return files_.max_page_bytes() - PageSealer::kOverhead;
}

std::string SealedFileTier::describe() const { return files_.describe() + ", sealed"; }

}  // namespace kvtier::tiers
