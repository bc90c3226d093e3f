#include "tests/llama/reference_model.h"

#include "formats/safetensors.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <numbers>
#include <random>
#include <sstream>

namespace kvtier::testing {
namespace {

std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// Rounds to the 8 significant bits of bf16, to nearest even.
double bf16(double value) {
  if (value == 0.0) return 0.0;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(mantissa * 256.0), exponent - 8);
}

/// The bytes of values that bf16 holds exactly, in another dtype. fp16 holds those of magnitude
/// 2^-14 and above exactly too.
std::vector<std::byte> encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * (dtype == DType::kFloat32 ? 4 : 2));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t bits = bits_of(values[i]);
    if (dtype == DType::kFloat32) {
      std::memcpy(&bytes[4 * i], &bits, 4);
      continue;
    }
    std::uint32_t half = bits >> 16;
    if (dtype == DType::kFloat16) {
      const std::uint32_t exponent = (bits >> 23) & 0xffU;
      half = exponent < 113
                 ? 0
                 : ((bits >> 16) & 0x8000U) | ((exponent - 112U) << 10) | ((bits >> 13) & 0x3ffU);
    }
    const auto stored = static_cast<std::uint16_t>(half);
    std::memcpy(&bytes[2 * i], &stored, 2);
  }
  return bytes;
}

}  // namespace

void ReferenceModel::randomize(unsigned seed) {
  std::mt19937 generator(seed);
  const auto fill = [&](const std::string& name, std::vector<std::int64_t> shape, double mean,
                        double deviation) {
    std::normal_distribution<double> normal(mean, deviation);
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) {
      const double drawn = bf16(normal(generator));
      value = std::abs(drawn) < 0x1p-14 ? 0.0F : static_cast<float>(drawn);
    }
    weights[name] = {std::move(shape), std::move(values)};
  };
  const auto matrix = [&](const std::string& name, int rows, int columns, bool biased) {
    fill(name + ".weight", {rows, columns}, 0.0, 1.5 / std::sqrt(columns));
    if (biased) fill(name + ".bias", {rows}, 0.0, 0.3);
  };
  weights.clear();
  fill("model.embed_tokens.weight", {vocab, hidden}, 0.0, 1.0);
  if (!tied) matrix("lm_head", vocab, hidden, false);
  fill("model.norm.weight", {hidden}, 1.0, 0.2);
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    fill(prefix + "input_layernorm.weight", {hidden}, 1.0, 0.2);
    fill(prefix + "post_attention_layernorm.weight", {hidden}, 1.0, 0.2);
    matrix(prefix + "self_attn.q_proj", heads * head_dim, hidden, bias);
    matrix(prefix + "self_attn.k_proj", kv_heads * head_dim, hidden, bias);
    matrix(prefix + "self_attn.v_proj", kv_heads * head_dim, hidden, bias);
    matrix(prefix + "self_attn.o_proj", hidden, heads * head_dim, bias);
    if (qwen3) {
      fill(prefix + "self_attn.q_norm.weight", {head_dim}, 1.0, 0.2);
      fill(prefix + "self_attn.k_norm.weight", {head_dim}, 1.0, 0.2);
    }
    matrix(prefix + "mlp.gate_proj", inner, hidden, false);
    matrix(prefix + "mlp.up_proj", inner, hidden, false);
    matrix(prefix + "mlp.down_proj", hidden, inner, false);
  }
}

