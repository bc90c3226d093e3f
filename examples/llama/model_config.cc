#include "llama/model_config.h"

#include "include/types/failure.h"

#include <nlohmann/json.hpp>

#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numbers>
#include <set>

namespace kvtier::llama {
namespace {

using Json = nlohmann::json;

[[noreturn]] void reject(std::string_view field, const std::string& expected,
                         const std::string& found) {
  throw_invalid(join("config.json: ", field), expected, found);
}

/// Reads fields and remembers which were looked at, so that the rest can be judged.
class Fields {
 public:
  Fields(const Json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  /// Returns the field, or null when it is absent.
  const Json& get(const std::string& name) {
    static const Json null;
    seen_.insert(name);
    const auto it = object_.find(name);
    return it == object_.end() ? null : *it;
  }

  std::int64_t integer(const std::string& name, std::optional<std::int64_t> fallback,
                       std::int64_t lowest = 1, std::int64_t highest = std::int64_t{1} << 31) {
    const Json& value = get(name);
    const std::string expected = join("an integer from ", lowest, " to ", highest);
    if (value.is_null()) {
      if (!fallback) reject(prefix_ + name, expected, "nothing");
      return *fallback;
    }
    if (!value.is_number_integer()) reject(prefix_ + name, expected, value.dump());
    // A literal above 2^63 reads as negative and is rejected below all the same.
    const auto number = value.get<std::int64_t>();
    if (number < lowest || number > highest) reject(prefix_ + name, expected, value.dump());
    return number;
  }

  double positive(const std::string& name, std::optional<double> fallback) {
    const Json& value = get(name);
    if (value.is_null() && fallback) return *fallback;
    if (!value.is_number() || !(value.get<double>() > 0.0)) {
      reject(prefix_ + name, "a number above 0", value.is_null() ? "nothing" : value.dump());
    }
    return value.get<double>();
  }

  bool boolean(const std::string& name) {
    const Json& value = get(name);
    if (value.is_null()) return false;
    if (!value.is_boolean()) reject(prefix_ + name, "true or false", value.dump());
    return value.get<bool>();
  }

  /// Rejects a field unless it is absent, null or equal to `only`.
  void require(const std::string& name, const Json& only) {
    const Json& value = get(name);
    if (!value.is_null() && value != only) reject(prefix_ + name, only.dump(), value.dump());
  }

  void require_absent(const std::string& name) {
    const Json& value = get(name);
    if (!value.is_null()) reject(prefix_ + name, "null", value.dump());
  }

  void ignore(std::initializer_list<const char*> names) {
    for (const char* name : names) seen_.insert(name);
  }

  void reject_unknown() const {
    for (const auto& [name, value] : object_.items()) {
      const bool harmless = value.is_null() || value == false || name.starts_with('_');
      if (!harmless && seen_.count(name) == 0) {
        reject(prefix_ + name, "no such field (its effect is unknown)", value.dump());
      }
    }
  }

 private:
  const Json& object_;
  std::string prefix_;
  std::set<std::string> seen_;
};

Architecture read_architecture(Fields& fields) {
  const Json& type = fields.get("model_type");
  const bool llama = type == "llama";
  if (!llama && type != "qwen3") {
    reject("model_type", "\"llama\" or \"qwen3\"", type.is_null() ? "nothing" : type.dump());
  }
  fields.require("architectures", Json::array({llama ? "LlamaForCausalLM" : "Qwen3ForCausalLM"}));
  return llama ? Architecture::kLlama : Architecture::kQwen3;
}

/// Reads `rope_scaling`, or `rope_parameters`, which newer files have in its place.
void read_rope(Fields& fields, ModelConfig& config) {
  config.rope_theta = fields.positive("rope_theta", config.rope_theta);
  for (const std::string name : {"rope_scaling", "rope_parameters"}) {
    const Json& value = fields.get(name);
    if (value.is_null()) continue;
    if (!value.is_object()) reject(name, "an object or null", value.dump());
    Fields rope(value, name + ".");
    config.rope_theta = rope.positive("rope_theta", config.rope_theta);
    const Json& old_type = rope.get("type");
    const Json& type = value.contains("rope_type") ? rope.get("rope_type") : old_type;
    if (type == "llama3") {
      Llama3Scaling scaling;
      scaling.factor = rope.positive("factor", std::nullopt);
      scaling.low_freq_factor = rope.positive("low_freq_factor", std::nullopt);
      scaling.high_freq_factor = rope.positive("high_freq_factor", std::nullopt);
      scaling.original_context = rope.positive("original_max_position_embeddings", std::nullopt);
      if (scaling.high_freq_factor <= scaling.low_freq_factor) {
        reject(name + ".high_freq_factor", "more than low_freq_factor",
               value.at("high_freq_factor").dump());
      }
      config.rope_scaling = scaling;
    } else if (type != "default") {
      reject(name + ".rope_type", "\"default\" or \"llama3\"",
             type.is_null() ? "nothing" : type.dump());
    }
    rope.reject_unknown();
  }
}

void read_eos(Fields& fields, ModelConfig& config) {
  const Json& value = fields.get("eos_token_id");
  if (value.is_null()) return;
  const Json list = value.is_array() ? value : Json::array({value});
  for (const Json& id : list) {
    if (!id.is_number_integer()) reject("eos_token_id", "a token id or a list of them", id.dump());
    config.eos_tokens.push_back(id.get<std::int32_t>());
  }
}

/// Rejects features of related models that this decoder does not compute.
void reject_unsupported(Fields& fields, Architecture architecture) {
  fields.require("hidden_act", "silu");
  fields.require("mlp_bias", false);
  fields.require("use_sliding_window", false);
  // Qwen3 states a window that only use_sliding_window switches on.
  if (architecture == Architecture::kQwen3) {
    fields.ignore({"sliding_window"});
  } else {
    fields.require_absent("sliding_window");
    fields.require("use_qk_norm", false);
  }
  const Json& types = fields.get("layer_types");
  if (!types.is_null()) {
    if (!types.is_array()) reject("layer_types", "a list of \"full_attention\"", types.dump());
    for (const Json& type : types) {
      if (type != "full_attention") reject("layer_types", "\"full_attention\"", type.dump());
    }
  }
  for (const char* name : {"partial_rotary_factor", "embedding_multiplier", "residual_multiplier",
                           "logits_scaling", "logit_scale"}) {
    fields.require(name, 1.0);
  }
  for (const char* name : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    fields.require(name, 0);
  }
  for (const char* name : {"quantization_config", "attention_multiplier", "query_pre_attn_scalar",
                           "attn_logit_softcapping", "final_logit_softcapping"}) {
    fields.require_absent(name);
  }
}

void read_shape(Fields& fields, ModelConfig& config) {
  config.vocab_size = fields.integer("vocab_size", std::nullopt);
  config.hidden_size = fields.integer("hidden_size", std::nullopt);
  config.intermediate_size = fields.integer("intermediate_size", std::nullopt);
  config.layers = static_cast<int>(fields.integer("num_hidden_layers", std::nullopt, 1, 4096));
  const std::int64_t heads = fields.integer("num_attention_heads", std::nullopt, 1, 4096);
  const std::int64_t kv_heads = fields.integer("num_key_value_heads", heads, 1, 4096);
  config.query_heads = static_cast<int>(heads);
  config.kv_heads = static_cast<int>(kv_heads);
  if (heads % kv_heads != 0 || heads / kv_heads > 16) {
    reject("num_key_value_heads", "a divisor of num_attention_heads, at most 16 query heads each",
           std::to_string(kv_heads) + " for " + std::to_string(heads) + " query heads");
  }
  std::int64_t head_dim = 128;
  if (config.architecture == Architecture::kLlama) head_dim = config.hidden_size / heads;
  head_dim = fields.integer("head_dim", head_dim);
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256) {
    reject("head_dim", "64, 96, 128 or 256", std::to_string(head_dim));
  }
  config.head_dim = static_cast<int>(head_dim);
}

}  // namespace

ModelConfig parse_model_config(std::string_view json) {
  const Json root = Json::parse(json, nullptr, false);
  if (!root.is_object()) {
    throw_error(ErrorCode::kDataLoss, "config.json: expected a JSON object, found ",
                root.is_discarded() ? "malformed text" : root.type_name());
  }
  Fields fields(root, "");
  ModelConfig config;
  config.architecture = read_architecture(fields);
  read_shape(fields, config);
  config.rms_norm_eps = fields.positive("rms_norm_eps", config.rms_norm_eps);
  read_rope(fields, config);
  config.tied_embeddings = fields.boolean("tie_word_embeddings");
  config.attention_bias = fields.boolean("attention_bias");
  read_eos(fields, config);
  config.max_positions = fields.integer("max_position_embeddings", 0);
  reject_unsupported(fields, config.architecture);
  fields.ignore({"torch_dtype", "dtype", "bos_token_id", "pad_token_id", "transformers_version",
                 "use_cache", "initializer_range", "attention_dropout", "max_window_layers",
                 "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict"});
  fields.reject_unknown();
  return config;
}

ModelConfig read_model_config(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "config.json";
  std::ifstream file(path);
  if (!file) {
    throw_error(ErrorCode::kNotFound,
                "--model: expected a directory with config.json, found none at ", path.string());
  }
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return parse_model_config(text);
}

std::vector<double> rope_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies;
  for (int i = 0; i < config.head_dim / 2; ++i) {
    double frequency = std::pow(config.rope_theta, -2.0 * i / config.head_dim);
    if (config.rope_scaling) {
      const Llama3Scaling& s = *config.rope_scaling;
      // Turns that the frequency makes within the original context.
      const double turns = s.original_context * frequency / (2.0 * std::numbers::pi);
      const double keep = std::clamp(
          (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0);
      frequency *= keep + (1.0 - keep) / s.factor;
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

}  // namespace kvtier::llama
