#include "llama/decoder.h"

#include "include/types/failure.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvtier::llama {

/// Where the keys, values and outputs of a pass go.
class Decoder::Attention {
 public:
  virtual ~Attention() = default;
  /// Stores keys and values; computes `step.out` unless `step.query` is null.
  virtual void run(const LayerStep& step) = 0;
};

/// Activations of one chunk.
struct Decoder::Workspace {
  Buffer normed, query, context, key, value, key_stored, value_stored, gate, up, rope;
  std::int64_t first = 0;  ///< Position of row 0 of `rope`.
};

namespace {

constexpr std::int64_t kDecodeTokens = 64;

std::size_t fp32_bytes(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(float);
}
std::size_t bf16_bytes(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(std::uint16_t);
}

}  // namespace

class Decoder::DensePrefill final : public Attention {
 public:
  DensePrefill(const ModelConfig& config, Compute& compute, KvSession& session,
               std::int64_t capacity)
      : config_(config), compute_(compute), session_(session), capacity_(capacity) {
    const std::int64_t count = capacity * config.kv_heads * config.head_dim;
    keys_ = compute.allocate(fp32_bytes(count));
    values_ = compute.allocate(fp32_bytes(count));
  }

  void run(const LayerStep& step) override {
    const MemorySpace space = compute_.space();
    const TensorView key(step.key, DType::kBFloat16,
                         {step.tokens, config_.kv_heads, config_.head_dim}, space);
    const TensorView value(step.value, DType::kBFloat16,
                           {step.tokens, config_.kv_heads, config_.head_dim}, space);
    session_.append(step.layer, key, value, compute_.stream());
    if (step.query == nullptr) return;

    compute_.scatter_heads(step.key, step.tokens, config_.kv_heads, config_.head_dim,
                           step.first_position, capacity_, keys_.floats());
    compute_.scatter_heads(step.value, step.tokens, config_.kv_heads, config_.head_dim,
                           step.first_position, capacity_, values_.floats());
    compute_.attend({.query = step.query,
                     .keys = keys_.floats(),
                     .values = values_.floats(),
                     .out = step.out,
                     .tokens = step.tokens,
                     .first_position = step.first_position,
                     .capacity = capacity_,
                     .query_heads = config_.query_heads,
                     .kv_heads = config_.kv_heads,
                     .head_dim = config_.head_dim,
                     .scale = 1.0F / std::sqrt(static_cast<float>(config_.head_dim))});
  }

 private:
  const ModelConfig& config_;
  Compute& compute_;
  KvSession& session_;
  std::int64_t capacity_;
  Buffer keys_, values_;  ///< [kv_heads, capacity, head_dim]: the stored values, of one layer.
};

class Decoder::Kvtier final : public Attention {
 public:
  Kvtier(const ModelConfig& config, Compute& compute, KvSession& session,
         const AttendOptions& options)
      : config_(config), compute_(compute), session_(session), options_(options) {}

  void run(const LayerStep& step) override {
    const MemorySpace space = compute_.space();
    DecodeInputs inputs;
    inputs.query = TensorView(step.query, DType::kFloat32,
                              {step.tokens, config_.query_heads, config_.head_dim}, space);
    inputs.key = TensorView(step.key, DType::kBFloat16,
                            {step.tokens, config_.kv_heads, config_.head_dim}, space);
    inputs.value = TensorView(step.value, DType::kBFloat16,
                              {step.tokens, config_.kv_heads, config_.head_dim}, space);
    AttendOutputs outputs;
    outputs.out = MutableTensorView(step.out, DType::kFloat32,
                                    {step.tokens, config_.query_heads, config_.head_dim}, space);
    session_.decode(step.layer, inputs, outputs, compute_.stream(), options_);
  }

 private:
  const ModelConfig& config_;
  Compute& compute_;
  KvSession& session_;
  const AttendOptions& options_;
};

Decoder::Decoder(const ModelConfig& config, Weights weights, std::unique_ptr<Compute> compute)
    : config_(config),
      compute_(std::move(compute)),
      weights_(std::move(weights)),
      frequencies_(rope_frequencies(config)) {}

