#pragma once

#include "kvtier/export.h"
#include "kvtier/tensor.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier {

class PageTier;

inline constexpr std::size_t KiB = std::size_t{1} << 10;
inline constexpr std::size_t MiB = std::size_t{1} << 20;
inline constexpr std::size_t GiB = std::size_t{1} << 30;

/// Where kernels run. `kAuto` takes CUDA when the build has it and a usable GPU is found, and the
/// CPU otherwise; `Engine::backend` says which, the log says why.
enum class Backend : std::uint8_t { kAuto, kCpu, kCuda };

/// How a token is scored from its sketch.
enum class Estimator : std::uint8_t {
  /// SOCKET, Algorithm 3: sum over tables of the query's soft probability of the key's bucket.
  kSoftCollision,
  /// The tau -> 0 limit: the number of tables in which query and key share a bucket.
  kHardCollision,
  /// Sign-projection estimate of q.k / sqrt(d), times the key norm, plus ln of the value norm.
  kNormAware,
};

/// How the value norm enters a score. Allowed pairs: soft collision with all three, hard collision
/// with `kLinear` or `kNone`, norm-aware with `kLogit` or `kNone`. `kDefault` is `kLinear` for the
/// collision estimators and `kLogit` for norm-aware.
enum class ValueWeighting : std::uint8_t {
  kDefault,
  /// score = ||v|| * collisions (SOCKET).
  kLinear,
  /// Collisions are inverted to an angle, then weighted as a logit: ||q|| ||k|| cos(t) / sqrt(d) +
  /// ln ||v||.
  kCalibrated,
  /// The estimate of the logit plus ln ||v||.
  kLogit,
  kNone,
};

/// Which heads share a selection.
enum class Selection : std::uint8_t {
  /// Each query head has its own k tokens (SOCKET). Rows chosen twice are fetched once.
  kPerQueryHead,
  /// One set of k tokens for the query heads of a KV head, from their normalised scores.
  kPerKvHead,
  /// One set of k tokens for all heads of a sequence, from their normalised scores: what engines
  /// take that have one list of tokens for a sequence. On a GPU it takes the generic path. Neither
  /// with a recall target or the missed mass, nor with two phases.
  kPerSequence,
};

/// Which tokens are taken by their scores, and how much each counts (docs/algorithm.md, section 3).
enum class SelectionRule : std::uint8_t {
  /// The k tokens of largest score; each counts once. Drops the tail of the attention.
  kTopK,
  /// Priority sampling by the scores: the k tokens of largest ln p - ln u, where p is the share of
  /// the attention that the score estimates and u a fixed hash of (seed, layer, head, token) in
  /// (0, 1]. A token that was taken with chance c counts 1 / c times, so numerator and denominator
  /// of the attention have the expectation of dense attention. Needs a score that estimates a
  /// logit: norm-aware, or calibrated soft collision.
  kPriority,
};

/// How the bits of a sketch are made from a key.
enum class SketchCode : std::uint8_t {
  kSign,  ///< Bit i is 1 when plane i . key >= 0.
  /// The key, rotated by the first head_dim orthogonal planes and divided by its norm, rounded to
  /// num_planes / head_dim bits for each coordinate. Read by norm-aware only.
  kScalar,
};

enum class PlaneKind : std::uint8_t {
  kGaussian,    ///< i.i.d. N(0, 1).
  kOrthogonal,  ///< Blocks of head_dim rows orthonormalised and scaled to length sqrt(head_dim).
};

/// What a layer's attention sees.
enum class LayerMode : std::uint8_t { kSparse, kDense, kSlidingWindow };