std::string ReferenceModel::config_json() const {
  std::ostringstream text;
  text << R"({"architectures": [")" << (qwen3 ? "Qwen3ForCausalLM" : "LlamaForCausalLM")
       << R"("], "model_type": ")" << (qwen3 ? "qwen3" : "llama") << R"(", "vocab_size": )" << vocab
       << R"(, "hidden_size": )" << hidden << R"(, "intermediate_size": )" << inner
       << R"(, "num_hidden_layers": )" << layers << R"(, "num_attention_heads": )" << heads
       << R"(, "num_key_value_heads": )" << kv_heads << R"(, "head_dim": )" << head_dim
       << R"(, "rms_norm_eps": )" << eps << R"(, "rope_theta": )" << theta
       << R"(, "attention_bias": )" << (bias ? "true" : "false") << R"(, "tie_word_embeddings": )"
       << (tied ? "true" : "false") << R"(, "hidden_act": "silu")";
  if (eos >= 0) text << R"(, "eos_token_id": )" << eos;
  if (llama3) {
    text << R"(, "rope_scaling": {"rope_type": "llama3", "factor": )" << scaling.factor
         << R"(, "low_freq_factor": )" << scaling.low << R"(, "high_freq_factor": )" << scaling.high
         << R"(, "original_max_position_embeddings": )" << scaling.original << "}";
  }
  text << "}";
  return text.str();
}

void ReferenceModel::write(const std::filesystem::path& directory, DType dtype,
                           bool sharded) const {
  std::ofstream(directory / "config.json") << config_json();
  std::map<std::string, std::vector<std::byte>> bytes;
  std::map<std::string, formats::Tensor> shards[2];
  std::ostringstream map;
  for (const auto& [name, weight] : weights) {
    bytes[name] = encode(weight.values, dtype);
    const std::size_t shard = sharded ? bytes.size() % 2 : 0;
    shards[shard][name] = {.dtype = dtype,
                           .shape = weight.shape,
                           .data = bytes[name].data(),
                           .bytes = bytes[name].size()};
    map << (map.tellp() == 0 ? "" : ", ") << '"' << name << R"(": "model-)" << shard
        << R"(.safetensors")";
  }
  if (!sharded) {
    formats::write_safetensors(directory / "model.safetensors", shards[0]);
    return;
  }
  formats::write_safetensors(directory / "model-0.safetensors", shards[0]);
  formats::write_safetensors(directory / "model-1.safetensors", shards[1]);
  std::ofstream(directory / "model.safetensors.index.json")
      << R"({"metadata": {}, "weight_map": {)" << map.str() << "}}";
}

ReferenceModel::Rows ReferenceModel::project(const Rows& x, const std::string& name) const {
  const Weight& weight = weights.at(name + ".weight");
  const auto bias_it = weights.find(name + ".bias");
  const auto rows = static_cast<std::size_t>(weight.shape[0]);
  const auto columns = static_cast<std::size_t>(weight.shape[1]);
  Rows out(x.size(), std::vector<double>(rows));
  for (std::size_t t = 0; t < x.size(); ++t) {
    for (std::size_t r = 0; r < rows; ++r) {
      double sum = bias_it == weights.end() ? 0.0 : double{bias_it->second.values[r]};
      for (std::size_t c = 0; c < columns; ++c) sum += weight.values[r * columns + c] * x[t][c];
      out[t][r] = sum;
    }
  }
  return out;
}

std::vector<double> ReferenceModel::norm(const double* x, int size, const std::string& name) const {
  double squares = 0.0;
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  std::vector<double> out(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = x[i] / std::sqrt(squares / size + eps) * weights.at(name).values[i];
  }
  return out;
}

ReferenceModel::Rows ReferenceModel::norm_rows(const Rows& x, const std::string& name) const {
  Rows out;
  for (const std::vector<double>& row : x) out.push_back(norm(row.data(), hidden, name));
  return out;
}

void ReferenceModel::rotate(double* x, std::int64_t position) const {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    double frequency = 1.0 / std::pow(theta, 2.0 * i / head_dim);
    if (llama3) {
      // The three cases of Llama 3.1, by wavelength.
      const double wavelength = 2.0 * std::numbers::pi / frequency;
      if (wavelength > scaling.original / scaling.low) {
        frequency /= scaling.factor;
      } else if (wavelength >= scaling.original / scaling.high) {
        const double smooth =
            (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low);
        frequency = (1.0 - smooth) * frequency / scaling.factor + smooth * frequency;
      }
    }
    const double angle = static_cast<double>(position) * frequency;
    const double a = x[i];
    const double b = x[i + half];
    x[i] = a * std::cos(angle) - b * std::sin(angle);
    x[i + half] = b * std::cos(angle) + a * std::sin(angle);
  }
}

