#include "llama/decoder.h"

#include "kvtier/error.h"

#include "llama/runtime_options.h"
#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"
#include "tests/llama/test_compute.h"
#include "tests/support/backend_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>

namespace kvtier::llama {
namespace {

using testing::random_tokens;
using testing::ReferenceModel;
using testing::TemporaryFolder;

// Logits are of order 10. A key or value whose rounding to bf16 falls the other way in fp32 than in
// double moves by 2^-8 of itself, one element among 64 or more; everything else is fp32 rounding.
constexpr double kTolerance = 2e-2;

class DecoderTest : public testing::BackendTest {
 protected:
  void open(ReferenceModel model, unsigned seed = 1,
            std::unique_ptr<Compute> compute = make_cpu_compute(2)) {
    model_ = std::move(model);
    model_.randomize(seed);
    model_.write(folder_.path());
    engine_.reset();
    decoder_.emplace(load_decoder(folder_.path(), std::move(compute)));
    RuntimeOptions runtime;
    runtime.backend = GetParam();
    Method sparse;
    sparse.retrieval.sink_tokens = 4;
    sparse.retrieval.recent_tokens = 8;
    engine_.emplace(engine_config(decoder_->config(), runtime, {sparse}, 2048));
  }

  /// Logits of the tokens from `context` on: dense prefill before, kvtier after.
  std::vector<float> run(const std::vector<std::int32_t>& tokens, std::size_t context,
                         const AttendOptions& attend, std::int64_t prefill_chunk = 512,
                         std::int64_t decode_chunk = 64) {
    Session session = engine_->open();
    const std::span<const std::int32_t> all(tokens);
    PassOptions pass;
    pass.chunk_tokens = prefill_chunk;
    decoder_->prefill(session, all.first(context), pass);
    pass.chunk_tokens = decode_chunk;
    return decoder_->decode(session, all.subspan(context), attend, pass);
  }

  void expect_reference(const std::vector<std::int32_t>& tokens, std::size_t context) {
    const std::vector<double> reference = model_.logits(tokens);

    const std::vector<float> logits = run(tokens, context, dense());

    const std::size_t skipped = context * static_cast<std::size_t>(model_.vocab);
    ASSERT_EQ(logits.size() + skipped, reference.size());
    double worst = 0.0;
    double largest = 0.0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      worst = std::max(worst, std::abs(logits[i] - reference[i + skipped]));
      largest = std::max(largest, std::abs(reference[i + skipped]));
    }
    EXPECT_LT(worst, kTolerance) << "largest logit " << largest;
    EXPECT_GT(largest, 1.0);
  }

  static void expect_close(const std::vector<float>& a, const std::vector<float>& b,
                           double tolerance) {
    ASSERT_EQ(a.size(), b.size());
    double worst = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      worst = std::max(worst, static_cast<double>(std::abs(a[i] - b[i])));
    }
    EXPECT_LT(worst, tolerance);
  }

  static AttendOptions dense() {
    AttendOptions options;
    options.mode = LayerMode::kDense;
    return options;
  }

  TemporaryFolder folder_;
  ReferenceModel model_;
  std::optional<Decoder> decoder_;
  std::optional<Engine> engine_;
};

TEST_P(DecoderTest, ComputesLlama) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    open({}, seed);

    expect_reference(random_tokens(90, model_.vocab, seed), 70);
  }
}

TEST_P(DecoderTest, ComputesLlamaWithTiedEmbeddingsAndBiases) {
  ReferenceModel model;
  model.tied = true;
  model.bias = true;
  open(model);

  expect_reference(random_tokens(90, model_.vocab, 4), 70);
}

TEST_P(DecoderTest, ComputesLlama3ScalingOfTheRotation) {
  ReferenceModel model;
  model.llama3 = true;
  open(model);
  const std::vector<std::int32_t> tokens = random_tokens(150, model_.vocab, 5);

  expect_reference(tokens, 120);

  // The scaling is visible at these positions: the comparison above could have failed.
  const std::vector<double> scaled = model_.logits(tokens);
  model_.llama3 = false;
  const std::vector<double> plain = model_.logits(tokens);
  double difference = 0.0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    difference = std::max(difference, std::abs(scaled[i] - plain[i]));
  }
  EXPECT_GT(difference, 10 * kTolerance);
}

