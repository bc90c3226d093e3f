#pragma once

#include "transfer/tiers/file_tier.h"
#include "transfer/tiers/io_channel.h"
#include "transfer/tiers/page_index.h"
#include "transfer/tiers/segment.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

namespace kvtier::tiers {

/// The header of a page's record that vouches for no other.
[[nodiscard]] RecordHeader header_of(const PageKey& key, const PagePlace& place);

struct FileTier::State {
  explicit State(const FileTierOptions& wanted);
  ~State();

  /// Makes `active` a segment with room for a record, or returns an errno.
  int make_room(std::uint64_t record);
  /// Makes `active` a segment to which the live pages of the sparsest one have been moved, with
  /// room for a record, or returns an errno with all pages where they were. ENOSPC: it would gain
  /// too little.
  int compact(std::uint64_t record);
  /// Ends the active segment: seals it when nothing in it is doubtful, deletes it when it is empty.
  void retire();
  /// As `FileTier::contains`.
  [[nodiscard]] bool contains(const PageKey& key, std::size_t bytes) const;
  /// Takes a page out of the index, if it is still at that place.
  bool forget(const PageKey& key, const PagePlace& place);
  /// Starts to overwrite a record as dead, with a tag or without. Returns false when no slot is
  /// free: a restart then finds the record again, and again what is wrong with it.
  static bool bury(IoChannel& channel, const PageKey& key, const PagePlace& place,
                   std::uint32_t tag = IoChannel::kForgotten);
  /// Overwrites records as dead, and returns how many are by the deadline. A restart finds the
  /// others again.
  std::size_t bury_all(std::span<const std::pair<PageKey, PagePlace>> pages, Deadline deadline);

  FileTierOptions options;
  SegmentFolder folder;
  std::string path_of_bytes;  ///< For `describe`.

  mutable std::mutex mutex;  // guards index and stats
  PageIndex index;
  TierStats stats;

  std::mutex append_mutex;  // guards appending
  std::condition_variable append_done;
  bool appending = false;           // guards active, and the ends of segments
  std::shared_ptr<Segment> active;  // may be none

  std::unique_ptr<ChannelPool> channels;
};

}  // namespace kvtier::tiers
