#pragma once

#include "kvtier/engine.h"

#include "runtime/engine/engine_state.h"
#include "runtime/sequence/prefix_key.h"
#include "runtime/sequence/sequence_memory.h"
#include "transfer/kv/rows.h"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvtier::runtime {

/// All state of one sequence. Sketches and KV grow, shrink and vanish together.
///
/// The children of a fork begin with one frozen copy of their parent's memory, which holds the
/// parent's pages and slabs as well. Each makes its own of it when it is first used, still holding
/// the same pages and slabs; a part-filled last page or slab is copied by the first append of
/// each of its holders but the last.
class SessionState {
 public:
  SessionState(std::shared_ptr<EngineState> engine, const SessionConfig& config);
  /// A child of a fork, within a submission scope: `memory` is the snapshot that `parent` has made.
  SessionState(SubmissionScope& scope, const SessionState& parent,
               std::shared_ptr<SequenceMemory> memory);
  ~SessionState();
  SessionState(const SessionState&) = delete;  // owns frames of the engine's pools
  SessionState& operator=(const SessionState&) = delete;

  /// Holds pages and slabs for `tokens` more tokens of a layer, and makes a shared last page or
  /// slab its own. Pages go to the tier below, and then stored prefixes go, where there is too
  /// little. Throws `kResourceExhausted`, or what `PagePool::ensure_resident` throws of a last page
  /// that is evicted, with nothing else changed. Enqueues the new capacity.
  void ensure_capacity(transfer::Stream& stream, int layer, std::int64_t tokens);
  /// Holds slabs for `tokens` more tokens of a layer, and checks that the session may have so
  /// many. Throws `kResourceExhausted`; slabs taken stay until pages are given back.
  void ensure_slabs(transfer::Stream& stream, int layer, std::int64_t tokens);
  /// Gives back the pages and slabs that `ensure_capacity` took since the layer had `pages` pages.
  /// A copy that it made of a shared page or slab stays.
  void restore_capacity(transfer::Stream& stream, int layer, std::int64_t pages);
  /// Takes back what a call has appended since the layer had `length` tokens and `pages` pages.
  void undo_append(transfer::Stream& stream, int layer, std::int64_t length, std::int64_t pages);
  /// Holds pages and slabs for `tokens` more tokens of every layer; as `ensure_capacity`, for all
  /// layers or none.
  void reserve(transfer::Stream& stream, std::int64_t tokens);
  /// Drops tokens from index `tokens` on, in layers [first, end).
  void truncate(transfer::Stream& stream, std::int64_t tokens, int first, int end);
  /// Makes a child's memory its own; nothing to do when it is. Throws `kResourceExhausted` when the
  /// device has no memory for it, `kFailedPrecondition` in a capture, nothing changed.
  void own_memory(SubmissionScope& scope);
  /// Throws `kInvalidArgument` once when an earlier call stored non-finite device data, with the
  /// layer and the token of the first.
  void check_flags();
  /// Marks the session's memory as used by the work enqueued on `stream`; makes `stream` wait for
  /// the uses before.
  void begin_use(SubmissionScope& scope);
  void end_use(SubmissionScope& scope);

  /// Returns the keys of the whole pages of the session's first tokens, of these ids. Reads nothing
  /// that the engine's mutex guards: others wait for no digest of long prompts.
  [[nodiscard]] std::vector<PrefixKey> keys_of(std::span<const std::int32_t> token_ids) const {
    return page_keys(root_key_, engine_->kv.page_tokens, token_ids);
  }
  /// Stores the first pages under these keys.
  void publish(SubmissionScope& scope, std::vector<PrefixKey> keys);
  /// What the children of a fork begin with, made within a submission scope: a copy of the parent's
  /// memory that holds the same frames, or the parent's own while that is frozen.
  class ForkSnapshot {
   public:
    ForkSnapshot(SessionState& parent, transfer::Stream& stream);
    ForkSnapshot(const ForkSnapshot&) = delete;  // releases once
    ForkSnapshot& operator=(const ForkSnapshot&) = delete;
    ~ForkSnapshot();
    [[nodiscard]] const std::shared_ptr<SequenceMemory>& memory() const noexcept { return memory_; }

   private:
    transfer::Stream& stream_;
    std::shared_ptr<SequenceMemory> memory_;
  };

  [[nodiscard]] EngineState& engine() const noexcept { return *engine_; }
  [[nodiscard]] LayerState& layer(int index) const {
    return memory_->layers()[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] int num_layers() const noexcept {
    return static_cast<int>(memory_->layers().size());
  }
  [[nodiscard]] std::int64_t max_tokens() const noexcept { return max_tokens_; }
  /// Returns whether a captured graph uses the session: its pages stay where they are.
  [[nodiscard]] bool captured() const noexcept { return memory_->captured(); }
  [[nodiscard]] transfer::StepFlags* flags() const noexcept { return flags_; }
  /// Readings of changed rows since the last call, by work that is done.
  [[nodiscard]] std::uint64_t take_corrupt() noexcept;

 private:
  /// Finds the longest stored prefix of these pages whose first ones are resident or can be
  /// restored.
  void find_prefix(SubmissionScope& scope, const PageAccount& account,
                   std::span<const PrefixKey> asked);
  /// Returns whether the rows that become sinks are whole; else `find_prefix` has to look again.
  bool check_sinks(SubmissionScope& scope, bool last);
  /// Promises the session what it takes at its full length. Throws `kResourceExhausted`, nothing
  /// promised, where other sessions hold it or have been promised it.
  void take_whole(PageAccount& account) const;
  /// Opens pages past the tokens of a layer again, which an append taken back has sealed: they hold
  /// nothing, and are written where they are. Returns how many of the first `pages` are in frames,
  /// as those that are held for later tokens have to be.
  std::int64_t reopen(transfer::Stream& stream, LayerState& layer, std::int64_t pages) const;
  /// Gives back the pages and slabs past those that `tokens` tokens need.
  void shrink(transfer::Stream& stream, LayerState& layer, std::int64_t tokens);
  /// Throws `kResourceExhausted` unless a layer may have so many more tokens.
  void check_room(int layer, std::int64_t more) const;
  /// Pages that a layer lacks for `more` tokens.
  [[nodiscard]] std::size_t pages_lacking(const LayerState& layer, std::int64_t more) const;
  /// Restores a part-filled last page; its copies in tiers are no longer valid.
  void make_tail_writable(transfer::Stream& stream, LayerState& layer);
  /// Copies the part-filled last page and slabs of a layer, where they are shared.
  void unshare_tail(transfer::Stream& stream, int layer);
  /// Ends a hold of `memory`, which is released with the last.
  static void drop(transfer::Stream& stream, std::shared_ptr<SequenceMemory> memory);

  std::shared_ptr<EngineState> engine_;
  std::unique_ptr<PageAccount> account_;
  std::int64_t max_tokens_;
  PrefixKey root_key_{};         ///< Of those who share prefixes with the session.
  std::vector<PrefixKey> keys_;  ///< Of its first pages, as far as their ids are known.
  transfer::StepFlags* flags_ = nullptr;
  std::uint64_t seen_nonfinite_ = 0;
  std::uint64_t seen_nonfinite_queries_ = 0;
  transfer::NonfinitePlace first_nonfinite_{};  ///< That `check_flags` has named last.
  std::uint64_t seen_corrupt_ = 0;
  std::shared_ptr<SequenceMemory> memory_;
  bool owns_memory_ = true;  ///< False: `memory_` is frozen, for it may have other holders.
  transfer::Event last_use_;
  transfer::Stream* last_stream_ = nullptr;
};

}  // namespace kvtier::runtime