TEST_P(DecoderTest, ComputesQwen3WithNormalisedQueriesAndKeys) {
  ReferenceModel model;
  model.qwen3 = true;
  model.bias = true;
  model.tied = true;
  model.head_dim = 128;
  model.heads = 6;
  model.kv_heads = 2;
  open(model);

  expect_reference(random_tokens(90, model_.vocab, 6), 70);
}

TEST_P(DecoderTest, ComputesTheFirstTokenWithoutContext) {
  open({});

  expect_reference({7}, 0);
}

TEST_P(DecoderTest, ComputesWithItsTensorsWhereTheBackendIs) {
  ReferenceModel model;
  model.qwen3 = true;
  model.bias = true;
  try {
    open(model, 1, testing::make_test_compute(GetParam(), 1));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    GTEST_SKIP() << error.what();
  }

  expect_reference(random_tokens(90, model_.vocab, 12), 70);
}

TEST_P(DecoderTest, PrefillsAlikeInAnyChunks) {
  open({});
  const std::vector<std::int32_t> tokens = random_tokens(700, model_.vocab, 7);
  const std::vector<float> whole = run(tokens, 680, dense(), 680);

  // fp32 sums in another order; a bf16 rounding may fall the other way.
  for (const std::int64_t chunk : {1, 100, 512}) {
    expect_close(run(tokens, 680, dense(), chunk), whole, kTolerance);
  }
}

TEST_P(DecoderTest, DecodesAlikeOneTokenOrManyAtATime) {
  open({});
  const std::vector<std::int32_t> tokens = random_tokens(300, model_.vocab, 8);
  const std::vector<float> whole = run(tokens, 200, dense());

  expect_close(run(tokens, 200, dense(), 512, 1), whole, kTolerance);
  expect_close(run(tokens, 200, dense(), 512, 17), whole, kTolerance);
}

TEST_P(DecoderTest, SelectingEveryTokenEqualsDense) {
  open({});
  const std::vector<std::int32_t> tokens = random_tokens(300, model_.vocab, 9);
  const std::vector<float> whole = run(tokens, 250, dense());
  RetrievalConfig retrieval;
  retrieval.sink_tokens = 4;
  retrieval.recent_tokens = 8;
  AttendOptions attend;
  attend.retrieval = &retrieval;

  retrieval.top_k = 400;
  expect_close(run(tokens, 250, attend), whole, kTolerance);

  // Few tokens give something else, so the agreement above says something.
  retrieval.top_k = 4;
  const std::vector<float> few = run(tokens, 250, attend);
  double difference = 0.0;
  for (std::size_t i = 0; i < few.size(); ++i) {
    difference = std::max(difference, static_cast<double>(std::abs(few[i] - whole[i])));
  }
  EXPECT_GT(difference, 10 * kTolerance);
}

TEST_P(DecoderTest, RejectsTokensOutsideTheVocabulary) {
  open({});
  Session session = engine_->open();
  const std::vector<std::int32_t> good = random_tokens(20, model_.vocab, 10);
  decoder_->prefill(session, good);

  for (const std::int32_t bad : {-1, model_.vocab}) {
    const std::vector<std::int32_t> tokens{1, bad};
    try {
      (void)decoder_->decode(session, tokens, dense());
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("token: expected 0 to 49, found " + std::to_string(bad)));
    }
    EXPECT_EQ(session.length(), 20);
  }
}

TEST_P(DecoderTest, PrefillNeedsAnEmptySession) {
  open({});
  Session session = engine_->open();
  const std::vector<std::int32_t> tokens = random_tokens(20, model_.vocab, 11);
  decoder_->prefill(session, tokens);

  try {
    decoder_->prefill(session, tokens);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFailedPrecondition);
  }
  EXPECT_EQ(session.length(), 20);
}

KVTIER_INSTANTIATE_BACKENDS(DecoderTest);

}  // namespace
}  // namespace kvtier::llama
