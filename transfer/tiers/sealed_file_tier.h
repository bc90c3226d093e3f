#pragma once

#include "transfer/tiers/file_tier.h"
#include "transfer/tiers/sealed_page.h"

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace kvtier::tiers {

/// One owner's pages in a folder, sealed as `PageSealer` says: AES-256-GCM under a key of the
/// owner, with the page's key and size as associated data. A record that another owner or another
/// secret has sealed, that is another page's, or that is cut or changed is no page: kMiss or
/// kCorrupt, and gone. Keys of pages are stored as they are, so they must say nothing by
/// themselves. Thread-safe.
class SealedFileTier final : public PageTier {
 public:
  struct Owner {
    std::string_view name;
    std::span<const std::byte> secret;  ///< 16 bytes or more.
  };

  /// `files.max_page_bytes` is that of whole pages. Throws as `FileTier` and `PageSealer`.
  SealedFileTier(FileTierOptions files, const Owner& owner);

  void put(std::span<TierPut> pages, Deadline deadline) override;
  void get(std::span<TierGet> pages, Deadline deadline) override;
  void remove(std::span<const PageKey> keys, Deadline deadline) override;
  /// As `FileTier::contains` and `FileTier::clear`.
  [[nodiscard]] bool contains(const PageKey& key, std::size_t bytes) const;
  void clear() { files_.clear(); }
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override;
  [[nodiscard]] TierStats stats() const override { return files_.stats(); }
  [[nodiscard]] std::string_view kind() const noexcept override { return "file"; }
  [[nodiscard]] std::string describe() const override;

 private:
  PageSealer sealer_;
  FileTier files_;
};

}  // namespace kvtier::tiers
