#include "benchmarks/quality/answers.h"

#include "kvtier/error.h"

#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"
#include "tests/llama/tiny_tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace kvtier::quality {
namespace {

class AnswersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_.randomize(2);
    model_.write(folder_.path());
    testing::write_tiny_tasks(tasks(), model_.vocab);
    options_.task = "tiny";
    options_.sink = 4;
    options_.window = 8;
    options_.sparsities = {10};
  }

  [[nodiscard]] std::filesystem::path tasks() const { return folder_.path() / "tasks.safetensors"; }
  [[nodiscard]] std::vector<AnswerRow> run() const {
    llama::Decoder decoder = llama::load_decoder(folder_.path(), llama::make_cpu_compute(2));
    return answer(decoder, llama::TaskFile(tasks()), options_);
  }
  [[nodiscard]] ErrorCode error_of_run() const {
    try {
      static_cast<void>(run());
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  }

  testing::TemporaryFolder folder_;
  testing::ReferenceModel model_;
  AnswerOptions options_;
};

TEST_F(AnswersTest, IsDenseWhenEverythingIsSelected) {
  options_.sparsities = {1};
  const std::vector<AnswerRow> rows = run();

  ASSERT_GT(rows.size(), 20U);
  EXPECT_EQ(rows[0].name, "dense");
  EXPECT_EQ(rows[0].scores.kl, 0.0);
  for (const AnswerRow& row : rows) {
    // MagicPIG and vAttention sample, and let the sample stand for the others.
    if (row.name == "magicpig" || row.name == "vattention") continue;
    if (row.settings.ends_with("int8 rows")) {
      EXPECT_GT(row.scores.kl, 1e-6) << row.name << ", " << row.settings;
      EXPECT_LT(row.scores.kl, 0.1) << row.name << ", " << row.settings;
      continue;
    }
    // The same tokens in another order of summation, once per layer.
    EXPECT_LT(row.scores.kl, 1e-6) << row.name << ", " << row.settings;
    EXPECT_EQ(row.scores.exact, rows[0].scores.exact) << row.name;
  }
}

TEST_F(AnswersTest, CountsRowsByTheProtocol) {
  options_.sequences = 2;
  options_.only = {"exact", "norm_aware", "random", "quest"};
  const std::vector<AnswerRow> rows = run();

  EXPECT_DOUBLE_EQ(rows[0].rows_attended, 306.5);
  for (const AnswerRow& row : rows) {
    if (row.name == "dense") continue;
    // 4 + 8 always, 30 of 288 by score, and the tail of 12 up to the token; Quest takes a page of
    // 16, or less of one at the ends.
    if (row.name == "quest") {
      EXPECT_LE(row.rows_attended, 4 + 8 + 16 + 6.5);
      EXPECT_GT(row.rows_attended, 4 + 8 + 6.5);
    } else {
      EXPECT_DOUBLE_EQ(row.rows_attended, 4 + 8 + 30 + 6.5) << row.name;
    }
    EXPECT_GT(row.scores.kl, 1e-5) << row.name;
  }
}

TEST_F(AnswersTest, OwnSelectorsRunForBothSelectionsAndRowsInInt8) {
  options_.only = {"norm_aware"};
  const std::vector<AnswerRow> rows = run();

  ASSERT_EQ(rows.size(), 9U);
  EXPECT_EQ(std::ranges::count(rows, "per_query_head", &AnswerRow::selection), 4);
  EXPECT_EQ(std::ranges::count(rows, "per_kv_head", &AnswerRow::selection), 4);
  EXPECT_EQ(rows[1].bits_per_token, 160.0);
  for (std::size_t i = 1; i < 5; ++i) {
    EXPECT_EQ(rows[i + 4].settings, rows[i].settings + ", int8 rows");
    EXPECT_NE(rows[i + 4].scores.kl, rows[i].scores.kl);
  }
}

TEST_F(AnswersTest, SeedsOfPlanesHaveRowsOfTheirOwn) {
  options_.only = {"norm_aware"};
  options_.plane_seeds = {3};
  const std::vector<AnswerRow> rows = run();

  ASSERT_EQ(rows.size(), 11U);
  const auto row = [&](const std::string& settings) {
    return *std::ranges::find(rows, settings, &AnswerRow::settings);
  };
  for (const std::string planes : {"128 planes", "256 planes"}) {
    EXPECT_EQ(row(planes + ", seed 3").selection, "per_query_head");
    EXPECT_NE(row(planes + ", seed 3").scores.kl, row(planes).scores.kl);
  }
}

