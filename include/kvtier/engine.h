#pragma once

#include "kvtier/config.h"
#include "kvtier/error.h"
#include "kvtier/export.h"
#include "kvtier/recall.h"
#include "kvtier/stats.h"
#include "kvtier/tensor.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace kvtier {

class Session;

/// Per-call overrides. Everything left out comes from `Config`.
struct AttendOptions {
  std::optional<float> softmax_scale{};
  std::optional<float> logit_softcap{};
  std::optional<LayerMode> mode{};
  /// Tokens at or after this index are always attended.
  std::optional<std::int64_t> dense_from{};
  /// Tokens of the layer behind the query's last one, for a call that attends with a part of a
  /// query: query t of T sees the tokens up to number length - tokens_after - T + t.
  std::int64_t tokens_after = 0;
  /// Replaces `Config::retrieval`. Its sketch must fit one that the session carries, otherwise
  /// `kFailedPrecondition`. Not kept after the call.
  const RetrievalConfig* retrieval = nullptr;
  /// Chooses how many tokens are selected by the attention that they keep. Only with a norm-aware
  /// estimator and without a logit softcap. On CUDA such a step scores on the generic path. Ignored
  /// where nothing is selected by score.
  std::optional<RecallTarget> recall_target{};
};

/// `query`: fp32, fp16 or bf16 `[tokens, query_heads, head_dim]`. Query t of T sees the tokens up
/// to and including the session's token number length - T + t (a causal tail). `selected`
/// (optional): int32 `[tokens, query_heads, kv_heads or 1, n]` token ids to attend beside sink,
/// window and dense tokens, -1 for none, any order; 1: the same for all heads; replaces scoring.
/// `bias` (optional, with `selected`): fp32 of the shape of `selected`, finite and not negative,
/// what is added to the logit of each id, as `SelectOutputs::bias` gives it; of an id given twice
/// the larger counts.
struct AttendInputs {
  TensorView query{};
  TensorView selected{};
  TensorView bias{};
};

/// As `AttendInputs`, and the tokens to append first: `key`, `value` `[tokens, kv_heads,
/// head_dim]`.
struct DecodeInputs {
  TensorView query{};
  TensorView key{};
  TensorView value{};
  TensorView selected{};
  TensorView bias{};
};

/// `out`: fp32, fp16 or bf16 `[tokens, query_heads, head_dim]`. `lse` (optional): fp32 `[tokens,
/// query_heads]`, natural log of the softmax denominator; with it, results over disjoint token sets
/// merge (`Engine::merge`). `selected` (optional): int32 `[tokens, query_heads or kv_heads, n]`
/// receives the ids chosen by score, ascending, padded with -1; n >= k. Of dense and sliding-window
/// layers -1 alone. One head of ids where all heads have the same: with `kPerSequence`, or where
/// one was given.
/// `missed` (optional): fp32 `[tokens, query_heads]`, the estimated share of the attention of all
/// visible tokens that fell on tokens not attended; for sparse layers that select by norm-aware
/// scores without a logit softcap.
struct AttendOutputs {
  MutableTensorView out{};
  MutableTensorView lse{};
  MutableTensorView selected{};
  MutableTensorView missed{};
};

/// `ids`: int32 `[tokens, heads, n]` with heads = query_heads for `kPerQueryHead`, kv_heads for
/// `kPerKvHead`, 1 for `kPerSequence`; ascending, padded with -1. `scores` (optional): fp32, same
/// shape, the score of each id (of a set of several heads: the combined one), -infinity where
/// padded. `bias` (optional, with `SelectionRule::kPriority`): fp32, same shape, the logarithm of
/// how many times each id counts, 0 where padded; `AttendInputs::bias` takes it. Heads are then
/// those of the sets.
struct SelectOutputs {
  MutableTensorView ids{};
  MutableTensorView scores{};
  MutableTensorView bias{};
};

/// Rows of `Session::fetch`: `keys`, `values` `[kv_heads, n, head_dim]` of the model's `kv_dtype`,
/// in host memory.
struct FetchOutputs {
  MutableTensorView keys{};
  MutableTensorView values{};
};

/// One partial result of `Engine::merge`: fp32 `out [tokens, query_heads, head_dim]`, `lse [tokens,
/// query_heads]`.
struct PartialResult {
  TensorView out{};
  TensorView lse{};
};