/// The bits kept of each key. Identity of a sketch: all fields, and head_dim. The first M planes do
/// not depend on `num_planes`, so an estimator that reads signs can read any sketch of signs of the
/// wanted kind and seed with at least as many. A scalar code is read as a whole: all fields must
/// be equal.
struct SketchConfig {
  PlaneKind kind = PlaneKind::kGaussian;  ///< `kOrthogonal` for a scalar code.
  /// 1..1024 bits per (token, KV head), stored packed. Of a scalar code 1 to 8 times head_dim.
  int num_planes = 600;
  std::uint64_t seed = 0;  ///< Key of the Philox counter.
  SketchCode code = SketchCode::kSign;

  /// Returns whether a sketch of this configuration can be read where `wanted` is needed.
  [[nodiscard]] bool serves(const SketchConfig& wanted) const noexcept {
    const bool enough = code == SketchCode::kSign ? num_planes >= wanted.num_planes
                                                  : num_planes == wanted.num_planes;
    return kind == wanted.kind && code == wanted.code && seed == wanted.seed && enough;
  }

  friend bool operator==(const SketchConfig&, const SketchConfig&) = default;
};

/// How tokens are scored and chosen. The defaults are nearest to dense attention for the bytes and
/// rows that they cost, unless rows are few (docs/choosing.md); `socket` has the paper's.
struct RetrievalConfig {
  Estimator estimator = Estimator::kNormAware;
  ValueWeighting value_weighting = ValueWeighting::kDefault;
  Selection selection = Selection::kPerKvHead;

  SelectionRule rule = SelectionRule::kPriority;  ///< `kTopK` where scores are no logits.
  SketchCode code = SketchCode::kScalar;          ///< `kSign` with the collision estimators.

  /// Kind of planes; by default gaussian for the collision estimators, orthogonal for norm-aware.
  std::optional<PlaneKind> plane_kind{};
  std::uint64_t seed = 0;  ///< Of the planes, and of the priorities of `kPriority`.

  int planes_per_table = 10;  ///< P, 1..12 (collision estimators). P * L <= 1024.
  int tables = 60;            ///< L (collision estimators).
  float tau = 0.4F;  ///< Temperature of soft collision, > 0. 0.3 to 0.5 is the flat optimum.
  /// Bits of a key read by norm-aware, 64..1024: planes of a sign code; head_dim times the bits of
  /// a coordinate, 1 to 8, of a scalar code. 0: 256 of a sign code; of a scalar code the least
  /// multiple of head_dim from 256 on, and at least 2 bits a coordinate.
  int num_planes = 0;
  int query_bits = 4;  ///< Norm-aware query weights: 0 (float), 4 or 8 bits.

  /// `error_target` where none of `top_k`, `sparsity` and `error_target` is given (docs/choosing.md
  /// has what it gives). No error is aimed at with `kTopK`, two phases, a recall target, and in
  /// `PagedSketches`: there it is a number.
  static constexpr double kDefaultErrorTarget = 0.03;
  static constexpr int kDefaultTopK = 2048;  ///< That number.
  int top_k = 0;                             ///< Tokens to select; 0: not given.
  double sparsity = 0.0;  ///< In place of `top_k`, k = max(1, floor(visible / sparsity)); 0: none.
  /// With `kPriority`: the standard error of the softmax denominator that is aimed at, relative to
  /// it, in (0, 1); 0: not given. Tokens of priority at least error_target^2 are taken, so as many
  /// as a head needs: at most about 1 / error_target^2, and never more than `top_k` or `sparsity`
  /// says. At most 0.1 where `sink_tokens` and `recent_tokens` are 0, for else some set is empty.
  double error_target = 0.0;

  /// Two phases, with `kPriority` over a scalar code and a number of tokens: the first
  /// `coarse_bits` bits of a coordinate are read of every token, and the whole code of the
  /// `candidates` times k tokens that a first priority sample takes by them (docs/algorithm.md,
  /// section 3). Below the bits of the code; 0: one phase.
  int coarse_bits = 0;
  int candidates = 8;  ///< At least 1.

  int sink_tokens = 64;    ///< First tokens, always attended.
  int recent_tokens = 64;  ///< Last tokens, always attended.