void ReferenceModel::prepare_heads(Rows& x, int count, const std::string& norm_name) const {
  for (std::size_t t = 0; t < x.size(); ++t) {
    for (int head = 0; head < count; ++head) {
      double* values = x[t].data() + head * head_dim;
      if (qwen3) {
        const std::vector<double> normed = norm(values, head_dim, norm_name);
        std::copy(normed.begin(), normed.end(), values);
      }
      rotate(values, static_cast<std::int64_t>(t));
    }
  }
}

ReferenceModel::Rows ReferenceModel::attention(const Rows& normed,
                                               const std::string& prefix) const {
  Rows q = project(normed, prefix + "q_proj");
  Rows k = project(normed, prefix + "k_proj");
  Rows v = project(normed, prefix + "v_proj");
  prepare_heads(q, heads, prefix + "q_norm.weight");
  prepare_heads(k, kv_heads, prefix + "k_norm.weight");
  for (Rows* rows : {&k, &v}) {
    for (std::vector<double>& row : *rows) {
      for (double& value : row) value = bf16(value);
    }
  }
  Rows out(q.size(), std::vector<double>(q.front().size()));
  for (std::size_t t = 0; t < q.size(); ++t) {
    for (int head = 0; head < heads; ++head) {
      const double* query = q[t].data() + head * head_dim;
      const int kv_offset = head / (heads / kv_heads) * head_dim;
      std::vector<double> logits;
      double max = -1e300;
      for (std::size_t j = 0; j <= t; ++j) {
        double dot = 0.0;
        for (int i = 0; i < head_dim; ++i) {
          dot += query[i] * k[j][static_cast<std::size_t>(kv_offset + i)];
        }
        logits.push_back(dot / std::sqrt(head_dim));
        max = std::max(max, logits.back());
      }
      double sum = 0.0;
      for (double& logit : logits) sum += logit = std::exp(logit - max);
      for (std::size_t j = 0; j <= t; ++j) {
        for (int i = 0; i < head_dim; ++i) {
          out[t][static_cast<std::size_t>(head * head_dim + i)] +=
              logits[j] / sum * v[j][static_cast<std::size_t>(kv_offset + i)];
        }
      }
    }
  }
  return project(out, prefix + "o_proj");
}

ReferenceModel::Rows ReferenceModel::mlp(const Rows& normed, const std::string& prefix) const {
  Rows gate = project(normed, prefix + "gate_proj");
  const Rows up = project(normed, prefix + "up_proj");
  for (std::size_t t = 0; t < gate.size(); ++t) {
    for (std::size_t i = 0; i < gate[t].size(); ++i) {
      gate[t][i] *= up[t][i] / (1.0 + std::exp(-gate[t][i]));
    }
  }
  return project(gate, prefix + "down_proj");
}

std::vector<double> ReferenceModel::logits(const std::vector<std::int32_t>& tokens) const {
  const auto columns = static_cast<std::size_t>(hidden);
  const auto add = [columns](Rows& x, const Rows& y) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t i = 0; i < columns; ++i) x[t][i] += y[t][i];
    }
  };
  Rows x;
  for (const std::int32_t token : tokens) {
    const auto begin = weights.at("model.embed_tokens.weight").values.begin() + token * hidden;
    x.emplace_back(begin, begin + hidden);
  }
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add(x, attention(norm_rows(x, prefix + "input_layernorm.weight"), prefix + "self_attn."));
    add(x, mlp(norm_rows(x, prefix + "post_attention_layernorm.weight"), prefix + "mlp."));
  }
  const Rows out =
      project(norm_rows(x, "model.norm.weight"), tied ? "model.embed_tokens" : "lm_head");
  std::vector<double> flat;
  for (const std::vector<double>& row : out) flat.insert(flat.end(), row.begin(), row.end());
  return flat;
}

std::vector<std::int32_t> random_tokens(std::int64_t count, int vocab, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<std::int32_t> uniform(0, vocab - 1);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (std::int32_t& token : tokens) token = uniform(generator);
  return tokens;
}

}  // namespace kvtier::testing
