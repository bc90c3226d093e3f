#include "runtime/engine/session.h"

#include "kvtier/memory.h"

#include "include/types/failure.h"
#include "runtime/sequence/prefix_store.h"
#include "runtime/sequence/row_cache.h"

#include <algorithm>
#include <atomic>
#include <string>

namespace kvtier::runtime {

namespace {

/// Tries to take `count` frames of `pool`: pages go to the tier below, and then stored prefixes go,
/// until there are enough.
template <typename Take>
bool take_by_eviction(EngineState& engine, transfer::Stream& stream, PagePool& pool,
                      std::int64_t count, Take take) {
  // Fail early: even evicting everything would not free `count` frames.
  const std::size_t most = pool.has_tiers() ? pool.num_movable() : pool.num_frames();
  if (count > static_cast<std::int64_t>(most)) return false;
  while (!take()) {
    // Only the frames that are not free; at least one, since `take` has failed.
    const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(count, 1));
    if (pool.evict(stream, wanted - std::min(pool.num_free(), wanted - 1)) > 0) continue;
    if (!engine.prefixes.evict_one(stream)) return false;
  }
  return true;
}

/// As `take_by_eviction`; while another call waits for pages, waits for that call too, whose pages
/// may be evicted after it.
template <typename Take>
bool evicting(EngineState& engine, transfer::Stream& stream, PagePool& pool, std::int64_t count,
              Take take) {
  do {
    if (take_by_eviction(engine, stream, pool, count, take)) return true;
  } while (pool.wait_for_lease());
  return false;
}

/// Bytes of the sketches that a session holds.
std::size_t sketch_bytes(SequenceMemory& memory) {
  std::size_t bytes = 0;
  for (const LayerState& layer : memory.layers()) {
    for (const PageTable& slabs : layer.slabs) {
      bytes += static_cast<std::size_t>(slabs.size()) * slabs.pool().page_bytes();
    }
  }
  return bytes;
}

/// Holds `count` slabs of every sketch. Throws `kResourceExhausted` with some of them taken.
void grow_slabs(EngineState& engine, PageAccount& account, transfer::Stream& stream, int index,
                LayerState& layer, std::int64_t count) {
  for (PageTable& slabs : layer.slabs) {
    const std::int64_t more = count - slabs.size();
    PagePool& pool = slabs.pool();
    if (evicting(engine, stream, pool, more, [&] { return slabs.grow(stream, count); })) {
      account.add_sketches(static_cast<std::size_t>(std::max<std::int64_t>(more, 0)) *
                           pool.page_bytes());
      continue;
    }
    throw_error(ErrorCode::kResourceExhausted, "sketch blocks: expected ", more, " free for layer ",
                index, ", found ", pool.num_free(), " of ", pool.num_frames(),
                " (memory.device_bytes)");
  }
}

}  // namespace

SessionState::SessionState(std::shared_ptr<EngineState> engine, const SessionConfig& config)
    : engine_(std::move(engine)),
      max_tokens_(config.capacity_tokens > 0 ? config.capacity_tokens
                                             : engine_->config.memory.max_session_tokens) {
  const std::int64_t limit = engine_->config.memory.max_session_tokens;
  if (config.capacity_tokens < 0 || config.capacity_tokens > limit) {
    throw_invalid("capacity_tokens", join("0..", limit, " (memory.max_session_tokens)"),
                  config.capacity_tokens);
  }
  // Before the engine is locked: a digest of a long prompt takes milliseconds.
  root_key_ = root_key(engine_->prefix_key, config.model_fingerprint, config.tenant_secret);
  const std::size_t most_ids =
      std::min(config.token_ids.size(), static_cast<std::size_t>(max_tokens_));
  const std::vector<PrefixKey> asked = keys_of(config.token_ids.first(most_ids));
  SubmissionScope scope(engine_->submission, {});
  engine_->pools.collect_retired();
  // Locals until nothing can fail any more: they are to be destroyed within a submission scope.
  auto account =
      std::make_unique<PageAccount>(engine_->quotas, config.tenant, config.max_page_bytes);
  if (config.whole) take_whole(*account);
  auto memory = std::make_shared<SequenceMemory>(engine_->pools, max_tokens_);
  flags_ = engine_->statistics.open_session(scope.stream());
  try {
    memory->clear(scope.stream());
    find_prefix(scope, *account, asked);
    engine_->statistics.prefix_tokens_asked += config.token_ids.size();
    account->add(keys_.size() * memory->layers().size());
    engine_->prefixes.attach(scope.stream(), keys_, *memory);
    account->add_sketches(sketch_bytes(*memory));
  } catch (...) {
    memory->release(scope.stream());  // what was enqueued may be under way
    engine_->statistics.close_session(flags_, scope.stream());
    throw;
  }
  memory_ = std::move(memory);
  scope.finish();
  account_ = std::move(account);
}

SessionState::SessionState(SubmissionScope& scope, const SessionState& parent,
                           std::shared_ptr<SequenceMemory> memory)
    : engine_(parent.engine_),
      max_tokens_(parent.max_tokens_),
      root_key_(parent.root_key_),
      keys_(parent.keys_),
      owns_memory_(false) {
  std::size_t pages = 0;
  for (const LayerState& layer : memory->layers()) {
    pages += static_cast<std::size_t>(layer.pages.size());
  }
  account_ = std::make_unique<PageAccount>(*parent.account_, pages);
  account_->add_sketches(sketch_bytes(*memory));
  flags_ = engine_->statistics.open_session(scope.stream());
  memory_ = std::move(memory);
}

void SessionState::take_whole(PageAccount& account) const {
  const EngineState& engine = *engine_;
  const int rows = engine.pools.row_cache == nullptr
                       ? 0
                       : engine.pools.row_cache->shape.num_sets * transfer::kSetWays;
  const SessionMemory wanted = session_memory(engine.config, max_tokens_, rows);
  const auto check = [&](std::size_t needed, std::size_t all, std::size_t taken, const char* what) {
    const std::size_t left = all - std::min(all, taken);
    if (needed <= left) return;
    throw_error(ErrorCode::kResourceExhausted, "a session of ", max_tokens_, " tokens: expected ",
                show_bytes(needed), " of ", what, " for all of them, found ", show_bytes(left),
                " of ", show_bytes(all), "; it takes ",
                describe(wanted, engine.config.memory.placement));
  };
  const std::size_t page = engine.quotas.page_bytes();
  const std::size_t in_tier = tier_room(engine.config.memory, page).sure;
  // A frame stays for pages to come back to.
  const std::size_t all = engine.pools.pages->num_frames() + in_tier - (in_tier > 0 ? 1 : 0);
  check(wanted.pages, all * page, engine.quotas.committed_pages() * page, "pages");
  std::size_t slabs = 0;
  for (const SketchStore& sketch : engine.pools.sketches) {
    slabs += sketch.slabs->num_frames() * sketch.slabs->page_bytes();
  }
  check(wanted.sketches, slabs, engine.quotas.committed_sketches(), "sketches");
  account.promise(wanted.pages / page, wanted.sketches);
}

void SessionState::find_prefix(SubmissionScope& scope, const PageAccount& account,
                               std::span<const PrefixKey> asked) {
  bool found = false;
  bool repaired = false;
  while (!found) {
    keys_.assign(asked.begin(), asked.end());
    const std::size_t room =
        account.most() / static_cast<std::size_t>(engine_->config.model.layers);
    keys_.resize(std::min(engine_->prefixes.longest(keys_), room));
    try {
      found = engine_->prefixes.ensure_sinks_resident(scope.stream(), keys_);
      // What is stored may be less by now.
      if (scope.workspace_lost() || (found && !check_sinks(scope, std::exchange(repaired, true)))) {
        found = false;
        continue;
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInternal) throw;
      // A page that is lost ends the prefix: the next look finds the one before it.
      if (error.code() == ErrorCode::kDataLoss) continue;
      engine_->log(LogLevel::kWarning, std::string("a stored prefix is left out: ") + error.what());
    }
    if (!found) keys_.clear();
    found = true;
  }
  engine_->statistics.prefix_tokens_attached +=
      keys_.size() * static_cast<std::size_t>(engine_->kv.page_tokens);
}

bool SessionState::check_sinks(SubmissionScope& scope, bool last) {
  if (!engine_->kv.row_checks || keys_.empty()) return true;
  engine_->submission.wait(scope.stream());
  const std::uint64_t changed = engine_->prefixes.repair_sinks(scope.stream(), keys_, last);
  if (changed == 0) return true;
  engine_->log(LogLevel::kError, "rows of a stored prefix: expected as they were written, found " +
                                     std::to_string(changed) + " changed");
  flags_->rows_corrupt += changed;
  (void)take_corrupt();
  return false;
}

void SessionState::publish(SubmissionScope& scope, std::vector<PrefixKey> keys) {
  const std::size_t known = std::min(keys.size(), keys_.size());
  if (!std::equal(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(known), keys_.begin())) {
    throw Error(ErrorCode::kInvalidArgument,
                "token_ids: expected those that the session was opened with or that were published "
                "before, found others");
  }
  engine_->prefixes.publish(scope.stream(), keys, *memory_);
  if (keys.size() > keys_.size()) keys_ = std::move(keys);
}

