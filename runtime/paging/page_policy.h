#pragma once

#include "kvtier/config.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace kvtier::runtime {

/// Which pages leave their frames first. Notified of what happens to every page, asked when frames
/// are wanted. It knows nothing of what may not go (`MayGo` says that), and moves nothing: a page
/// that it has chosen has left once `leave` says so. Ids are small numbers. Nothing but `enter` and
/// `use` of an id seen for the first time allocates.
class PageOrder {
 public:
  using Id = std::uint64_t;
  using MayGo = std::function<bool(Id)>;

  PageOrder() = default;
  PageOrder(const PageOrder&) = delete;  // held by its base
  PageOrder& operator=(const PageOrder&) = delete;
  virtual ~PageOrder() = default;

  /// A page has come to a frame: a new one, or one that was evicted.
  virtual void enter(Id page) = 0;
  /// A call needs `rows` rows of a page, wherever it is.
  virtual void use(Id page, std::uint32_t rows) = 0;
  /// A page has left its frame and may come back.
  virtual void leave(Id page) = 0;
  /// A page, resident or evicted, is no more; its id may be another's.
  virtual void forget(Id page) = 0;
  /// Returns up to `count` pages that may go, the first to go first; all of them, when there are
  /// not as many.
  [[nodiscard]] virtual std::vector<Id> choose(std::size_t count, const MayGo& may_go) = 0;
};

/// Makes the order of a pool of `num_frames` frames.
[[nodiscard]] std::unique_ptr<PageOrder> make_page_order(PagePolicy policy, std::size_t num_frames);

}  // namespace kvtier::runtime
