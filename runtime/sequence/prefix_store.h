#pragma once

#include "runtime/sequence/prefix_key.h"
#include "runtime/sequence/sequence_memory.h"
#include "transfer/device/device.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

namespace kvtier::runtime {

/// Pages of sequences, found by what their tokens are: a tree of pages, each with the sketch slabs
/// that its tokens are in. Holds the frames like any sequence, until a sequence needs them: then
/// the page at the end of a prefix that was used the longest ago goes. Called with the engine's
/// mutex held.
class PrefixStore {
 public:
  explicit PrefixStore(Pools& pools) : pools_(pools) {}
  PrefixStore(const PrefixStore&) = delete;  // holds frames
  PrefixStore& operator=(const PrefixStore&) = delete;

  /// Returns how many of these pages, from the first, are stored, and not known to be lost.
  [[nodiscard]] std::size_t longest(std::span<const PrefixKey> keys) const;

  /// Brings in the pages whose first tokens become sinks, until pages are brought in next. Returns
  /// false when they cannot be resident at once. Throws what `PagePool::ensure_resident` throws.
  bool ensure_sinks_resident(transfer::Stream& stream, std::span<const PrefixKey> keys);
  /// With checks of rows: compares those whose copies become sinks, of resident pages that no work
  /// writes to. A page with a changed row is taken from a tier when it is needed next. Where no
  /// tier has it, and with `last`, its entry is dropped, and what follows is found no more. Returns
  /// how many rows have changed.
  std::uint64_t repair_sinks(transfer::Stream& stream, std::span<const PrefixKey> keys, bool last);
  /// Makes an empty sequence begin with these pages, all stored and the sinks' resident: it holds
  /// them and their slabs as well.
  void attach(transfer::Stream& stream, std::span<const PrefixKey> keys, SequenceMemory& memory);

  /// Stores the pages of a sequence that has at least these tokens in every layer. Where a page is
  /// stored already, the sequence holds the stored one instead of its own.
  void publish(transfer::Stream& stream, std::span<const PrefixKey> keys, SequenceMemory& memory);

  /// Drops one page of every layer and its slabs. Returns false when there is none.
  bool evict_one(transfer::Stream& stream);

  /// Pages of all layers together count once.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] std::uint64_t evicted() const noexcept { return evicted_; }

 private:
  struct KeyHash {
    std::size_t operator()(const PrefixKey& key) const noexcept {
      std::size_t hash = 0;
      std::memcpy(&hash, key.data(), sizeof(hash));
      return hash;
    }
  };
  struct Entry {
    std::vector<Page*> pages;               ///< Per layer.
    std::vector<std::vector<Page*>> slabs;  ///< Per sketch and layer: those of its tokens.
    std::list<PrefixKey>::iterator order;
  };

  /// Pages whose rows may become sinks.
  [[nodiscard]] std::size_t num_sink_pages() const {
    const auto unit = static_cast<std::size_t>(pools_.kv.page_tokens);
    return (static_cast<std::size_t>(pools_.kv.sink_capacity) + unit - 1) / unit;
  }
  /// Returns whether a tier has lost a page of the entry.
  [[nodiscard]] bool has_lost(const Entry& entry) const;
  /// Lets the entry hold its frames, or gives them back.
  void hold(const Entry& entry);
  void let_go(transfer::Stream& stream, const Entry& entry);
  /// Puts the pages before all others, the first of them foremost.
  void touch(std::span<const PrefixKey> keys);
  Entry& entry(const PrefixKey& key) { return entries_.at(key); }
  [[nodiscard]] std::size_t slab_of(std::size_t page) const {
    return page * static_cast<std::size_t>(pools_.kv.page_tokens) / hashing::kBlockTokens;
  }
  /// Puts stored pages, and slabs that they fill, in the place of the sequence's own, whose cached
  /// rows are forgotten from there on.
  void adopt(transfer::Stream& stream, std::span<const PrefixKey> stored, SequenceMemory& memory);
  /// Drops a page, if it is stored.
  void forget(transfer::Stream& stream, const PrefixKey& key);
  /// Stores the page `page` of these, after all before it.
  void add(transfer::Stream& stream, std::span<const PrefixKey> keys, std::size_t page,
           SequenceMemory& memory);

  Pools& pools_;
  std::unordered_map<PrefixKey, Entry, KeyHash> entries_;
  std::list<PrefixKey> order_;  ///< Latest use first; a page comes before those that follow it.
  std::uint64_t evicted_ = 0;
};

}  // namespace kvtier::runtime