struct SessionConfig {
  /// Tokens the session may hold; 0: `MemoryConfig::max_session_tokens`.
  std::int64_t capacity_tokens = 0;
  /// Ids of the first tokens. The session begins with the longest run of whole pages of them that
  /// is stored (`Session::publish`), as `length` says, and the rest is appended as usual. Leave out
  /// the last tokens of a prompt to compute them in any case.
  std::span<const std::int32_t> token_ids{};
  /// Sessions share prefixes only with those opened with the same secret and the same fingerprint,
  /// a name for the weights and all else that keys and values depend on beside the ids.
  std::string_view tenant_secret{};
  std::string_view model_fingerprint{};
  /// Most bytes of pages that the session may hold in all layers, resident and in tiers; 0: no
  /// limit. A call that needs more throws `kResourceExhausted` and changes nothing; a stored prefix
  /// begins the session as far as they go.
  std::size_t max_page_bytes = 0;
  /// Whether the session is opened only where what it takes at its full length (`session_memory`)
  /// is there: pages, here or in tiers, and sketches that no session holds or has been promised. Of
  /// a disk cache those pages count that have room whichever others are removed: about three
  /// quarters.
  /// They are promised to it then; what sessions without a promise still append can be in the way.
  /// Else `open` throws `kResourceExhausted` with what it takes and what is left.
  bool whole = false;
  /// Whose quota (`Engine::set_quota`) the session's pages count against as well, and those of
  /// sessions that it is forked to; empty: of no tenant.
  std::string_view tenant{};
};

/// One entry of a ragged batch: a session and its tensors. Every session at most once.
struct BatchItem {
  Session* session = nullptr;
  DecodeInputs inputs{};
  AttendOutputs outputs{};
  AttendOptions options{};
};

/// Owns the device, the page pool, the planes and the workspaces; allocates at construction all
/// that steps will use.
///
/// ```cpp
/// kvtier::Config config;
/// config.model = {.layers = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
/// kvtier::Engine engine(config);            // one per process
/// kvtier::Session session = engine.open();  // one per sequence
/// session.append(0, keys, values);          // [tokens, 8, 128] each, for each layer
/// session.decode(0, {.query = query, .key = key, .value = value}, {.out = out});
/// ```
///
/// Thread-safe. Sessions keep the engine's state alive, so the order of destruction is free.
class KVTIER_EXPORT Engine {
 public:
  /// Throws `kInvalidArgument` with all problems of `config`, `kResourceExhausted` when a budget of
  /// `config` is too small or memory cannot be allocated or pinned, `kUnimplemented` when CUDA is
  /// asked for and cannot be used.
  explicit Engine(const Config& config);
  ~Engine();
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;

  /// Opens a session, empty but for a stored prefix of `config.token_ids`. Throws
  /// `kResourceExhausted` when its tables do not fit, and where `SessionConfig::whole` says so.
  /// `session_memory` (kvtier/memory.h) returns what it takes.
  [[nodiscard]] Session open(const SessionConfig& config = {});

  /// Limits the bytes of pages that the sessions of a tenant may hold together, now and later:
  /// calls that need more throw `kResourceExhausted` and change nothing, what is held stays. A page
  /// counts in each session that holds it, because sharing may end with any append; stored
  /// prefixes count as what sessions hold of them. SIZE_MAX: no limit. Throws `kInvalidArgument`
  /// for a tenant without a name.
  void set_quota(std::string_view tenant, std::size_t page_bytes);

  /// `Session::decode` for a ragged batch: items may differ in length, tokens and options. All
  /// items are checked before any changes.
  void decode(int layer, std::span<const BatchItem> items, StreamRef stream = {});

  /// Merges partial attention over disjoint token sets by log-sum-exp. `result.out` and
  /// `result.lse` have the shape of the parts.
  void merge(std::span<const PartialResult> parts, const AttendOutputs& result,
             StreamRef stream = {});

  /// Returns the backend in use: `kCpu` or `kCuda`.
  [[nodiscard]] Backend backend() const noexcept;
  /// Returns the number of the GPU in use, as `cudaGetDevice` counts them; -1 on the CPU backend.
  [[nodiscard]] int device_index() const noexcept;
  [[nodiscard]] const Config& config() const noexcept;
  [[nodiscard]] Stats stats() const;

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

/// The KV of one sequence and its sketches, in all layers. Used by one thread at a time, and by one
/// stream at a time unless the caller orders the streams. Move-only; destruction closes, and
/// waits for no enqueued work: pages return when the last enqueued reader is done. It may wait for
/// a call of another session that writes pages to tiers, up to `MemoryConfig::tier_deadline` for
/// each tier.
///
/// Tensors are host or device memory (`TensorView::space`). With a stream, device tensors must stay
/// valid until the stream has passed the call; host tensors are taken only without a stream.
class KVTIER_EXPORT Session {
 public:
  ~Session();
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;