  /// Returns the kind of planes in force.
  [[nodiscard]] KVTIER_EXPORT PlaneKind planes() const noexcept;
  /// Returns the value weighting in force.
  [[nodiscard]] KVTIER_EXPORT ValueWeighting weighting() const noexcept;
  /// Returns the error target in force, 0 where the number of tokens is fixed.
  [[nodiscard]] KVTIER_EXPORT double error_in_force() const noexcept;
  /// Returns the most tokens of a set of a query that sees `visible` tokens, at least 1 where it
  /// sees any: `top_k` or `sparsity` as given, and with an error target e without `sparsity` at
  /// most ceil(1.25 / e^2).
  [[nodiscard]] KVTIER_EXPORT std::int64_t most_selected(std::int64_t visible) const noexcept;
  /// Returns these settings with `top_k = kDefaultTopK` where none of `top_k`, `sparsity` and
  /// `error_target` is given: what a call takes that cannot aim at an error.
  [[nodiscard]] KVTIER_EXPORT RetrievalConfig with_fixed_k() const noexcept;
  /// Returns the smallest sketch that this estimator can read, of keys of `head_dim` numbers.
  [[nodiscard]] KVTIER_EXPORT SketchConfig sketch(int head_dim) const noexcept;
  /// Returns every problem, empty when valid.
  [[nodiscard]] KVTIER_EXPORT std::vector<std::string> validate() const;

  /// Returns the defaults with another estimator: its own rule and code, which are top-k and signs
  /// of the collision estimators, and P = 2, L = 300 of hard collision.
  [[nodiscard]] KVTIER_EXPORT static RetrievalConfig of(Estimator estimator) noexcept;
  /// Returns the method of the SOCKET paper: soft collision, linear value weighting, gaussian
  /// planes, P = 10, L = 60, tau = 0.4, the k best tokens, a selection per query head.
  [[nodiscard]] KVTIER_EXPORT static RetrievalConfig socket() noexcept;
};

struct LayerConfig {
  LayerMode mode = LayerMode::kSparse;
  std::int64_t window_tokens = 0;        ///< Last tokens attended, for `kSlidingWindow`.
  std::optional<float> softmax_scale{};  ///< Default 1 / sqrt(head_dim).
  float logit_softcap = 0.0F;            ///< logit = cap * tanh(logit / cap) when > 0.
};

struct ModelConfig {
  static constexpr int kMostLayers = 4096;
  int layers = 1;
  int query_heads = 1;
  int kv_heads = 1;                   ///< Divides query_heads; 1..16 query heads per KV head.
  int head_dim = 128;                 ///< 64, 96, 128 or 256.
  DType kv_dtype = DType::kBFloat16;  ///< Storage of K and V: bf16 or fp16.
  /// Empty (every layer sparse), or one entry per layer.
  std::vector<LayerConfig> layer_options{};

  /// Returns how many sets of tokens a query has: the heads of `SelectOutputs::ids`.
  [[nodiscard]] int num_sets(Selection selection) const noexcept {
    if (selection == Selection::kPerSequence) return 1;
    return selection == Selection::kPerKvHead ? kv_heads : query_heads;
  }
};

/// Where the KV pages are.
enum class KvPlacement : std::uint8_t {
  kHost,    ///< Pinned host memory; selected rows are fetched by the step.
  kDevice,  ///< Device memory, when all of it fits; rows are read in place.
};

/// How rows lie in pages, in every tier.
enum class PageFormat : std::uint8_t {
  kModel,  ///< As `ModelConfig::kv_dtype` says.
  /// Integers of -127 to 127, with a factor in fp32 for each row's keys and one for its values:
  /// half of the memory and 8 bytes, on the link too. Rows are rounded as they are appended, to the
  /// same bits on every backend, and read as bf16, which `kv_dtype` has to be; sketches are those
  /// of what was given.
  kInt8,
};