SessionState::~SessionState() {
  // Frames and memory go back with the event of the last enqueued use, so nothing is waited for.
  try {
    const std::lock_guard lock(engine_->submission.mutex());
    const transfer::CurrentDevice current(*engine_->device);
    account_.reset();
    transfer::Stream& stream = engine_->submission.main();
    stream.wait(last_use_);
    engine_->workspace.wait_for_last_use(stream);  // other holders' uses of shared frames
    drop(stream, std::move(memory_));
    engine_->statistics.close_session(flags_, stream);
    engine_->pools.collect_retired();
  } catch (...) {
    // The device has failed; its memory dies with the engine.
  }
}

void SessionState::check_room(int index, std::int64_t more) const {
  const std::int64_t length = layer(index).length;
  if (more <= max_tokens_ - length) return;
  throw_error(ErrorCode::kResourceExhausted, "layer ", index, ": expected at most ", max_tokens_,
              " tokens (the session's capacity), found ", length, " and ", more, " more");
}

std::size_t SessionState::pages_lacking(const LayerState& layer, std::int64_t more) const {
  const std::int64_t pages = ceil_div(layer.length + more, engine_->kv.page_tokens);
  return static_cast<std::size_t>(std::max<std::int64_t>(pages - layer.pages.size(), 0));
}

void SessionState::ensure_slabs(transfer::Stream& stream, int index, std::int64_t more) {
  check_room(index, more);
  LayerState& layer = this->layer(index);
  account_->check(pages_lacking(layer, more));
  grow_slabs(*engine_, *account_, stream, index, layer,
             ceil_div(layer.length + more, hashing::kBlockTokens));
}

void SessionState::ensure_capacity(transfer::Stream& stream, int index, std::int64_t more) {
  LayerState& layer = this->layer(index);
  if (engine_->pools.pages->has_tiers() && more > 0) make_tail_writable(stream, layer);
  if (more <= layer.capacity - layer.length) return;
  check_room(index, more);
  const std::int64_t tokens = layer.length + more;
  const std::int64_t page_tokens = engine_->kv.page_tokens;
  const std::int64_t num_pages = ceil_div(tokens, page_tokens);
  const std::int64_t old_pages = layer.pages.size();
  const auto grow = [&] { return layer.pages.grow(stream, num_pages); };
  PageAccount::Addition addition(*account_, pages_lacking(layer, more));
  if (!evicting(*engine_, stream, *engine_->pools.pages,
                std::max<std::int64_t>(num_pages - old_pages, 0), grow)) {
    throw_error(ErrorCode::kResourceExhausted, "page pool: expected ", num_pages - old_pages,
                " free pages for layer ", index, ", found ", engine_->pools.pages->num_free(),
                " of ", engine_->pools.pages->num_frames(), " (memory.host_bytes)",
                engine_->pools.pages->eviction_failure_reason());
  }
  addition.keep();
  if (memory_->captured()) memory_->keep_pages(layer, old_pages);
  try {
    grow_slabs(*engine_, *account_, stream, index, layer, ceil_div(tokens, hashing::kBlockTokens));
    unshare_tail(stream, index);
  } catch (const Error&) {
    shrink(stream, layer, old_pages * page_tokens);
    throw;
  }
  layer.capacity = memory_->room(layer);
  memory_->set_length(stream, layer);
}

