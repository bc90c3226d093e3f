#include "runtime/sequence/prefix_store.h"

#include "runtime/sequence/row_cache.h"
#include "transfer/kv/row_checks.h"

#include <algorithm>
#include <utility>

namespace kvtier::runtime {

void PrefixStore::hold(const Entry& entry) {
  pools_.pages->share(entry.pages);
  for (std::size_t j = 0; j < entry.slabs.size(); ++j) {
    pools_.sketches[j].slabs->share(entry.slabs[j]);
  }
}

void PrefixStore::let_go(transfer::Stream& stream, const Entry& entry) {
  pools_.pages->give_back(entry.pages, stream.record());
  for (std::size_t j = 0; j < entry.slabs.size(); ++j) {
    pools_.sketches[j].slabs->give_back(entry.slabs[j], stream.record());
  }
}

void PrefixStore::touch(std::span<const PrefixKey> keys) {
  for (std::size_t i = keys.size(); i-- > 0;) {
    order_.splice(order_.begin(), order_, entry(keys[i]).order);
  }
}

bool PrefixStore::has_lost(const Entry& entry) const {
  return pools_.pages->has_tiers() &&
         std::any_of(entry.pages.begin(), entry.pages.end(),
                     [](const Page* page) { return PagePool::lost(*page); });
}

std::size_t PrefixStore::longest(std::span<const PrefixKey> keys) const {
  const auto missing = std::find_if(keys.begin(), keys.end(), [this](const PrefixKey& key) {
    const auto found = entries_.find(key);
    return found == entries_.end() || has_lost(found->second);
  });
  return static_cast<std::size_t>(missing - keys.begin());
}

bool PrefixStore::ensure_sinks_resident(transfer::Stream& stream, std::span<const PrefixKey> keys) {
  if (!pools_.pages->has_tiers()) return true;
  std::vector<Page*> pages;
  for (const PrefixKey& key : keys.first(std::min(num_sink_pages(), keys.size()))) {
    const Entry& stored = entry(key);
    pages.insert(pages.end(), stored.pages.begin(), stored.pages.end());
  }
  PagePool& pool = *pools_.pages;
  pool.share(pages);  // other calls may drop the entries while this one waits
  try {
    const bool resident = pool.ensure_resident(stream, pages);
    pool.give_back(pages, transfer::Event());
    return resident;
  } catch (...) {
    pool.give_back(pages, transfer::Event());
    throw;
  }
}

std::uint64_t PrefixStore::repair_sinks(transfer::Stream& stream, std::span<const PrefixKey> keys,
                                        bool last) {
  const transfer::KvGeometry& kv = pools_.kv;
  if (!kv.row_checks) return 0;
  std::uint64_t changed = 0;
  for (std::size_t i = 0; i < std::min(num_sink_pages(), keys.size()); ++i) {
    const std::int64_t begin = static_cast<std::int64_t>(i) * kv.page_tokens;
    const std::int64_t end = std::min<std::int64_t>(begin + kv.page_tokens, kv.sink_capacity);
    bool dropped = false;
    for (Page* page : entry(keys[i]).pages) {
      const auto of_page = static_cast<std::uint64_t>(
          transfer::num_changed_rows(kv, PagePool::address(*page), begin, end));
      changed += of_page;
      if (of_page > 0 && (last || !pools_.pages->discard(*page))) dropped = true;
    }
    if (!dropped) continue;
    forget(stream, keys[i]);
    break;
  }
  return changed;
}

void PrefixStore::attach(transfer::Stream& stream, std::span<const PrefixKey> keys,
                         SequenceMemory& memory) {
  if (keys.empty()) return;
  touch(keys);
  std::vector<const Entry*> entries;
  entries.reserve(keys.size());
  for (const PrefixKey& key : keys) entries.push_back(&entry(key));
  std::vector<Page*> held;
  for (std::size_t l = 0; l < memory.layers().size(); ++l) {
    LayerState& layer = memory.layers()[l];
    held.clear();
    for (const Entry* stored : entries) held.push_back(stored->pages[l]);
    layer.pages.share(stream, held);
    for (std::size_t j = 0; j < layer.slabs.size(); ++j) {
      held.clear();
      for (std::size_t i = 0; i < keys.size(); ++i) {
        // The last page in a slab, or of the prefix, has a slab with all that is needed.
        if (i + 1 < keys.size() && slab_of(i) == slab_of(i + 1)) continue;
        held.push_back(entries[i]->slabs[j][l]);
      }
      layer.slabs[j].share(stream, held);
    }
  }
  memory.begin_at(stream, static_cast<std::int64_t>(keys.size()) * pools_.kv.page_tokens);
}

void PrefixStore::publish(transfer::Stream& stream, std::span<const PrefixKey> keys,
                          SequenceMemory& memory) {
  const std::size_t known = longest(keys);
  adopt(stream, keys.first(known), memory);
  for (std::size_t page = known; page < keys.size(); ++page) {
    forget(stream, keys[page]);  // pages that a tier has lost, and those after them
    add(stream, keys, page, memory);
  }
  touch(keys);
  memory.limit_room(stream);
}

void PrefixStore::adopt(transfer::Stream& stream, std::span<const PrefixKey> stored,
                        SequenceMemory& memory) {
  const auto exchange = [&](PageTable& table, std::size_t at, Page* page) {
    const auto i = static_cast<std::int64_t>(at);
    if (&table.page(i) == page) return;
    table.pool().share({&page, 1});
    table.replace(stream, i, *page);
  };
  for (std::size_t l = 0; l < memory.layers().size(); ++l) {
    LayerState& layer = memory.layers()[l];
    bool forgotten = false;
    for (std::size_t i = 0; i < stored.size(); ++i) {
      const Entry& known = entry(stored[i]);
      Page* const page = known.pages[l];
      // A captured graph reads the page where it is: a stored one must be resident, and stay.
      const bool captured = memory.captured();
      if (!captured || PagePool::address(*page) != nullptr) {
        const auto token = static_cast<std::int64_t>(i) * pools_.kv.page_tokens;
        // Stored rows may differ from the sequence's own by rounding: its cached rows would be
        // attended among them.
        if (!forgotten && &layer.pages.page(static_cast<std::int64_t>(i)) != page) {
          forget_cached_rows(stream, pools_, layer, token);
          forgotten = true;
        }
        exchange(layer.pages, i, page);
        if (captured) pools_.pages->pin(*page);
      }
      const bool ends_slab = slab_of(i) != slab_of(i + 1);
      for (std::size_t j = 0; ends_slab && j < layer.slabs.size(); ++j) {
        exchange(layer.slabs[j], slab_of(i), known.slabs[j][l]);
      }
    }
  }
}

void PrefixStore::add(transfer::Stream& stream, std::span<const PrefixKey> keys, std::size_t page,
                      SequenceMemory& memory) {
  Entry fresh;
  fresh.slabs.resize(pools_.sketches.size());
  for (const LayerState& layer : memory.layers()) {
    fresh.pages.push_back(&layer.pages.page(static_cast<std::int64_t>(page)));
    for (std::size_t j = 0; j < fresh.slabs.size(); ++j) {
      fresh.slabs[j].push_back(&layer.slabs[j].page(static_cast<std::int64_t>(slab_of(page))));
    }
  }
  // The pages before it in the slab need no older copy of the slab.
  for (std::size_t i = page; i-- > 0 && slab_of(i) == slab_of(page);) {
    Entry& before = entry(keys[i]);
    if (before.slabs == fresh.slabs) continue;
    const Entry newer{.pages = {}, .slabs = fresh.slabs, .order = {}};
    hold(newer);
    let_go(stream, Entry{.pages = {}, .slabs = before.slabs, .order = {}});
    before.slabs = fresh.slabs;
  }
  hold(fresh);
  order_.push_front(keys[page]);
  fresh.order = order_.begin();
  entries_.emplace(keys[page], std::move(fresh));
}

bool PrefixStore::evict_one(transfer::Stream& stream) {
  if (order_.empty()) return false;
  forget(stream, PrefixKey(order_.back()));
  ++evicted_;
  return true;
}

void PrefixStore::forget(transfer::Stream& stream, const PrefixKey& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return;
  let_go(stream, found->second);
  order_.erase(found->second.order);
  entries_.erase(found);
}

}  // namespace kvtier::runtime
