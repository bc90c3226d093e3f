#pragma once

#include "runtime/page_tiers.h"
#include "transfer/device.h"
#include "transfer/frame_pool.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

namespace kvtier::runtime {

/// Pages, more than there are frames: those used the longest ago are away in a tier, and brought
/// back when they are needed. A page is named by the address of its record, which stays; its
/// holders ask for the address of its bytes.
///
/// What goes is chosen by a clock over the frames (`choose`): a page that has been written to its
/// end (sealed), that nobody has needed since the hand passed it, that the call under way does not
/// need, and that no captured graph reads. What has come back and was not written to since is still
/// in the tier, and goes again without being written. A page is written there in one state of its
/// contents, which `open` ends.
///
/// Called with the engine's mutex held. Blocks on tiers.
class PagePool final : public transfer::FramePool {
 public:
  /// Makes the host wait until all work that uses pages is done.
  using Wait = std::function<void(transfer::Stream&)>;

  PagePool(transfer::Device& device, std::size_t page_bytes, std::size_t bytes,
           const transfer::PinOptions& options, PageTiers& tiers, Wait wait);

  [[nodiscard]] bool take_all(std::span<std::byte*> pages, transfer::Stream* stream) override;
  void give_back(std::span<std::byte* const> pages, transfer::Event last_use) override;
  void share(std::span<std::byte* const> pages) override;
  [[nodiscard]] bool shared(const std::byte* page) const override;
  [[nodiscard]] std::byte* address(std::byte* page) const override;
  [[nodiscard]] std::uint64_t num_moves() const override { return num_moves_; }
  [[nodiscard]] std::size_t num_shared() const override { return num_shared_; }

  /// Says that a page has been written to its end.
  void seal(std::byte* page);
  /// Tells whether `open` has something to do.
  [[nodiscard]] bool sealed(const std::byte* page) const;
  /// Says that a page, here and held once, is about to be written: copies in tiers count no more.
  void open(std::byte* page);
  /// Keeps a page here for as long as it is held: a captured graph uses its address.
  void keep(std::byte* page);
  /// Tells whether a page was lost by every tier. It is so until it is given back.
  [[nodiscard]] bool lost(const std::byte* page) const;

  /// Frees at least one frame, and more towards `count`, by letting pages go to the tier. Returns
  /// how many. 0: none may go, or the tier takes none, which `why_not` tells.
  std::size_t spill(transfer::Stream& stream, std::size_t count);
  [[nodiscard]] std::string why_not() const;

  /// Makes these pages, repeated or not, be here until the next call of it or of `let_all_go`.
  /// Returns false, nothing changed, when they are more than can be here at once. Throws
  /// `kDataLoss` when one is lost, `kUnavailable` when a tier does not answer in time,
  /// `kResourceExhausted` when the tier does not take the pages in whose place they come.
  bool bring_in(transfer::Stream& stream, std::span<std::byte* const> pages);
  /// Ends what the last `bring_in` said.
  void let_all_go() noexcept { ++call_; }
  /// Most pages that `bring_in` can have here at once.
  [[nodiscard]] std::size_t num_movable() const;

  struct Counters {
    std::uint64_t spilled = 0;   ///< Pages that left their frame.
    std::uint64_t restored = 0;  ///< Pages that came back.
  };
  [[nodiscard]] const Counters& counters() const noexcept { return counters_; }
  [[nodiscard]] std::size_t num_away() const noexcept { return num_away_; }

 private:
  struct Page {
    std::byte* frame = nullptr;  ///< Null: away, or not held.
    std::uint32_t holders = 0;
    std::uint32_t crc = 0;  ///< Of what the tiers have.
    PageVersion version;
    std::uint64_t needed_by = 0;  ///< The last call that needed it.
    bool sealed = false;
    bool kept = false;
    bool used = false;    ///< Needed since the hand of the clock passed.
    bool stored = false;  ///< The first tier has this version.
    bool lost = false;
    bool chosen = false;  ///< To go, by the spill under way.

    [[nodiscard]] bool movable() const { return frame != nullptr && sealed && !kept; }
  };
  static Page& page_of(std::byte* name) { return *reinterpret_cast<Page*>(name); }
  static const Page& page_of(const std::byte* name) { return *reinterpret_cast<const Page*>(name); }
  Page& new_page();
  /// Forgets what tiers have of a page.
  void end_version(Page& page);
  void remove_ended();
  /// Changes whether a page may go, and counts it.
  template <typename Change>
  void update(Page& page, Change change);
  /// Chooses up to `count` pages to go.
  [[nodiscard]] std::vector<Page*> choose(std::size_t count);
  void leave(Page& page);
  /// Reads pages into frames just taken; gives back those of pages that did not come.
  void read_into(std::span<Page* const> pages, std::span<std::byte* const> frames);
  [[noreturn]] void fail_read(std::size_t num_lost, std::size_t num_unavailable) const;

  PageTiers& tiers_;
  Wait wait_;
  std::deque<Page> pages_;  ///< Records; their addresses stay.
  std::vector<Page*> free_pages_;
  std::vector<Page*> in_frame_;  ///< By frame.
  std::vector<PageVersion> ended_;
  std::size_t hand_ = 0;
  std::uint64_t call_ = 1;
  std::uint64_t num_moves_ = 1;
  std::size_t num_shared_ = 0;
  std::size_t num_movable_ = 0;
  std::size_t num_away_ = 0;
  bool refused_ = false;  ///< The tier took none of the last that were to go.
  Counters counters_;
};

}  // namespace kvtier::runtime