void Decoder::prefill(KvSession& session, std::span<const std::int32_t> tokens,
                      const PassOptions& options) {
  check_tokens(tokens);
  for (int layer = 0; layer < config_.layers; ++layer) {
    if (session.length(layer) != 0) {
      throw_error(ErrorCode::kFailedPrecondition, "prefill: expected an empty session, found ",
                  session.length(layer), " tokens");
    }
  }
  if (tokens.empty()) return;
  DensePrefill attention(config_, *compute_, session, static_cast<std::int64_t>(tokens.size()));
  forward(tokens, 0, attention, false, options);
  compute_->wait();
}

std::vector<float> Decoder::decode(KvSession& session, std::span<const std::int32_t> tokens,
                                   const AttendOptions& attend, const PassOptions& options) {
  check_tokens(tokens);
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::vector<float> logits(tokens.size() * static_cast<std::size_t>(config_.vocab_size));
  if (tokens.empty()) return logits;
  Kvtier attention(config_, *compute_, session, attend);
  PassOptions pass = options;
  pass.chunk_tokens = std::min(pass.chunk_tokens, kDecodeTokens);
  const Buffer hidden = forward(tokens, session.length(), attention, true, pass);

  compute_->rms_norm(hidden.floats(), weights_.final_norm, count, config_.hidden_size,
                     static_cast<float>(config_.rms_norm_eps), hidden.floats());
  const Matrix& head = weights_.head.empty() ? weights_.embedding : weights_.head;
  const Buffer out = compute_->allocate(logits.size() * sizeof(float));
  compute_->linear(hidden.floats(), count, head, {}, out.floats());
  compute_->download(logits.data(), out.floats(), logits.size() * sizeof(float));
  return logits;
}

Buffer Decoder::forward(std::span<const std::int32_t> tokens, std::int64_t first,
                        Attention& attention, bool last_output, const PassOptions& options) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t chunk = std::clamp<std::int64_t>(options.chunk_tokens, 1, count);
  const std::int64_t q_columns = std::int64_t{config_.query_heads} * config_.head_dim;
  const std::int64_t kv_columns = std::int64_t{config_.kv_heads} * config_.head_dim;

  Workspace work;
  for (Buffer* buffer : {&work.query, &work.context}) {
    *buffer = compute_->allocate(fp32_bytes(chunk * q_columns));
  }
  for (Buffer* buffer : {&work.key, &work.value}) {
    *buffer = compute_->allocate(fp32_bytes(chunk * kv_columns));
  }
  for (Buffer* buffer : {&work.key_stored, &work.value_stored}) {
    *buffer = compute_->allocate(bf16_bytes(chunk * kv_columns));
  }
  for (Buffer* buffer : {&work.gate, &work.up}) {
    *buffer = compute_->allocate(fp32_bytes(chunk * config_.intermediate_size));
  }
  work.normed = compute_->allocate(fp32_bytes(chunk * config_.hidden_size));
  work.rope = rope_table(first, count);
  work.first = first;
  Buffer hidden = compute_->allocate(fp32_bytes(count * config_.hidden_size));
  compute_->gather(weights_.embedding, tokens.data(), count, hidden.floats());

  for (int layer = 0; layer < config_.layers; ++layer) {
    const LayerWeights& weights = weights_.layers[static_cast<std::size_t>(layer)];
    const bool output = last_output || layer + 1 < config_.layers;
    for (std::int64_t begin = 0; begin < count; begin += chunk) {
      LayerStep step{.layer = layer,
                     .first_position = first + begin,
                     .tokens = std::min(chunk, count - begin),
                     .key = work.key_stored.bfloats(),
                     .value = work.value_stored.bfloats()};
      if (output) {
        step.query = work.query.floats();
        step.out = work.context.floats();
      }
      float* rows = hidden.floats() + begin * config_.hidden_size;
      attention_block(weights, step, work, rows, attention, options);
      if (output) mlp_block(weights, step.tokens, work, rows);
      if (options.progress) {
        options.progress(layer * count + begin + step.tokens, config_.layers * count);
      }
    }
  }
  return hidden;
}

