#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvtier::runtime {

/// Which pages leave their frames first: those of which calls have read the fewest rows, old reads
/// counting less. Notified of what happens to every page, asked when frames are wanted. It knows
/// nothing of what may not go (`MayGo` says that), and moves nothing: a page that it has chosen has
/// left once `leave` says so. Ids are small numbers. Nothing but `enter` and `use` of an id seen
/// for the first time allocates, and after `reserve` these do not.
class PageOrder {
 public:
  using Id = std::uint64_t;
  using MayGo = std::function<bool(Id)>;

  /// Of a pool of `num_frames` frames.
  explicit PageOrder(std::size_t num_frames) : num_frames_(std::max<std::size_t>(num_frames, 1)) {}

  /// Makes room for all frames, and for pages up to this one.
  void reserve(Id last);
  /// A page has come to a frame: a new one, or one that was evicted.
  void enter(Id page);
  /// A call needs `rows` rows of a page, wherever it is.
  void use(Id page, std::uint32_t rows);
  /// A page has left its frame and may come back.
  void leave(Id page);
  /// A page, resident or evicted, is no more; its id may be another's.
  void forget(Id page);
  /// Returns up to `count` pages that may go, the first to go first; all of them, when there are
  /// not as many.
  [[nodiscard]] std::vector<Id> choose(std::size_t count, const MayGo& may_go);

 private:
  struct State {
    float mass = 0.0F;           ///< Rows that calls have needed, as they counted at `last_use`.
    std::uint64_t last_use = 0;  ///< Value of `num_uses_`.
    std::size_t place = 0;       ///< In `ring_`, from 1; 0: not resident.
  };

  State& state(Id page);
  [[nodiscard]] float mass(const State& state) const;

  std::size_t num_frames_;
  std::uint64_t num_uses_ = 0;
  std::vector<State> states_;  ///< By page.
  std::vector<Id> ring_;       ///< Resident pages, each in the place of one that has left.
  std::vector<std::size_t> free_places_;
  std::size_t hand_ = 0;
};

}  // namespace kvtier::runtime