  /// Stores keys and values of new tokens, `[tokens, kv_heads, head_dim]` each, any float dtype,
  /// and sketches them. Rotary embedding must already be applied. Throws `kInvalidArgument` (shape,
  /// dtype, layer, non-finite host data), `kResourceExhausted` (at capacity, or no page or sketch
  /// block left): nothing has changed then.
  void append(int layer, const TensorView& keys, const TensorView& values, StreamRef stream = {});

  /// Makes room for `tokens` more tokens in every layer, so that appends up to there take no page.
  /// Needed before `decode` is captured in a CUDA graph; never itself captured.
  void reserve(std::int64_t tokens, StreamRef stream = {});

  /// Scores the eligible tokens and returns the chosen ids. Stores nothing.
  /// Throws `kFailedPrecondition` on an empty layer or without a fitting sketch.
  void select(int layer, const TensorView& query, const SelectOutputs& outputs,
              StreamRef stream = {}, const AttendOptions& options = {});

  /// Selects and attends; stores nothing. Output equals exact softmax attention over the attended
  /// set: sink, window, dense tokens and the k selected, each once.
  void attend(int layer, const AttendInputs& inputs, const AttendOutputs& outputs,
              StreamRef stream = {}, const AttendOptions& options = {});

  /// Fetches the rows that these queries select and that are not cached yet
  /// (`MemoryConfig::row_cache_bytes`), for steps to come: stores nothing and changes no result.
  /// For a time when the link idles, with a query like the next one: that of the step before, of
  /// which `AttendOptions::retrieval` may ask for more tokens, or one predicted. A row takes an
  /// empty slot, or that of the row worth the least that the last step has not used; wrong guesses
  /// cost the link's time and such rows. Is ordered like every call: the engine's next one
  /// comes after it. Does nothing without a row cache, nor while a page of the layer is in a tier.
  /// Throws what `select` does.
  void prefetch(int layer, const TensorView& query, StreamRef stream = {},
                const AttendOptions& options = {});

  /// Appends, then attends. One CUDA-graph-capturable sequence of launches after `reserve`.
  void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
              StreamRef stream = {}, const AttendOptions& options = {});

  /// Copies stored keys and values out, bit for bit. `tokens`: int32 `[kv_heads, n]` in host
  /// memory, for each KV head its own ids in any order, repeated or not; for -1 the row is zeros.
  /// Returns when the outputs are written. Throws `kInvalidArgument`, nothing written, for a token
  /// that the layer does not have, `kFailedPrecondition` on an empty layer.
  void fetch(int layer, const TensorView& tokens, const FetchOutputs& outputs);

  /// Returns the tokens of one layer, appends enqueued included.
  [[nodiscard]] std::int64_t length(int layer) const;
  /// Returns the tokens that every layer has.
  [[nodiscard]] std::int64_t length() const;

  /// Drops the tokens from index `tokens` on, in every layer (those shorter keep their length).
  /// Throws `kInvalidArgument` when `tokens` is negative or above every layer's length.
  /// With `layer`, in that one alone.
  void truncate(std::int64_t tokens, StreamRef stream = {}, std::optional<int> layer = {});

  /// Opens `count` sessions that start as this one is, in all layers; from then on all are
  /// independent. Pages and sketches are shared until they are written to: the first append of each
  /// holder copies its part-filled last page and sketch block. A child's tables on the device are
  /// made by its first use, which throws `kResourceExhausted` when they do not fit, and which is
  /// not to be captured. This session's replays of a captured graph need a new `reserve`. Throws
  /// `kInvalidArgument` for a count below 1, `kResourceExhausted` when so many sessions cannot be
  /// open: nothing has changed then.
  [[nodiscard]] std::vector<Session> fork(int count, StreamRef stream = {});

  /// Stores the whole pages of the first tokens, whose ids these are, for sessions opened later:
  /// pages of all layers and their sketches together, each once, however many sessions publish it.
  /// They stay, after this session too, until another session needs their memory; the pages at the
  /// end of the prefix used the longest ago go first. This session's replays of a captured graph
  /// need a new `reserve`. Throws `kInvalidArgument`, nothing changed, for more ids than `length()`
  /// or for others than those known of the session's tokens.
  void publish(std::span<const std::int32_t> token_ids, StreamRef stream = {});

  /// Notes that replays of a captured graph have appended `tokens` to `layer`: replays
  /// move the device's length, which the host does not see. Throws `kInvalidArgument` above what
  /// was reserved.
  void advance(int layer, std::int64_t tokens);

 private:
  friend class Engine;
  class Impl;
  explicit Session(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier
