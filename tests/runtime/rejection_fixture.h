#pragma once

#include "runtime/engine_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvtier::testing {

/// Two sessions with the same two layers of 300 tokens. The one gets bad calls, its twin none:
/// after each bad call nothing that can be observed may tell them apart.
class RejectionTest : public EngineTest {
 protected:
  static constexpr std::int64_t kTokens = 300;

  void SetUp() override {
    EngineTest::SetUp();
    if (!IsSkipped()) open(two_layers());
  }
  [[nodiscard]] Config two_layers() const {
    Config config = this->config();
    config.model.layers = 2;
    return config;
  }
  void open(const Config& config, std::int64_t capacity = 0) {
    session_.reset();
    twin_.reset();
    engine_ = std::make_unique<Engine>(config);
    for (std::optional<Session>* session : {&session_, &twin_}) {
      session->emplace(engine_->open({.capacity_tokens = capacity}));
      for (int layer = 0; layer < config.model.layers; ++layer) {
        append_random(**session, config.model, layer, kTokens,
                      static_cast<std::uint64_t>(layer) + 1);
      }
    }
  }
  [[nodiscard]] const ModelConfig& model() const { return engine_->config().model; }

  /// Checks the error's code and text: what was expected, what was found, and `parts`; then that
  /// nothing changed.
  void expect_rejected(ErrorCode code, const std::vector<std::string>& parts,
                       const std::function<void()>& call) {
    const std::vector<std::int64_t> lengths = all_lengths();
    const Stats before = engine_->stats();
    const std::optional<Error> error = error_of(call);
    ASSERT_TRUE(error.has_value()) << "the call was accepted";
    EXPECT_EQ(error_code_name(error->code()), error_code_name(code)) << error->what();
    EXPECT_THAT(error->what(), ::testing::HasSubstr("expected"));
    EXPECT_THAT(error->what(), ::testing::HasSubstr("found"));
    for (const std::string& part : parts) EXPECT_THAT(error->what(), ::testing::HasSubstr(part));

    EXPECT_EQ(all_lengths(), lengths);
    const Stats after = engine_->stats();
    EXPECT_EQ(after.snapshot.pages_used, before.snapshot.pages_used);
    EXPECT_EQ(after.snapshot.sketch_bytes_used, before.snapshot.sketch_bytes_used);
    EXPECT_EQ(after.snapshot.sessions, before.snapshot.sessions);
    EXPECT_EQ(after.snapshot.device_bytes, before.snapshot.device_bytes);
    EXPECT_EQ(after.cumulative.tokens_appended, before.cumulative.tokens_appended);
    EXPECT_EQ(after.cumulative.queries, before.cumulative.queries);
    EXPECT_EQ(after.cumulative.nonfinite_tokens, before.cumulative.nonfinite_tokens);
    expect_like_twin();
  }
  /// Decodes one token with the session and its twin: the same bits.
  void expect_like_twin() {
    for (int layer = 0; layer < model().layers; ++layer) {
      CallTensors a(model(), 1, ++seed_);
      CallTensors b(model(), 1, seed_);
      session_->decode(layer, a.inputs(), a.outputs(true));
      twin_->decode(layer, b.inputs(), b.outputs(true));
      ASSERT_TRUE(a.same_results(b)) << "layer " << layer << " differs from its twin's";
      ASSERT_EQ(session_->length(layer), twin_->length(layer));
    }
  }
  [[nodiscard]] std::vector<std::int64_t> all_lengths() const {
    std::vector<std::int64_t> lengths;
    for (int layer = 0; layer < model().layers; ++layer) {
      lengths.push_back(session_->length(layer));
      lengths.push_back(twin_->length(layer));
    }
    return lengths;
  }

  std::unique_ptr<Engine> engine_;
  std::optional<Session> session_;
  std::optional<Session> twin_;
  std::uint64_t seed_ = 1000;
};

/// The same, by the estimator that tells what a step misses.
class EstimateTest : public RejectionTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    if (IsSkipped()) return;
    Config config = two_layers();
    config.retrieval.estimator = Estimator::kNormAware;
    open(config);
  }
};

}  // namespace kvtier::testing
