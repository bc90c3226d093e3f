#include "services/evaluation/synthetic.h"

#include "include/types/float16.h"
#include "services/evaluation/random.h"
#include "services/evaluation/threads.h"

#include <algorithm>
#include <cmath>

namespace kvtier::services {
namespace {

constexpr std::int64_t kSegment = 64;  // tokens that share a topic
constexpr std::uint64_t kTopics = 64;
constexpr std::uint64_t kKinds = 128;
constexpr std::int64_t kTurn = 64;  // positions per step of the angle addition
constexpr std::size_t kMaxHalf = 128;
constexpr double kRotaryBase = 1e7;

// Shares of a key's squared length, and lengths: chosen so that the cosines of queries and keys
// spread as in the recorded trace (0.14), where |k| is 1.7 sqrt(head_dim) and ln |v| spreads by
// 0.14.
constexpr double kKeyLength = 1.7;
constexpr double kTopicShare = 0.25;
constexpr double kKindShare = 0.25;
constexpr double kSlowNoiseShare = 0.27;
constexpr double kFastNoiseShare = 0.15;
constexpr double kMeanShare = 0.08;
constexpr double kValueLength = 0.8;
constexpr double kValueSpread = 0.14;
constexpr double kValueKindShare = 0.25;

constexpr double kQuerySlowShare = 0.8;
constexpr double kGroupCorrelation = 0.87;  // of the query heads of one KV head

/// Streams of random numbers of one layer.
enum Stream : std::uint64_t { kRows, kTopicTable, kKindTable, kValueTable, kMean, kQueries };

/// Whether a dimension turns slowly: its pair is among the last quarter of the pairs.
bool slow(int dim, int head_dim) {
  const int half = head_dim / 2;
  return dim % half >= half - head_dim / 8;
}

std::uint64_t layer_key(const SyntheticShape& shape, int sequence, int layer) {
  return random_key(shape.seed, static_cast<std::uint64_t>(sequence) * 65536U +
                                    static_cast<std::uint64_t>(layer));
}

/// What one row is made of; pointers to `[head_dim]` or `[head_dim / 2]`.
struct RowParts {
  const float* topic;
  const float* kind;
  const float* cosine;
  const float* sine;
  const float* key_noise;
  const float* key_noise_scale;
  const float* value_kind;
  const float* value_noise;
  float value_norm;
};

void write_key(const RowParts& parts, int half, std::uint16_t* key) {
  const RowParts p = parts;
  for (int i = 0; i < half; ++i) {
    const float low = p.topic[i] + p.kind[i];
    const float high = p.topic[i + half] + p.kind[i + half];
    const float x = low * p.cosine[i] - high * p.sine[i];
    const float y = high * p.cosine[i] + low * p.sine[i];
    key[i] = BFloat16::from_float(x + p.key_noise_scale[i] * p.key_noise[i]).bits;
    key[i + half] =
        BFloat16::from_float(y + p.key_noise_scale[i + half] * p.key_noise[i + half]).bits;
  }
}

void write_value(const RowParts& parts, int dim, std::uint16_t* value) {
  const RowParts p = parts;
  constexpr float kNoise = 0.866025F;  // sqrt(1 - kValueKindShare)
  for (int i = 0; i < dim; ++i) {
    value[i] =
        BFloat16::from_float(p.value_norm * (p.value_kind[i] + kNoise * p.value_noise[i])).bits;
  }
}

std::vector<float> normals(std::uint64_t key, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = random_normal(key, i);
  return values;
}

}  // namespace

NoiseTable::NoiseTable(std::uint64_t seed)
    : values_(normals(random_key(seed, 0xFFFFFFFFU), kWindows + 512)) {}

LayerSource::LayerSource(const SyntheticShape& shape, int sequence, int layer,
                         std::shared_ptr<const NoiseTable> noise)
    : head_dim_(shape.head_dim), noise_(std::move(noise)) {
  const auto d = static_cast<std::size_t>(head_dim_);
  const double slow_dims = head_dim_ / 4.0;
  const double length = kKeyLength * std::sqrt(static_cast<double>(head_dim_));
  const auto scale = [&](double share, double dims) {
    return static_cast<float>(length * std::sqrt(share / dims));
  };
  const float mean_scale = scale(kMeanShare, head_dim_);
  for (int i = 0; i < head_dim_; ++i) {
    key_noise_scale_.push_back(slow(i, head_dim_) ? scale(kSlowNoiseShare, slow_dims)
                                                  : scale(kFastNoiseShare, head_dim_ - slow_dims));
  }

  const std::uint64_t key = layer_key(shape, sequence, layer);
  for (int head = 0; head < shape.kv_heads; ++head) {
    const std::uint64_t own = random_key(key, static_cast<std::uint64_t>(head));
    Head tables{.topics = normals(random_key(own, kTopicTable), kTopics * d),
                .kinds = normals(random_key(own, kKindTable), kKinds * d),
                .value_kinds = normals(random_key(own, kValueTable), kKinds * d),
                .seed = random_key(own, kRows)};
    const std::vector<float> mean = normals(random_key(own, kMean), d);
    for (std::size_t i = 0; i < kKinds * d; ++i) {
      const bool slowly = slow(static_cast<int>(i % d), head_dim_);
      tables.kinds[i] *= slowly ? scale(kKindShare, slow_dims) : 0.0F;
      tables.value_kinds[i] *= static_cast<float>(std::sqrt(kValueKindShare));
    }
    for (std::size_t i = 0; i < kTopics * d; ++i) {
      const bool slowly = slow(static_cast<int>(i % d), head_dim_);
      tables.topics[i] *= slowly ? scale(kTopicShare, slow_dims) : 0.0F;
      tables.topics[i] += mean_scale * mean[i % d];
    }
    heads_.push_back(std::move(tables));
  }

  const int half = head_dim_ / 2;
  for (int i = 0; i < half; ++i) {
    frequencies_.push_back(std::pow(kRotaryBase, -static_cast<double>(i) / half));
  }
  for (std::int64_t turn = 0; turn < kTurn; ++turn) {
    for (const double frequency : frequencies_) {
      turn_cosine_.push_back(static_cast<float>(std::cos(static_cast<double>(turn) * frequency)));
      turn_sine_.push_back(static_cast<float>(std::sin(static_cast<double>(turn) * frequency)));
    }
  }
  for (std::size_t i = 0; i < value_norms_.size(); ++i) {
    const double spread = kValueSpread * static_cast<double>(random_normal(shape.seed, i));
    value_norms_[i] = static_cast<float>(kValueLength * std::exp(spread));
  }
}

std::size_t LayerSource::bytes(const SyntheticShape& shape) {
  const std::size_t rows = kTopics + 2 * kKinds;
  return (rows * static_cast<std::size_t>(shape.kv_heads) + kTurn) *
         static_cast<std::size_t>(shape.head_dim) * sizeof(float);
}

/// The rotation of one position after the other: the angle of a block's first token is computed,
/// the others follow by angle addition.
class LayerSource::Rotor {
 public:
  explicit Rotor(const LayerSource& source) : source_(source) {}

