#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvtier::services {

/// Shape of the data of a run.
struct SyntheticShape {
  int query_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  std::int64_t tokens = 0;  ///< Of the context; decode steps append more.
  std::uint64_t seed = 0;

  [[nodiscard]] int group() const { return query_heads / kv_heads; }
};

/// What makes queries like those of a trained model; the figures are those of the recorded trace
/// (docs/stress.md).
struct QueryDrift {
  double correlation = 0.0;  ///< Of a query with the one of the step before.
  double norm = 1.0;         ///< Expected length of a query.
};

/// A key that one query finds: it replaces that of `token`.
struct Needle {
  int kv_head = 0;
  int step = 0;  ///< The step whose queries find it.
  std::int64_t token = 0;
  std::vector<std::uint16_t> key;  ///< bf16 `[head_dim]`
};

/// Normal numbers from which every row cuts a window; shared by the layers of a run.
class NoiseTable {
 public:
  explicit NoiseTable(std::uint64_t seed);
  /// Returns at least 512 numbers of N(0, 1), for 64 random bits.
  [[nodiscard]] const float* window(std::uint64_t bits) const {
    return values_.data() + (bits & (kWindows - 1));
  }

 private:
  static constexpr std::size_t kWindows = std::size_t{1} << 17;
  std::vector<float> values_;
};

/// Keys and values of one layer of one sequence. Any row can be made at any time, by its token's
/// number.
///
/// A key is R_j (m + a + b) + n: the layer's mean m, the topic a of a segment of 64 tokens (every
/// second token strays to another), one of 128 kinds b, rotated by the token's position j as
/// rotary embedding does, and noise n. Topics and kinds are in the slowest eighth of the rotation's
/// frequencies, as in trained models, so that nearness of meaning outlives distance. A value has
/// its kind's centre, noise, and a log-normal length.
class LayerSource {
 public:
  LayerSource(const SyntheticShape& shape, int sequence, int layer,
              std::shared_ptr<const NoiseTable> noise);

  /// Returns about how many bytes a source holds.
  [[nodiscard]] static std::size_t bytes(const SyntheticShape& shape);

  /// Writes rows [begin, begin + count) to `keys` and `values`, bf16 `[count, kv_heads, head_dim]`.
  void fill(std::int64_t begin, std::int64_t count, std::uint16_t* keys, std::uint16_t* values,
            int threads) const;

  /// Writes the keys of some tokens of one head, bf16 `[tokens, head_dim]`, without needles.
  void fill_keys(int kv_head, std::span<const std::int64_t> tokens, std::uint16_t* keys) const;

  /// Replaces a key. At most one needle per token and head.
  void plant(Needle needle);
  [[nodiscard]] const std::vector<Needle>& needles() const { return needles_; }

 private:
  struct Head {
    std::vector<float> topics;       ///< `[kTopics, head_dim]`, the mean included.
    std::vector<float> kinds;        ///< `[kKinds, head_dim]`
    std::vector<float> value_kinds;  ///< `[kKinds, head_dim]`
    std::uint64_t seed = 0;
  };
  class Rotor;
  /// Writes one row; `value` may be null.
  void make_row(int kv_head, std::int64_t token, const Rotor& rotor, std::uint16_t* key,
                std::uint16_t* value) const;

  int head_dim_;
  std::shared_ptr<const NoiseTable> noise_;
  std::vector<Head> heads_;
  std::vector<float> key_noise_scale_;  ///< `[head_dim]`
  std::vector<double> frequencies_;     ///< `[head_dim / 2]`
  std::vector<float> turn_cosine_;      ///< `[64, head_dim / 2]`, of the first 64 positions.
  std::vector<float> turn_sine_;
  std::array<float, 1024> value_norms_{};
  std::vector<Needle> needles_;
};

/// The queries of one layer of one sequence, step by step: each is the one before, partly renewed.
class QuerySource {
 public:
  QuerySource(const SyntheticShape& shape, int sequence, int layer, const QueryDrift& drift);

  /// Advances to the next step, and returns its queries: bf16 `[query_heads, head_dim]`.
  std::span<const std::uint16_t> next();

 private:
  int query_heads_;
  int group_;
  int head_dim_;
  QueryDrift drift_;
  std::uint64_t seed_;
  std::uint64_t step_ = 0;
  std::vector<float> state_;  ///< `[kv_heads + query_heads, head_dim]`: shared parts, own parts.
  std::vector<std::uint16_t> queries_;
};

}  // namespace kvtier::services