/// How the page pool's pinned memory is obtained on the CUDA backend; the CPU backend has one way
/// only. Which is the fastest to read depends on the machine: `kvtier calibrate` measures it.
enum class HostAllocation : std::uint8_t {
  /// As `MemoryConfig::calibration_file` says; else `kManaged` when the GPU has as much memory
  /// as the pool wants; else, or when that is refused, `kRegistered`, then `kDriver`.
  kAuto,
  /// Managed memory that stays on the host and is mapped for the GPU, with pages of 2 MiB.
  kManaged,
  kRegistered,  ///< Transparent huge pages, touched by several threads, registered in chunks.
  kDriver,      ///< `cudaHostAlloc`.
};

/// Which of the cached rows has to go for a new one.
enum class RowCachePolicy : std::uint8_t {
  kClock,  ///< One that has not been used since a hand came by, up to three times if used often.
  kLru,    ///< The one whose last use is the longest ago.
  kScore,  ///< The one chosen the least often, and by the fewest query heads; old choices count
           ///< less.
};

struct MemoryConfig {
  /// Budget of sketches, staging and workspaces (and of pages with `KvPlacement::kDevice`).
  std::size_t device_bytes = 512 * MiB;
  /// Size of the page pool: one page at least, or 0 for none. Pinned on the CUDA backend.
  std::size_t host_bytes = 1 * GiB;
  KvPlacement placement = KvPlacement::kHost;
  PageFormat page_format = PageFormat::kModel;
  /// Keeps a 32-bit checksum of every row in its page, and compares the rows in pinned memory that
  /// a step is about to attend to, and those that `fetch` returns. A call without a stream that
  /// finds one changed takes the page from a tier, if one has it, and goes on; else it throws
  /// `kDataLoss` and its append is taken back. With a stream such rows are NaN in staging, and the
  /// next call on the session throws. 4 bytes a row, and on CUDA as many of `device_bytes`. No
  /// effect with `kDevice`.
  bool verify_rows = false;
  int page_tokens = 64;  ///< 16, 32, 64, 128 or 256.
  /// Capacity of a session unless `SessionConfig` names a smaller one: it sizes tables, 8 bytes
  /// per page and layer, and the score workspace.
  std::int64_t max_session_tokens = std::int64_t{1} << 17;
  /// Query tokens scored together; longer queries are processed in chunks. 1..64.
  int max_batch_rows = 16;
  /// Rows per (query, KV head) fetched ahead of attention into device staging; rows beyond are read
  /// in place. -1: all selected rows on CUDA, none on the CPU, where in place is the faster way.
  int staging_rows = -1;
  /// Bytes of the device row cache, beside `device_bytes`: copies on the device of rows that steps
  /// have fetched, of all sessions. A layer of a session takes its share with its first step, and
  /// keeps it; where none is left, its rows are fetched each time. 0: no row cache. Left out: what
  /// `device_bytes` has beside the workspace and the sketches of the tokens that the pages hold, as
  /// far as steps have a use for it (docs/memory.md); `Stats` and the log say how much that is. It
  /// has an effect on rows that are staged, so on CUDA with `KvPlacement::kHost`; elsewhere rows
  /// are read in place, and nothing is allocated.
  std::optional<std::size_t> row_cache_bytes{};
  /// Rows of it per KV head of a session's layer, rounded up to 32. -1: four times the most that
  /// a step selects, or fewer, down to that, where all layers then have some. 0: no row cache.
  int row_cache_rows = -1;
  RowCachePolicy row_cache_policy = RowCachePolicy::kScore;
  int pin_threads = 0;  ///< Threads that touch host pages before pinning; 0: all.
  /// `kAuto` tries the next way when one is refused, and logs it; any other is used or fails.
  HostAllocation host_allocation = HostAllocation::kAuto;
  /// A file that `kvtier calibrate` wrote, read when an engine is made for the CUDA backend with
  /// `HostAllocation::kAuto`; empty: none. No other file is ever looked for.
  std::string calibration_file{};
  /// Where pages go when the page pool is full, first those of which calls have read the fewest
  /// rows, old reads counting less; empty: nowhere, and a call that finds no page fails. The first
  /// must keep what it has accepted (`retains`); each of the others gets a copy, which is read when
  /// the first has failed. Only with `kHost`.
  std::vector<std::shared_ptr<PageTier>> tiers{};
  /// A folder that becomes the first of `tiers`, by a log of files of at most `disk_cache_bytes`;
  /// what is in it from before is deleted. Empty: none. Both or neither.
  std::string disk_cache{};
  std::size_t disk_cache_bytes = 0;
  /// Whether after a step of one token of each session, while the caller goes on, rows that its
  /// queries would choose beyond its own, half as many again, are put into the row cache for the
  /// next step
  /// (`Session::prefetch`). The engine's next call comes after that, which takes as long as a step:
  /// worth it where the GPU idles between steps. Not in captured steps. No effect without a row
  /// cache.
  bool prefetch_rows = false;
  /// How long a call waits for one batch of pages to be written to a tier, or read.
  std::chrono::milliseconds tier_deadline{10'000};
  /// Called during construction with (bytes ready, bytes in all) as the page pool is prepared.
  std::function<void(std::size_t, std::size_t)> progress{};
};

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError };

/// Everything that an engine is made from.
///
/// ```cpp
/// kvtier::Config config;
/// config.model = {.layers = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
/// config.memory.host_bytes = 64 * kvtier::GiB;  // KV pages
/// config.retrieval.error_target = 0.05;  // fewer rows than by default, a larger error
/// for (const std::string& problem : config.validate()) std::puts(problem.c_str());
/// ```
struct Config {
  ModelConfig model{};
  MemoryConfig memory{};
  RetrievalConfig retrieval{};
  static constexpr std::size_t kMostExtraSketches = 15;
  /// Sketches that every session carries beside the one that `retrieval` needs.
  std::vector<SketchConfig> extra_sketches{};
  Backend backend = Backend::kAuto;
  /// Host tensors with NaN or infinity are rejected before anything changes; device tensors raise a
  /// flag, and the next call on that session throws, with the layer and the token of the first.
  /// Finite tensors whose results are not finite are rejected where `out` is a host tensor: the
  /// call throws with the layer and the token, and an append of it is taken back. When false,
  /// tokens with such keys or values score lowest and are counted in `Stats`.
  bool reject_nonfinite = true;
  /// Whether a sparse layer attends to all visible tokens where that is expected to be faster than
  /// to select some: on CUDA with `KvPlacement::kDevice`, from 16,384 tokens on, by shape, length
  /// and GPU (docs/performance.md). Such results are those of dense attention;
  /// `Stats::Cumulative::dense_queries` counts them. A captured call decides by what its sessions
  /// have reserved. Never where ids or missed shares are asked for or ids are given, nor where
  /// `AttendOptions::mode` is.
  bool dense_when_faster = true;
  /// Waits after each stage of calls without a stream, to fill `Stats::seconds`. Slower.
  bool time_stages = false;
  /// The only sink of the library's messages: state changes, never per step. Called by one thread
  /// at a time, whichever has the message; calls nothing of the engine. May be empty.
  std::function<void(LogLevel, std::string_view)> log{};
  /// Called with true on the thread of a call that unlocks the engine while it waits for pages of a
  /// tier, with false when it has locked it again. For callers with queues of their own before the
  /// engine. Must not throw, and calls nothing of the engine. May be empty.
  std::function<void(bool waiting)> on_tier_wait{};

  /// Returns every problem at once, empty when valid.
  [[nodiscard]] KVTIER_EXPORT std::vector<std::string> validate() const;
};

}  // namespace kvtier