  void seek(std::int64_t token) {
    const auto half = static_cast<std::size_t>(source_.head_dim_ / 2);
    const std::int64_t block = token / kTurn;
    if (block != block_) {
      block_ = block;
      for (std::size_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(block * kTurn) * source_.frequencies_[i];
        block_cosine_[i] = static_cast<float>(std::cos(angle));
        block_sine_[i] = static_cast<float>(std::sin(angle));
      }
    }
    const std::size_t turn = static_cast<std::size_t>(token % kTurn) * half;
    const float* const turn_cosine = source_.turn_cosine_.data() + turn;
    const float* const turn_sine = source_.turn_sine_.data() + turn;
    for (std::size_t i = 0; i < half; ++i) {
      cosine[i] = block_cosine_[i] * turn_cosine[i] - block_sine_[i] * turn_sine[i];
      sine[i] = block_sine_[i] * turn_cosine[i] + block_cosine_[i] * turn_sine[i];
    }
  }

  std::array<float, kMaxHalf> cosine{};
  std::array<float, kMaxHalf> sine{};

 private:
  const LayerSource& source_;
  std::int64_t block_ = -1;
  std::array<float, kMaxHalf> block_cosine_{};
  std::array<float, kMaxHalf> block_sine_{};
};

void LayerSource::make_row(int kv_head, std::int64_t token, const Rotor& rotor, std::uint16_t* key,
                           std::uint16_t* value) const {
  const Head& head = heads_[static_cast<std::size_t>(kv_head)];
  const auto d = static_cast<std::uint64_t>(head_dim_);
  const auto position = static_cast<std::uint64_t>(token);
  const std::uint64_t bits = random_bits(head.seed, position);
  const bool strays = (bits & 1U) != 0;
  const std::uint64_t topic =
      strays ? (bits >> 1) % kTopics
             : random_bits(~head.seed, position / static_cast<std::uint64_t>(kSegment)) % kTopics;
  const std::uint64_t kind = (bits >> 7) % kKinds;
  const RowParts parts{.topic = head.topics.data() + topic * d,
                       .kind = head.kinds.data() + kind * d,
                       .cosine = rotor.cosine.data(),
                       .sine = rotor.sine.data(),
                       .key_noise = noise_->window(bits >> 15),
                       .key_noise_scale = key_noise_scale_.data(),
                       .value_kind = head.value_kinds.data() + kind * d,
                       .value_noise = noise_->window(bits >> 32) + d,
                       .value_norm = value_norms_[(bits >> 49) % value_norms_.size()]};
  write_key(parts, head_dim_ / 2, key);
  if (value != nullptr) write_value(parts, head_dim_, value);
}

void LayerSource::fill(std::int64_t begin, std::int64_t count, std::uint16_t* keys,
                       std::uint16_t* values, int threads) const {
  const auto d = static_cast<std::int64_t>(head_dim_);
  const auto num_heads = static_cast<std::int64_t>(heads_.size());
  for_each_part(threads, count, [&](std::int64_t first, std::int64_t last) {
    Rotor rotor(*this);
    for (std::int64_t t = first; t < last; ++t) {
      rotor.seek(begin + t);
      for (std::int64_t head = 0; head < num_heads; ++head) {
        const std::int64_t row = (t * num_heads + head) * d;
        make_row(static_cast<int>(head), begin + t, rotor, keys + row, values + row);
      }
    }
  });
  for (const Needle& needle : needles_) {
    const std::int64_t t = needle.token - begin;
    if (t < 0 || t >= count) continue;
    std::ranges::copy(needle.key, keys + (t * num_heads + needle.kv_head) * d);
  }
}

void LayerSource::fill_keys(int kv_head, std::span<const std::int64_t> tokens,
                            std::uint16_t* keys) const {
  Rotor rotor(*this);
  for (const std::int64_t token : tokens) {
    rotor.seek(token);
    make_row(kv_head, token, rotor, keys, nullptr);
    keys += head_dim_;
  }
}

void LayerSource::plant(Needle needle) { needles_.push_back(std::move(needle)); }

QuerySource::QuerySource(const SyntheticShape& shape, int sequence, int layer,
                         const QueryDrift& drift)
    : query_heads_(shape.query_heads),
      group_(shape.group()),
      head_dim_(shape.head_dim),
      drift_(drift),
      seed_(random_key(layer_key(shape, sequence, layer), 0x10000U + kQueries)),
      state_(static_cast<std::size_t>((shape.kv_heads + shape.query_heads) * shape.head_dim)),
      queries_(static_cast<std::size_t>(shape.query_heads * shape.head_dim)) {
  for (std::size_t i = 0; i < state_.size(); ++i) state_[i] = random_normal(seed_, i);
}

std::span<const std::uint16_t> QuerySource::next() {
  if (step_ > 0) {
    const auto keep = static_cast<float>(drift_.correlation);
    const auto renew = static_cast<float>(std::sqrt(1.0 - drift_.correlation * drift_.correlation));
    for (std::size_t i = 0; i < state_.size(); ++i) {
      const float fresh = random_normal(seed_, step_ * state_.size() + i);
      state_[i] = keep * state_[i] + renew * fresh;
    }
  }
  ++step_;
  const auto d = static_cast<std::size_t>(head_dim_);
  const double slow_dims = head_dim_ / 4.0;
  const auto shared = static_cast<float>(std::sqrt(kGroupCorrelation));
  const auto own = static_cast<float>(std::sqrt(1.0 - kGroupCorrelation));
  const auto slow_scale = static_cast<float>(drift_.norm * std::sqrt(kQuerySlowShare / slow_dims));
  const auto fast_scale = static_cast<float>(
      drift_.norm * std::sqrt((1.0 - kQuerySlowShare) / (head_dim_ - slow_dims)));
  const std::size_t kv_heads = static_cast<std::size_t>(query_heads_ / group_);
  for (std::size_t head = 0; head < static_cast<std::size_t>(query_heads_); ++head) {
    const float* const group = state_.data() + head / static_cast<std::size_t>(group_) * d;
    const float* const self = state_.data() + (kv_heads + head) * d;
    for (std::size_t i = 0; i < d; ++i) {
      const float scale = slow(static_cast<int>(i), head_dim_) ? slow_scale : fast_scale;
      queries_[head * d + i] =
          BFloat16::from_float(scale * (shared * group[i] + own * self[i])).bits;
    }
  }
  return queries_;
}

}  // namespace kvtier::services
