#include "llama/generate.h"

#include "kvtier/error.h"

#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace kvtier::llama {
namespace {

using ::testing::ElementsAre;
using testing::random_tokens;
using testing::ReferenceModel;
using testing::TemporaryFolder;

class GenerateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_.randomize(3);
    options_.prompt = random_tokens(40, model_.vocab, 1);
    options_.max_tokens = 6;
    options_.runtime.backend = Backend::kCpu;
    options_.method.dense = true;
  }

  std::vector<std::int32_t> run() {
    model_.write(folder_.path());
    Decoder decoder = load_decoder(folder_.path(), make_cpu_compute(1));
    return generate(decoder, options_);
  }

  /// Greedy continuation by the reference, and the smallest lead of a choice over the next best.
  std::vector<std::int32_t> expected(double& lead) const {
    std::vector<std::int32_t> tokens = options_.prompt;
    lead = 1e30;
    for (int i = 0; i < options_.max_tokens; ++i) {
      const std::vector<double> all = model_.logits(tokens);
      std::vector<double> last(all.end() - model_.vocab, all.end());
      const auto best = std::max_element(last.begin(), last.end());
      tokens.push_back(static_cast<std::int32_t>(best - last.begin()));
      const double top = *best;
      *best = -1e30;
      lead = std::min(lead, top - *std::max_element(last.begin(), last.end()));
    }
    return {tokens.begin() + 40, tokens.end()};
  }

  TemporaryFolder folder_;
  ReferenceModel model_;
  GenerateOptions options_;
};

TEST_F(GenerateTest, FollowsTheLargestLogit) {
  double lead = 0.0;
  const std::vector<std::int32_t> reference = expected(lead);
  ASSERT_GT(lead, 2e-2) << "a near-tie: the choice is not determined by fp32 logits";

  EXPECT_EQ(run(), reference);
}

TEST_F(GenerateTest, EqualsDenseWhenEverythingIsSelected) {
  const std::vector<std::int32_t> dense = run();
  options_.method.dense = false;
  options_.method.sparsity = 1.0;

  EXPECT_EQ(run(), dense);
}

TEST_F(GenerateTest, WithoutASparsityTheErrorDecides) {
  const std::vector<std::int32_t> dense = run();
  options_.method.dense = false;
  options_.method.sparsity = 0.0;
  options_.method.retrieval.sink_tokens = options_.method.retrieval.recent_tokens = 4;
  options_.method.retrieval.error_target = 1e-4;  // which takes tokens of a share of 1e-8

  EXPECT_EQ(run(), dense);
}

TEST_F(GenerateTest, StopsAfterAnEndToken) {
  const std::vector<std::int32_t> whole = run();
  model_.eos = whole[2];
  const auto first = std::find(whole.begin(), whole.end(), model_.eos);

  EXPECT_EQ(run(), std::vector<std::int32_t>(whole.begin(), first + 1));
}

TEST_F(GenerateTest, ContinuesAPromptOfOneToken) {
  options_.prompt = {5};

  EXPECT_EQ(run().size(), 6U);
}

TEST(PromptIds, AreReadFromTextAndFiles) {
  const TemporaryFolder folder;
  folder.write("ids", "4, 5\n6\n");

  EXPECT_THAT(parse_ids("1,2,3"), ElementsAre(1, 2, 3));
  EXPECT_THAT(parse_ids("@" + (folder.path() / "ids").string()), ElementsAre(4, 5, 6));
}

TEST(PromptIds, RejectWhatIsNoId) {
  const auto code = [](const std::string& text) {
    try {
      (void)parse_ids(text);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };

  EXPECT_EQ(code("1,x,3"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("1,-2"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("99999999999"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(""), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code("@/no/such/file"), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace kvtier::llama
