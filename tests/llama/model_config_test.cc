#include "llama/model_config.h"

#include "kvtier/error.h"

#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>

namespace kvtier::llama {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kRequired =
    R"("vocab_size": 1040, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
       "num_attention_heads": 8, "num_key_value_heads": 2)";

std::string config_text(const std::string& type, const std::string& more = "") {
  return R"({"model_type": ")" + type + "\", " + kRequired + (more.empty() ? "" : ", ") + more +
         "}";
}

/// Parses and returns the message of the error, with its code in front.
std::string error_of(const std::string& text) {
  try {
    (void)parse_model_config(text);
  } catch (const Error& error) {
    return std::string(error_code_name(error.code())) + ": " + error.what();
  }
  return "accepted";
}

TEST(ModelConfig, ReadsALlamaConfiguration) {
  const ModelConfig config = parse_model_config(config_text(
      "llama", R"("architectures": ["LlamaForCausalLM"], "head_dim": 128, "rope_theta": 1000000.0,
                  "rms_norm_eps": 1e-05, "max_position_embeddings": 1048576, "hidden_act": "silu",
                  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "bos_token_id": 1,
                  "eos_token_id": 4, "attention_bias": false, "mlp_bias": false,
                  "transformers_version": "4.51.0", "rope_scaling": null)"));

  EXPECT_EQ(config.architecture, Architecture::kLlama);
  EXPECT_EQ(config.vocab_size, 1040);
  EXPECT_EQ(config.hidden_size, 512);
  EXPECT_EQ(config.intermediate_size, 1024);
  EXPECT_EQ(config.layers, 4);
  EXPECT_EQ(config.query_heads, 8);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.group(), 4);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_DOUBLE_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_DOUBLE_EQ(config.rope_theta, 1e6);
  EXPECT_FALSE(config.tied_embeddings);
  EXPECT_FALSE(config.qk_norm());
  EXPECT_THAT(config.eos_tokens, ElementsAre(4));
  EXPECT_EQ(config.max_positions, 1048576);
}

TEST(ModelConfig, TakesTheHeadDimensionFromTheWidthOfLlama) {
  EXPECT_EQ(parse_model_config(config_text("llama")).head_dim, 64);
}

TEST(ModelConfig, ReadsAQwen3Configuration) {
  const ModelConfig config = parse_model_config(
      config_text("qwen3", R"("architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": true,
                              "attention_bias": true, "use_sliding_window": false,
                              "sliding_window": 4096, "max_window_layers": 28,
                              "layer_types": ["full_attention", "full_attention"],
                              "eos_token_id": [7, 9])"));

  EXPECT_EQ(config.architecture, Architecture::kQwen3);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_TRUE(config.qk_norm());
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_TRUE(config.attention_bias);
  EXPECT_THAT(config.eos_tokens, ElementsAre(7, 9));
}

TEST(ModelConfig, AcceptsUnknownFieldsThatAreOff) {
  EXPECT_NO_THROW((void)parse_model_config(
      config_text("llama", R"("some_feature": false, "another": null, "_name_or_path": "x")")));
}

struct Rejected {
  const char* more;      ///< Fields added to a valid configuration.
  const char* field;     ///< Named in the message.
  const char* expected;  ///< In the message.
  const char* found;
};

class ModelConfigRejects : public ::testing::TestWithParam<Rejected> {};

TEST_P(ModelConfigRejects, AFieldByName) {
  const Rejected& p = GetParam();

  EXPECT_THAT(error_of(config_text("llama", p.more)),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(std::string(p.field) + ": expected"),
                    HasSubstr(p.expected), HasSubstr(std::string("found ") + p.found)));
}

INSTANTIATE_TEST_SUITE_P(
    , ModelConfigRejects,
    ::testing::Values(
        Rejected{R"("architectures": ["MistralForCausalLM"])", "architectures", "LlamaForCausalLM",
                 "[\"Mistral"},
        Rejected{R"("hidden_act": "gelu")", "hidden_act", "silu", "\"gelu\""},
        Rejected{R"("mlp_bias": true)", "mlp_bias", "false", "true"},
        Rejected{R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0})",
                 "rope_scaling.rope_type", "llama3", "\"yarn\""},
        Rejected{R"("rope_scaling": {"type": "linear", "factor": 4.0})", "rope_scaling.rope_type",
                 "llama3", "\"linear\""},
        Rejected{R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0})",
                 "rope_scaling.original_max_position_embeddings", "a number above 0", "nothing"},
        Rejected{R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})",
                 "rope_scaling.high_freq_factor", "more than low_freq_factor", "4.0"},
        Rejected{R"("rope_scaling": {"rope_type": "default", "mscale": 2.0})",
                 "rope_scaling.mscale", "no such field", "2.0"},
        Rejected{R"("rope_scaling": 4)", "rope_scaling", "an object", "4"},
        Rejected{R"("sliding_window": 4096)", "sliding_window", "null", "4096"},
        Rejected{R"("use_sliding_window": true)", "use_sliding_window", "false", "true"},
        Rejected{R"("use_qk_norm": true)", "use_qk_norm", "false", "true"},
        Rejected{R"("layer_types": ["full_attention", "sliding_attention"])", "layer_types",
                 "full_attention", "\"sliding_attention\""},
        Rejected{R"("partial_rotary_factor": 0.5)", "partial_rotary_factor", "1.0", "0.5"},
        Rejected{R"("quantization_config": {"quant_method": "awq"})", "quantization_config", "null",
                 "{\"quant_method"},
        Rejected{R"("num_experts": 128)", "num_experts", "0", "128"},
        Rejected{R"("num_local_experts": 8)", "num_local_experts", "0", "8"},
        Rejected{R"("n_routed_experts": 64)", "n_routed_experts", "0", "64"},
        Rejected{R"("attn_logit_softcapping": 50.0)", "attn_logit_softcapping", "null", "50.0"},
        Rejected{R"("final_logit_softcapping": 30.0)", "final_logit_softcapping", "null", "30.0"},
        Rejected{R"("attention_multiplier": 0.01)", "attention_multiplier", "null", "0.01"},
        Rejected{R"("query_pre_attn_scalar": 144)", "query_pre_attn_scalar", "null", "144"},
        Rejected{R"("embedding_multiplier": 12.0)", "embedding_multiplier", "1.0", "12.0"},
        Rejected{R"("residual_multiplier": 0.2)", "residual_multiplier", "1.0", "0.2"},
        Rejected{R"("logits_scaling": 8.0)", "logits_scaling", "1.0", "8.0"},
        Rejected{R"("logit_scale": 0.06)", "logit_scale", "1.0", "0.06"},
        Rejected{R"("something_new": 3)", "something_new", "no such field", "3"},
        Rejected{R"("head_dim": 80)", "head_dim", "64, 96, 128 or 256", "80"},
        Rejected{R"("rms_norm_eps": 0)", "rms_norm_eps", "a number above 0", "0"},
        Rejected{R"("rope_theta": "big")", "rope_theta", "a number above 0", "\"big\""},
        Rejected{R"("attention_bias": 1)", "attention_bias", "true or false", "1"},
        Rejected{R"("eos_token_id": "end")", "eos_token_id", "a token id", "\"end\""}),
    [](const auto& test) { return "Case" + std::to_string(test.index); });

