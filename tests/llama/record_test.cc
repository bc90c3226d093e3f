#include "llama/record.h"

#include "kvtier/error.h"

#include "formats/safetensors.h"
#include "include/types/float16.h"
#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"
#include "tests/llama/tiny_tasks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace kvtier::llama {
namespace {

using formats::SafeTensors;
using formats::Tensor;

class RecordTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_.randomize(4);
    model_.write(folder_.path());
    testing::write_tiny_tasks(folder_.path() / "tasks.safetensors", model_.vocab);
    options_.task = "tiny";
    options_.runtime.backend = Backend::kCpu;
  }

  void run() {
    Decoder decoder = load_decoder(folder_.path(), make_cpu_compute(1));
    record(decoder, TaskFile(folder_.path() / "tasks.safetensors"), options_, trace());
  }
  std::filesystem::path trace() const { return folder_.path() / "trace.safetensors"; }

  ErrorCode error_code() {
    try {
      run();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  }

  testing::TemporaryFolder folder_;
  testing::ReferenceModel model_;
  RecordOptions options_;
};

double element(const Tensor& tensor, std::int64_t head, std::int64_t token, std::int64_t i) {
  const std::int64_t at = (head * tensor.shape[1] + token) * tensor.shape[2] + i;
  return BFloat16{tensor.as<std::uint16_t>()[at]}.to_float();
}

TEST_F(RecordTest, OutputsAreTheAttentionOfTheQueriesOverTheKeys) {
  options_.sequence = 1;
  options_.steps = 5;

  run();

  const SafeTensors file = SafeTensors::open(trace());
  EXPECT_EQ(file.metadata().at("case"), "tiny");
  EXPECT_EQ(file.metadata().at("context"), "300");
  EXPECT_NEAR(std::stod(file.metadata().at("scale")), 0.125, 1e-6);
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    const Tensor& k = file.at(layer + "k", DType::kBFloat16, {2, 305, 64});
    const Tensor& v = file.at(layer + "v", DType::kBFloat16, {2, 305, 64});
    const Tensor& q = file.at(layer + "q", DType::kBFloat16, {4, 5, 64});
    const Tensor& o = file.at(layer + "o", DType::kBFloat16, {4, 5, 64});
    for (std::int64_t head = 0; head < 4; ++head) {
      for (std::int64_t step = 0; step < 5; ++step) {
        double sum = 0.0;
        std::vector<double> out(64);
        for (std::int64_t key = 0; key <= 300 + step; ++key) {
          double dot = 0.0;
          for (std::int64_t i = 0; i < 64; ++i) {
            dot += element(q, head, step, i) * element(k, head / 2, key, i);
          }
          const double weight = std::exp(dot * 0.125);
          sum += weight;
          for (std::int64_t i = 0; i < 64; ++i) {
            out[static_cast<std::size_t>(i)] += weight * element(v, head / 2, key, i);
          }
        }
        double error = 0.0;
        double norm = 0.0;
        for (std::int64_t i = 0; i < 64; ++i) {
          const double expected = out[static_cast<std::size_t>(i)] / sum;
          error += std::pow(element(o, head, step, i) - expected, 2);
          norm += expected * expected;
        }
        // q and o are rounded to bf16 after the fact: 2^-9 each, the logit's times |logit| <= 10.
        EXPECT_LT(std::sqrt(error / norm), 3e-2) << layer << head << " step " << step;
      }
    }
  }
}

TEST_F(RecordTest, OneLayerHasPlainNames) {
  options_.layer = 1;

  run();

  const SafeTensors file = SafeTensors::open(trace());
  EXPECT_EQ(file.tensors().size(), 4U);
  EXPECT_NO_THROW((void)file.at("o", DType::kBFloat16, {4, 12, 64}));
}

TEST_F(RecordTest, RejectsWhatIsOutOfRange) {
  options_.steps = 13;
  EXPECT_EQ(error_code(), ErrorCode::kInvalidArgument);
  options_.steps = 1;
  options_.sequence = 2;
  EXPECT_EQ(error_code(), ErrorCode::kInvalidArgument);
  options_.sequence = 0;
  options_.layer = 2;
  EXPECT_EQ(error_code(), ErrorCode::kInvalidArgument);
  options_.layer.reset();
  options_.task = "absent";
  EXPECT_EQ(error_code(), ErrorCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(trace()));
}

}  // namespace
}  // namespace kvtier::llama