void SessionState::unshare_tail(transfer::Stream& stream, int index) {
  struct Tail {
    PageTable* table;
    std::int64_t i;
    bool paged;
    Page* fresh;
  };
  LayerState& layer = this->layer(index);
  std::vector<Tail> tails;
  tails.reserve(1 + layer.slabs.size());
  const auto give_back = [&tails] {
    for (const Tail& tail : tails) tail.table->pool().give_back({&tail.fresh, 1}, {});
  };
  const auto look_at = [&](PageTable& table, std::int64_t unit, bool paged) {
    const std::int64_t i = layer.length / unit;
    if (layer.length % unit == 0 || !table.shared(i)) return;
    Page* fresh = nullptr;
    const auto take = [&] { return table.pool().take_all({&fresh, 1}, &stream); };
    if (!evicting(*engine_, stream, table.pool(), 1, take)) {
      give_back();
      throw_error(ErrorCode::kResourceExhausted, paged ? "page pool" : "sketch blocks",
                  ": expected a free one for the copy of a shared one in layer ", index,
                  ", found 0 of ", table.pool().num_frames(),
                  (paged ? " (memory.host_bytes)" + table.pool().eviction_failure_reason()
                         : " (memory.device_bytes)"));
    }
    tails.push_back({&table, i, paged, fresh});
  };
  look_at(layer.pages, engine_->kv.page_tokens, true);
  for (PageTable& slabs : layer.slabs) look_at(slabs, hashing::kBlockTokens, false);

  if (engine_->pools.pages->has_tiers()) {
    try {  // for frames the page may have been evicted, or a stored prefix that shared it dropped
      make_tail_writable(stream, layer);
    } catch (...) {
      give_back();
      throw;
    }
  }
  for (const Tail& tail : tails) {
    const transfer::CopyRun run{PagePool::address(*tail.fresh), tail.table->address(tail.i),
                                tail.table->pool().page_bytes()};
    if (tail.paged) {
      engine_->copy_page(stream, run);
    } else {
      stream.copy({&run, 1});
    }
    tail.table->replace(stream, tail.i, *tail.fresh);
    if (tail.paged && memory_->captured()) memory_->keep_pages(layer, tail.i);
  }
}

void SessionState::make_tail_writable(transfer::Stream& stream, LayerState& layer) {
  PagePool& pool = *engine_->pools.pages;
  pool.unprotect_all();
  const std::int64_t page_tokens = engine_->kv.page_tokens;
  if (layer.length % page_tokens == 0) return;
  Page* const tail = &layer.pages.page(layer.length / page_tokens);
  if (!PagePool::sealed(*tail)) return;  // a page is sealed and has room after a truncation only
  if (!pool.ensure_resident(stream, {&tail, 1})) {
    throw_error(ErrorCode::kResourceExhausted,
                "page pool: expected a frame for a page that is appended to, found 0 of ",
                pool.num_frames(), " (memory.host_bytes)", pool.eviction_failure_reason());
  }
  (void)layer.pages.sync_addresses(stream);
  if (!PagePool::shared(*tail)) pool.make_writable(*tail);
}

void SessionState::restore_capacity(transfer::Stream& stream, int index, std::int64_t pages) {
  LayerState& layer = this->layer(index);
  if (layer.pages.size() > pages) shrink(stream, layer, pages * engine_->kv.page_tokens);
}

void SessionState::shrink(transfer::Stream& stream, LayerState& layer, std::int64_t tokens) {
  const std::int64_t before = layer.pages.size();
  layer.pages.shrink(stream, ceil_div(tokens, engine_->kv.page_tokens));
  account_->remove(static_cast<std::size_t>(before - layer.pages.size()));
  for (PageTable& slabs : layer.slabs) {
    const std::int64_t slabs_before = slabs.size();
    slabs.shrink(stream, ceil_div(tokens, hashing::kBlockTokens));
    account_->remove_sketches(static_cast<std::size_t>(slabs_before - slabs.size()) *
                              slabs.pool().page_bytes());
  }
  layer.capacity = memory_->room(layer);
  memory_->set_length(stream, layer);
}

SessionState::ForkSnapshot::ForkSnapshot(SessionState& parent, transfer::Stream& stream)
    : stream_(stream) {
  if (!parent.owns_memory_) {
    memory_ = parent.memory_;
    return;
  }
  memory_ = std::make_shared<SequenceMemory>(parent.engine_->pools, parent.max_tokens_);
  memory_->share(stream, *parent.memory_);
}

SessionState::ForkSnapshot::~ForkSnapshot() {
  try {
    drop(stream_, std::move(memory_));
  } catch (...) {
    // The device has failed; its memory dies with the engine.
  }
}

void SessionState::own_memory(SubmissionScope& scope) {
  if (!owns_memory_) {
    if (scope.capturing()) {
      throw Error(
          ErrorCode::kFailedPrecondition,
          "graph capture: expected a session that has been used, found a child of a fork that "
          "has not; call reserve before the capture");
    }
    if (memory_.use_count() > 1) {
      auto own = std::make_shared<SequenceMemory>(engine_->pools, max_tokens_);
      own->share(scope.stream(), *memory_);
      drop(scope.stream(), std::exchange(memory_, std::move(own)));
    }
    owns_memory_ = true;
  }
  if (scope.capturing() && engine_->pools.pages->has_tiers()) memory_->capture();
}

void SessionState::drop(transfer::Stream& stream, std::shared_ptr<SequenceMemory> memory) {
  if (memory && memory.use_count() == 1) memory->release(stream);
}