TEST(ModelConfig, RejectsAnUnknownModelType) {
  EXPECT_THAT(error_of(config_text("mixtral")),
              HasSubstr("model_type: expected \"llama\" or \"qwen3\", found \"mixtral\""));
  EXPECT_THAT(error_of("{}"), HasSubstr("model_type: expected"));
}

TEST(ModelConfig, RejectsMissingAndImpossibleSizes) {
  const auto with = [](const std::string& size) {
    return std::string(R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 64, )") + size +
           "}";
  };

  EXPECT_THAT(error_of(with(R"("num_hidden_layers": 1)")),
              HasSubstr("intermediate_size: expected an integer from 1"));
  EXPECT_THAT(error_of(with(R"("intermediate_size": 0)")), HasSubstr("found 0"));
  EXPECT_THAT(error_of(with(R"("intermediate_size": 18446744073709551615)")),
              HasSubstr("intermediate_size: expected"));
  EXPECT_THAT(error_of(with(R"("intermediate_size": 64, "num_hidden_layers": 1,
                               "num_attention_heads": 4, "num_key_value_heads": 3)")),
              HasSubstr("num_key_value_heads: expected a divisor"));
}

TEST(ModelConfig, RejectsTextThatIsNoObject) {
  EXPECT_THAT(error_of("{\"model_type\": "), HasSubstr("DATA_LOSS"));
  EXPECT_THAT(error_of("[1]"), AllOf(HasSubstr("DATA_LOSS"), HasSubstr("found array")));
}

TEST(ModelConfig, NamesTheFileThatIsMissing) {
  const testing::TemporaryFolder folder;

  try {
    (void)read_model_config(folder.path());
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_THAT(error.what(), HasSubstr((folder.path() / "config.json").string()));
  }
}

TEST(RopeFrequencies, ArePowersOfTheta) {
  const ModelConfig config = parse_model_config(config_text("llama", R"("rope_theta": 500000.0)"));

  const std::vector<double> frequencies = rope_frequencies(config);

  ASSERT_EQ(frequencies.size(), 32U);
  for (std::size_t i = 0; i < 32; ++i) {
    const double expected = 1.0 / std::pow(500000.0, static_cast<double>(i) / 32.0);
    EXPECT_NEAR(frequencies[i], expected, 1e-12 * expected) << i;
  }
}

TEST(RopeFrequencies, FollowTheThreeRangesOfLlama3) {
  const ModelConfig config = parse_model_config(config_text(
      "llama", R"("head_dim": 128, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3",
                  "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192})"));
  int kept = 0;
  int stretched = 0;

  const std::vector<double> frequencies = rope_frequencies(config);

  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double plain = std::pow(500000.0, -static_cast<double>(i) / 64.0);
    const double wavelength = 2.0 * std::numbers::pi / plain;
    double expected = plain;
    if (wavelength > 8192.0 / 1.0) {
      expected = plain / 8.0;
      ++stretched;
    } else if (wavelength < 8192.0 / 4.0) {
      ++kept;
    } else {
      const double smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
      expected = (1.0 - smooth) * plain / 8.0 + smooth * plain;
    }
    EXPECT_NEAR(frequencies[i], expected, 1e-12 * expected) << i;
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(stretched, 0);
  EXPECT_LT(kept + stretched, 64);
}

TEST(RopeFrequencies, ReadRopeParametersOfNewerFiles) {
  const ModelConfig config = parse_model_config(config_text(
      "llama", R"("rope_parameters": {"rope_theta": 250000.0, "rope_type": "default"})"));

  EXPECT_DOUBLE_EQ(config.rope_theta, 250000.0);
}

}  // namespace
}  // namespace kvtier::llama