TEST_F(AnswersTest, OwnSelectorsRunWithOtherPlanes) {
  options_.only = {"norm_aware", "soft_collision"};
  const std::vector<AnswerRow> usual = run();
  options_.other_planes = true;
  const std::vector<AnswerRow> rows = run();

  ASSERT_EQ(rows.size(), 11U);
  EXPECT_EQ(rows[1].settings, "linear, orthogonal");
  EXPECT_EQ(rows[1].selection, usual[1].selection);
  EXPECT_NE(rows[1].scores.kl, usual[1].scores.kl);
  EXPECT_EQ(rows[1].bits_per_token, 672.0);
  EXPECT_EQ(rows[7].settings, "64 planes");
  EXPECT_EQ(rows[7].bits_per_token, 160.0);
  EXPECT_EQ(rows[9].settings, "600 planes");
  EXPECT_EQ(rows[9].bits_per_token, 672.0);
}

TEST_F(AnswersTest, TellsWhichQuestionsAreRight) {
  options_.only = {"norm_aware", "random"};
  options_.sequences = 2;
  for (const AnswerRow& row : run()) {
    const std::vector<bool>& right = row.scores.right;
    ASSERT_EQ(right.size(),
              2U * static_cast<std::size_t>(llama::TaskFile(tasks()).at("tiny").queries()));
    EXPECT_DOUBLE_EQ(row.scores.exact, static_cast<double>(std::ranges::count(right, true)) /
                                           static_cast<double>(right.size()));
  }
}

TEST_F(AnswersTest, RowsDoNotDependOnThoseBefore) {
  options_.only = {"norm_aware", "h2o", "random"};
  const std::vector<AnswerRow> all = run();
  options_.only = {"random"};
  const std::vector<AnswerRow> alone = run();

  EXPECT_EQ(all.back().name, "random");
  EXPECT_DOUBLE_EQ(all.back().scores.kl, alone.back().scores.kl);
}

TEST_F(AnswersTest, RowsOfASelectorDoNotDependOnOtherSparsities) {
  options_.only = {"exact", "h2o", "magicpig", "pqcache"};
  options_.sparsities = {4, 10};
  const std::vector<AnswerRow> both = run();
  options_.sparsities = {10};
  const std::vector<AnswerRow> alone = run();

  ASSERT_EQ(both.size(), 2 * alone.size() - 1);
  for (std::size_t i = 1; i < alone.size(); ++i) {
    EXPECT_EQ(both[2 * i].name, alone[i].name);
    EXPECT_EQ(both[2 * i].scores.kl, alone[i].scores.kl) << alone[i].name;
    EXPECT_EQ(both[2 * i].rows_attended, alone[i].rows_attended) << alone[i].name;
  }
}

TEST_F(AnswersTest, BeginsWithAnySequence) {
  options_.only = {"norm_aware", "exact"};
  options_.sequences = 2;
  const std::vector<AnswerRow> both = run();
  options_.sequences = 1;
  const std::vector<AnswerRow> first = run();
  options_.first_sequence = 1;
  const std::vector<AnswerRow> second = run();

  for (std::size_t i = 1; i < both.size(); ++i) {
    EXPECT_NE(first[i].scores.kl, second[i].scores.kl) << first[i].name;
    EXPECT_DOUBLE_EQ(both[i].scores.kl, (first[i].scores.kl + second[i].scores.kl) / 2);
  }
}

TEST_F(AnswersTest, RejectsOptionsThatDoNotFit) {
  const AnswerOptions valid = options_;
  options_.task = "huge";
  EXPECT_EQ(error_of_run(), ErrorCode::kNotFound);
  options_ = valid;
  options_.sequences = 3;
  EXPECT_EQ(error_of_run(), ErrorCode::kInvalidArgument);
  options_ = valid;
  options_.first_sequence = 2;
  EXPECT_EQ(error_of_run(), ErrorCode::kInvalidArgument);
  options_.first_sequence = 1;
  options_.sequences = 2;
  EXPECT_EQ(error_of_run(), ErrorCode::kInvalidArgument);
  options_ = valid;
  options_.sparsities = {0.5};
  EXPECT_EQ(error_of_run(), ErrorCode::kInvalidArgument);
  options_ = valid;
  options_.window = 300;
  EXPECT_EQ(error_of_run(), ErrorCode::kInvalidArgument);
  options_ = valid;
  options_.only = {"hash_attention"};
  EXPECT_EQ(error_of_run(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier::quality