void Decoder::attention_block(const LayerWeights& weights, const LayerStep& step, Workspace& work,
                              float* hidden, Attention& attention, const PassOptions& options) {
  const std::int64_t tokens = step.tokens;
  const int d = config_.head_dim;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const float* rope = work.rope.floats() + (step.first_position - work.first) * d;
  const auto project = [&](const Projection& projection, const Vector& norm, int heads, float* out,
                           bool rotated) {
    compute_->linear(work.normed.floats(), tokens, projection.weight, projection.bias, out);
    if (!norm.empty()) compute_->rms_norm(out, norm, tokens * heads, d, eps, out);
    if (rotated) compute_->rotate(out, tokens, heads, d, rope);
  };

  compute_->rms_norm(hidden, weights.attention_norm, tokens, config_.hidden_size, eps,
                     work.normed.floats());
  project(weights.k, weights.k_norm, config_.kv_heads, work.key.floats(), true);
  project(weights.v, {}, config_.kv_heads, work.value.floats(), false);
  const std::int64_t kv_count = tokens * config_.kv_heads * d;
  compute_->round(work.key.floats(), kv_count, step.key);
  compute_->round(work.value.floats(), kv_count, step.value);
  if (step.query != nullptr) {
    project(weights.q, weights.q_norm, config_.query_heads, step.query, true);
  }
  attention.run(step);
  if (options.observer) options.observer(step);
  if (step.query == nullptr) return;
  compute_->linear(step.out, tokens, weights.o.weight, weights.o.bias, work.normed.floats());
  compute_->add(hidden, work.normed.floats(), tokens * config_.hidden_size);
}

void Decoder::mlp_block(const LayerWeights& weights, std::int64_t tokens, Workspace& work,
                        float* hidden) {
  compute_->rms_norm(hidden, weights.mlp_norm, tokens, config_.hidden_size,
                     static_cast<float>(config_.rms_norm_eps), work.normed.floats());
  compute_->linear(work.normed.floats(), tokens, weights.gate.weight, weights.gate.bias,
                   work.gate.floats());
  compute_->linear(work.normed.floats(), tokens, weights.up.weight, weights.up.bias,
                   work.up.floats());
  compute_->swiglu(work.gate.floats(), work.up.floats(), tokens * config_.intermediate_size);
  compute_->linear(work.gate.floats(), tokens, weights.down.weight, weights.down.bias,
                   work.normed.floats());
  compute_->add(hidden, work.normed.floats(), tokens * config_.hidden_size);
}

Buffer Decoder::rope_table(std::int64_t first, std::int64_t tokens) {
  const std::size_t half = frequencies_.size();
  std::vector<float> table(static_cast<std::size_t>(tokens) * half * 2);
  auto out = table.begin();
  for (std::int64_t t = 0; t < tokens; ++t, out += static_cast<std::ptrdiff_t>(2 * half)) {
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(first + t) * frequencies_[i];
      out[static_cast<std::ptrdiff_t>(i)] = static_cast<float>(std::cos(angle));
      out[static_cast<std::ptrdiff_t>(half + i)] = static_cast<float>(std::sin(angle));
    }
  }
  Buffer buffer = compute_->allocate(table.size() * sizeof(float));
  compute_->upload(buffer.floats(), table.data(), table.size() * sizeof(float));
  return buffer;
}

void Decoder::check_tokens(std::span<const std::int32_t> tokens) const {
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= config_.vocab_size) {
      throw_invalid("token", join("0 to ", config_.vocab_size - 1), token);
    }
  }
}

Decoder load_decoder(const std::filesystem::path& directory, std::unique_ptr<Compute> compute) {
  const ModelConfig config = read_model_config(directory);
  Weights weights = load_weights(directory, config, *compute);
  return Decoder(config, std::move(weights), std::move(compute));
}

}  // namespace kvtier::llama
