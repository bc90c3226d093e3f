#include "llama/weights.h"

#include "kvtier/error.h"

#include "formats/safetensors.h"
#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

namespace kvtier::llama {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::ReferenceModel;
using testing::TemporaryFolder;

class WeightsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_.bias = true;
    model_.randomize(5);
  }

  Weights load() {
    return load_weights(folder_.path(), read_model_config(folder_.path()), *compute_);
  }

  /// Loads and returns the error, code first.
  std::string error() {
    try {
      (void)load();
    } catch (const Error& error) {
      return std::string(error_code_name(error.code())) + ": " + error.what();
    }
    return "accepted";
  }

  void expect_equal(const Buffer& buffer, const std::string& name) {
    const std::vector<float>& expected = model_.weights.at(name).values;
    ASSERT_FALSE(buffer.empty()) << name;
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), buffer.floats())) << name;
  }

  TemporaryFolder folder_;
  ReferenceModel model_;
  std::unique_ptr<Compute> compute_ = make_cpu_compute(1);
};

TEST_F(WeightsTest, AreTheSameFromAnyDtypeAndNumberOfShards) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const bool sharded : {false, true}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + (sharded ? ", sharded" : ""));
      std::filesystem::remove(folder_.path() / "model.safetensors.index.json");
      model_.write(folder_.path(), dtype, sharded);

      const Weights weights = load();

      ASSERT_EQ(weights.layers.size(), 2U);
      expect_equal(weights.embedding.buffer, "model.embed_tokens.weight");
      expect_equal(weights.head.buffer, "lm_head.weight");
      expect_equal(weights.layers[1].q.weight.buffer, "model.layers.1.self_attn.q_proj.weight");
      expect_equal(weights.layers[1].v.bias, "model.layers.1.self_attn.v_proj.bias");
      expect_equal(weights.layers[0].down.weight.buffer, "model.layers.0.mlp.down_proj.weight");
    }
  }
}

TEST_F(WeightsTest, HaveNoHeadWhenTiedEvenIfTheFileHasOne) {
  model_.tied = true;
  model_.write(folder_.path());

  EXPECT_TRUE(load().head.empty());
}

TEST_F(WeightsTest, MissingIsNamedWithItsShape) {
  model_.weights.erase("model.layers.1.mlp.up_proj.weight");
  model_.write(folder_.path());

  EXPECT_THAT(error(), AllOf(HasSubstr("NOT_FOUND"),
                             HasSubstr("model.layers.1.mlp.up_proj.weight [96, 64], found none")));
}

TEST_F(WeightsTest, ExtraIsNamed) {
  model_.weights["model.layers.2.mlp.up_proj.weight"] = {{1}, {1.0F}};
  model_.write(folder_.path());

  EXPECT_THAT(error(), AllOf(HasSubstr("INVALID_ARGUMENT"),
                             HasSubstr("model.layers.2.mlp.up_proj.weight: expected only")));
}

TEST_F(WeightsTest, StoredRotationFrequenciesAreNoError) {
  model_.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{1}, {1.0F}};
  model_.write(folder_.path());

  EXPECT_NO_THROW((void)load());
}

TEST_F(WeightsTest, BiasThatTheConfigurationDoesNotCallForIsExtra) {
  model_.bias = false;
  model_.write(folder_.path());

  EXPECT_THAT(error(), HasSubstr("proj.bias: expected only weights"));
}

TEST_F(WeightsTest, WrongShapeIsNamedWithBoth) {
  model_.weights["model.norm.weight"] = {{63}, std::vector<float>(63)};
  model_.write(folder_.path());

  EXPECT_THAT(error(), AllOf(HasSubstr("INVALID_ARGUMENT"),
                             HasSubstr("model.norm.weight: expected fp32, fp16 or bf16 [64], found "
                                       "bf16 [63]")));
}

TEST_F(WeightsTest, IntegerWeightIsRejected) {
  model_.write(folder_.path());
  const std::vector<std::int32_t> values(64, 1);
  const formats::Tensor tensor{.dtype = DType::kInt32,
                               .shape = {64},
                               .data = reinterpret_cast<const std::byte*>(values.data()),
                               .bytes = 256};
  std::map<std::string, formats::Tensor> tensors;
  const auto file = formats::SafeTensors::open(folder_.path() / "model.safetensors");
  for (const auto& [name, weight] : file.tensors()) tensors[name] = weight;
  tensors["model.norm.weight"] = tensor;
  formats::write_safetensors(folder_.path() / "changed.safetensors", tensors);
  std::filesystem::rename(folder_.path() / "changed.safetensors",
                          folder_.path() / "model.safetensors");

  EXPECT_THAT(error(), HasSubstr("found int32 [64]"));
}

TEST_F(WeightsTest, TruncatedShardIsDataLoss) {
  model_.write(folder_.path(), DType::kBFloat16, true);
  const auto path = folder_.path() / "model-1.safetensors";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);

  EXPECT_THAT(error(), AllOf(HasSubstr("DATA_LOSS"), HasSubstr("model-1.safetensors")));
}

TEST_F(WeightsTest, MissingShardIsNamed) {
  model_.write(folder_.path(), DType::kBFloat16, true);
  std::filesystem::remove(folder_.path() / "model-0.safetensors");

  EXPECT_THAT(error(), AllOf(HasSubstr("NOT_FOUND"), HasSubstr("model-0.safetensors")));
}

TEST_F(WeightsTest, SameNameInTwoShardsIsRejected) {
  model_.write(folder_.path(), DType::kBFloat16, true);
  std::filesystem::copy_file(folder_.path() / "model-0.safetensors",
                             folder_.path() / "model-2.safetensors");
  folder_.write("model.safetensors.index.json",
                R"({"weight_map": {"a": "model-0.safetensors", "b": "model-2.safetensors"}})");

  EXPECT_THAT(error(), HasSubstr("expected once, found in two shards"));
}

TEST_F(WeightsTest, MalformedIndexIsDataLoss) {
  model_.write(folder_.path());
  for (const char* index : {"{", "[]", R"({"weight_map": 3})", R"({"weight_map": {"a": 3}})",
                            R"({"weight_map": {"a": "../model.safetensors"}})"}) {
    folder_.write("model.safetensors.index.json", index);

    EXPECT_THAT(error(), HasSubstr("DATA_LOSS")) << index;
  }
}

}  // namespace
}  // namespace kvtier::llama