void SessionState::reserve(transfer::Stream& stream, std::int64_t tokens) {
  std::vector<std::int64_t> before;
  before.reserve(memory_->layers().size());
  try {
    for (int i = 0; i < num_layers(); ++i) {
      before.push_back(layer(i).pages.size());
      ensure_capacity(stream, i, tokens);
    }
    // For a capture that may follow.
    for (int i = 0; engine_->pools.row_cache != nullptr && i < num_layers(); ++i) {
      const std::vector<LayerConfig>& options = engine_->config.model.layer_options;
      const bool sparse =
          options.empty() || options[static_cast<std::size_t>(i)].mode == LayerMode::kSparse;
      if (sparse) take_row_cache(stream, engine_->pools, layer(i));
    }
    // Also pages, if they fit.
    if (engine_->device->backend() == Backend::kCuda) {
      (void)memory_->ensure_resident(stream);
    }
  } catch (...) {
    for (std::size_t i = 0; i < before.size(); ++i) {
      restore_capacity(stream, static_cast<int>(i), before[i]);
    }
    throw;
  }
}

void SessionState::undo_append(transfer::Stream& stream, int index, std::int64_t length,
                               std::int64_t pages) {
  LayerState& layer = this->layer(index);
  layer.length = length;
  shrink(stream, layer, reopen(stream, layer, pages) * engine_->kv.page_tokens);
}

std::int64_t SessionState::reopen(transfer::Stream& stream, LayerState& layer,
                                  std::int64_t pages) const {
  PagePool& pool = *engine_->pools.pages;
  if (!pool.has_tiers()) return pages;
  (void)layer.pages.sync_addresses(stream);  // some may have left and come back
  const std::int64_t end = std::min(pages, layer.pages.size());
  for (std::int64_t i = ceil_div(layer.length, engine_->kv.page_tokens); i < end; ++i) {
    if (layer.pages.address(i) == nullptr) return i;
    Page& page = layer.pages.page(i);
    if (PagePool::sealed(page)) pool.make_writable(page);
  }
  return pages;
}

void SessionState::truncate(transfer::Stream& stream, std::int64_t tokens, int first, int end) {
  const auto whole_pages = static_cast<std::size_t>(tokens / engine_->kv.page_tokens);
  keys_.resize(std::min(keys_.size(), whole_pages));
  for (int i = first; i < end; ++i) {
    LayerState& layer = this->layer(i);
    if (tokens >= layer.length) continue;
    layer.length = tokens;
    shrink(stream, layer, tokens);
  }
}

std::uint64_t SessionState::take_corrupt() noexcept {
  const std::uint64_t corrupt = load(flags_->rows_corrupt);
  return corrupt - std::exchange(seen_corrupt_, corrupt);
}

void SessionState::check_flags() {
  if (const std::uint64_t corrupt = take_corrupt(); corrupt > 0) {
    throw_error(ErrorCode::kDataLoss,
                "an earlier call on this session: expected rows in host memory as they were "
                "written, found ",
                corrupt, " changed, whose heads have NaN in the output");
  }
  if (!engine_->config.reject_nonfinite) return;
  const std::uint64_t tokens = load(flags_->nonfinite_tokens);
  const std::uint64_t queries = load(flags_->nonfinite_queries);
  const std::uint64_t new_tokens = tokens - std::exchange(seen_nonfinite_, tokens);
  const std::uint64_t new_queries = queries - std::exchange(seen_nonfinite_queries_, queries);
  if (new_tokens == 0 && new_queries == 0) return;
  const std::uint64_t first =
      std::atomic_ref(flags_->first_nonfinite).exchange(transfer::NonfinitePlace::kNone);
  // None: a call under way counts here what the error before has named.
  if (first != transfer::NonfinitePlace::kNone) {
    first_nonfinite_ = transfer::NonfinitePlace::of(first);
  }
  const auto& [token, layer, in_query] = first_nonfinite_;
  throw_error(ErrorCode::kInvalidArgument,
              "an earlier call on this session: expected finite tensors, found NaN or infinity in ",
              new_tokens, " (token, KV head) pairs and ", new_queries,
              " query tokens, the first in ", (in_query ? "the query" : "keys or values"),
              " of token ", token, " of layer ", layer, "; truncate the session or close it");
}

void SessionState::begin_use(SubmissionScope& scope) {
  if (scope.capturing()) return;
  if (last_stream_ != &scope.stream()) scope.stream().wait(last_use_);
}

void SessionState::end_use(SubmissionScope& scope) {
  if (scope.capturing()) return;
  last_use_ = scope.stream().record();
  last_stream_ = &scope.stream();
}

}  // namespace kvtier::runtime
