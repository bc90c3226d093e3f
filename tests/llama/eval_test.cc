#include "llama/eval.h"

#include "kvtier/error.h"

#include "llama/report.h"
#include "tests/llama/reference_model.h"
#include "tests/llama/temporary_folder.h"
#include "tests/llama/tiny_tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <sstream>

namespace kvtier::llama {
namespace {

using ::testing::HasSubstr;
using testing::ReferenceModel;
using testing::TemporaryFolder;
using testing::write_marked_tasks;
using testing::write_tiny_tasks;

TEST(Divergence, IsTheSumOverTheDistribution) {
  const std::vector<float> p{0.0F, std::log(3.0F)};  // 1/4, 3/4
  const std::vector<float> q{5.0F, 5.0F};            // 1/2, 1/2

  EXPECT_NEAR(divergence(p, q), 0.25 * std::log(0.5) + 0.75 * std::log(1.5), 1e-6);
  EXPECT_EQ(divergence(q, q), 0.0);
}

/// Logits over 4 tokens that all but give everything to one each.
std::vector<float> logits_of(const std::vector<std::size_t>& guesses) {
  std::vector<float> logits(guesses.size() * 4);
  for (std::size_t i = 0; i < guesses.size(); ++i) logits[4 * i + guesses[i]] = 9.0F;
  return logits;
}

TEST(Scores, CountQueriesFirstTokensAndFrequentWords) {
  // Context of 2, then 9 tokens of which 3..8 are answers: one query, and three frequent words.
  const std::vector<std::int32_t> tokens{0, 0, 0, 1, 2, 3, 1, 2, 3, 0, 0};
  TaskCase task;
  task.context = 2;
  task.length = 11;
  task.answers = {3, 4, 5, 6, 7, 8};
  task.answer_tokens = {3};
  const std::vector<float> right = logits_of({1, 2, 3, 1, 2, 3, 0, 0, 0});
  const std::vector<float> wrong = logits_of({1, 2, 0, 1, 0, 3, 0, 0, 0});

  const Scores all = score_logits(task, tokens, right, right);
  const Scores some = score_logits(task, tokens, wrong, right);

  EXPECT_EQ(all.exact, 1.0);
  EXPECT_EQ(all.first_token, 1.0);
  EXPECT_DOUBLE_EQ(all.fwe, 1.0);
  EXPECT_EQ(all.kl, 0.0);
  EXPECT_EQ(some.exact, 0.0);
  EXPECT_EQ(some.first_token, 1.0);
  EXPECT_NEAR(some.fwe, 2.0 / 3.0, 1e-12);
  // Two rows differ, by the same divergence, both among the 6 answers and the 9 positions.
  const double one = divergence(std::span(right).subspan(8, 4), std::span(wrong).subspan(8, 4));
  EXPECT_NEAR(some.kl, 2.0 * one / 9.0, 1e-9);
  EXPECT_NEAR(some.kl_answers, 2.0 * one / 6.0, 1e-9);
}

TEST(Scores, TakeAnswersOfAnyNumberAndLength) {
  // Context of 2, then 6 tokens: answers of 1, 3 and 1 tokens, the second split by another token.
  const std::vector<std::int32_t> tokens{0, 0, 0, 1, 2, 0, 3, 1};
  TaskCase task;
  task.context = 2;
  task.length = 8;
  task.answers = {3, 4, 6, 7};
  task.answer_tokens = {1, 2, 1};
  const std::vector<float> dense = logits_of({1, 2, 0, 3, 1, 0});
  const std::vector<float> sparse = logits_of({1, 2, 0, 2, 0, 0});

  const Scores all = score_logits(task, tokens, dense, dense);
  const Scores some = score_logits(task, tokens, sparse, dense);

  EXPECT_EQ(all.exact, 1.0);
  EXPECT_EQ(all.same_argmax, 1.0);
  EXPECT_EQ(all.right, std::vector<bool>({true, true, true}));
  EXPECT_EQ(some.right, std::vector<bool>({true, false, false}));
  EXPECT_NEAR(some.exact, 1.0 / 3.0, 1e-12);
  EXPECT_NEAR(some.first_token, 2.0 / 3.0, 1e-12);
  EXPECT_EQ(some.fwe, 0.0) << "no frequent words";
  EXPECT_NEAR(some.same_argmax, 4.0 / 6.0, 1e-12);
  // The token after each of the first five: right all but surely, or e^-9 of that.
  const double norm = std::log(std::exp(9.0) + 3.0);
  EXPECT_NEAR(all.log_loss, norm - 9.0, 1e-6);
  EXPECT_NEAR(some.log_loss, norm - 9.0 * 3.0 / 5.0, 1e-6);
  ASSERT_EQ(some.divergences.size(), 6U);
  const double one = divergence(std::span(dense).subspan(12, 4), std::span(sparse).subspan(12, 4));
  EXPECT_THAT(some.divergences, ::testing::ElementsAre(0.0, 0.0, 0.0, one, one, 0.0));
  EXPECT_NEAR(some.kl_answers, 2.0 * one / 4.0, 1e-9);
}

class EvalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_.randomize(2);
    model_.write(folder_.path());
    write_tiny_tasks(tasks(), model_.vocab);
    options_.cases = {"tiny"};
    options_.runtime.backend = Backend::kCpu;
    options_.retrieval.estimators = {Estimator::kSoftCollision};
    options_.retrieval.sink = 4;
    options_.retrieval.window = 8;
  }

  std::filesystem::path tasks() const { return folder_.path() / "tasks.safetensors"; }
  EvalResult run() {
    Decoder decoder = load_decoder(folder_.path(), make_cpu_compute(2));
    return evaluate(decoder, TaskFile(tasks()), options_);
  }

  TemporaryFolder folder_;
  ReferenceModel model_;
  EvalOptions options_;
};

TEST_F(EvalTest, CountsRowsByTheProtocol) {
  options_.sequences = 2;
  options_.retrieval.sparsities = {0, 1, 10};

  const EvalResult result = run();

  ASSERT_EQ(result.rows.size(), 3U);
  const EvalRow& dense = result.rows[0];
  EXPECT_EQ(dense.kl, 0.0);
  EXPECT_EQ(dense.sequences, 2);
  // Tail token t of 12 sees 300 + t + 1 tokens.
  EXPECT_DOUBLE_EQ(dense.rows_attended, 306.5);
  EXPECT_DOUBLE_EQ(dense.effective_sparsity, 1.0);
  // Everything selected is dense attention again, in another order of summation.
  EXPECT_LT(result.rows[1].kl, 1e-6);
  EXPECT_DOUBLE_EQ(result.rows[1].rows_attended, 306.5);
  // 4 + 8 always, 30 of 288 by score, and the tail up to the token.
  EXPECT_DOUBLE_EQ(result.rows[2].rows_attended, 4 + 8 + 30 + 6.5);
  EXPECT_GT(result.rows[2].kl, 1e-4);
  EXPECT_GT(result.rows[2].device_bytes, 0U);
  // 312 tokens, 2 layers, 2 KV heads, 64 elements of K and V in bf16, in whole pages.
  EXPECT_GE(result.rows[2].host_bytes, 312U * 2 * 2 * 64 * 4);
  EXPECT_EQ(result.place, "cpu");
}

TEST_F(EvalTest, MeasuresTheDistanceFromDense) {
  write_marked_tasks(tasks(), model_.vocab, {0, 1, 1, 0, 0, 2, 3, 3, 0, 3, 0, 4});
  options_.sequences = 2;
  options_.retrieval.sparsities = {0, 10};
  options_.keep_logits = true;

  const EvalResult result = run();

  const TaskFile file(tasks());
  const TaskCase task = file.at("tiny");
  EXPECT_EQ(task.queries(), 4);
  EXPECT_EQ(task.answers, std::vector<std::int64_t>({301, 302, 305, 306, 307, 309, 311}));
  EXPECT_EQ(task.answer_tokens, std::vector<std::int64_t>({2, 1, 3, 1}));
  std::vector<double> divergences;
  double loss = 0.0;
  double same = 0.0;
  for (std::size_t i = 0; i < 2; ++i) {
    const Scores scores =
        score_logits(task, task.sequence(static_cast<std::int64_t>(i)),
                     result.logits[2 * i + 1].logits, result.logits[2 * i].logits);
    divergences.insert(divergences.end(), scores.divergences.begin(), scores.divergences.end());
    loss += scores.log_loss / 2;
    same += scores.same_argmax / 2;
  }
  const EvalRow& row = result.rows[1];
  EXPECT_EQ(row.kind, "copying");
  EXPECT_NEAR(row.perplexity, std::exp(loss), 1e-9);
  EXPECT_NEAR(row.same_argmax, same, 1e-12);
  // Of 24 positions, 99 in 100 are all but none of them.
  EXPECT_EQ(row.kl_max, *std::max_element(divergences.begin(), divergences.end()));
  EXPECT_EQ(row.kl_p99, row.kl_max);
  EXPECT_GT(row.kl_max, row.kl);
  EXPECT_EQ(result.rows[0].kl_max, 0.0);
  EXPECT_EQ(result.rows[0].same_argmax, 1.0);
}

TEST_F(EvalTest, BeginsWithTheSequenceAskedFor) {
  options_.retrieval.sparsities = {10};
  options_.sequences = 2;
  options_.keep_logits = true;
  const EvalResult both = run();
  options_.sequences = 1;
  options_.first_sequence = 1;
  const EvalResult second = run();

  ASSERT_EQ(second.logits.size(), 1U);
  EXPECT_EQ(second.logits[0].sequence, 1);
  EXPECT_EQ(second.logits[0].logits, both.logits[1].logits);
}

TEST_F(EvalTest, KeepsRowsInInt8) {
  options_.retrieval.sparsities = {0, 10};
  const EvalResult model = run();
  options_.runtime.page_format = PageFormat::kInt8;
  const EvalResult narrow = run();

  EXPECT_EQ(model.row_bytes, 256U);
  EXPECT_EQ(narrow.row_bytes, 136U);
  EXPECT_EQ(narrow.rows[1].host_bytes * 256, model.rows[1].host_bytes * 136);
  EXPECT_NE(narrow.rows[1].kl, model.rows[1].kl);
  EXPECT_LT(narrow.rows[1].kl, model.rows[1].kl + 0.1);
}

TEST_F(EvalTest, SaysWhichErrorSizesASelection) {
  options_.retrieval.estimators = {Estimator::kNormAware};
  options_.retrieval.sparsities = {0};
  options_.retrieval.error_targets = {1e-4, 0.3};  // of shares of 1e-8: all tokens
  options_.retrieval.error_rows = ErrorRows::kInstead;

  const EvalResult result = run();

  ASSERT_EQ(result.rows.size(), 3U);
  EXPECT_LT(result.rows[1].kl, 1e-6);
  EXPECT_DOUBLE_EQ(result.rows[1].rows_attended, 306.5);
  EXPECT_LT(result.rows[2].rows_attended, 200.0);
  std::ostringstream out;
  print_report(out, read_model_config(folder_.path()), result);
  EXPECT_THAT(out.str(), HasSubstr(" e=0.0001 "));
  EXPECT_THAT(out.str(), HasSubstr(" e=0.3 "));
  write_json(folder_.path() / "out.json", {.model = "m", .command = "c", .threads = 2}, result);
  const auto rows = nlohmann::json::parse(folder_.read("out.json"))["cases"];
  EXPECT_EQ(rows[0]["sparsity"], 0.0);
  EXPECT_TRUE(rows[2]["sparsity"].is_null());
  EXPECT_EQ(rows[2]["error_target"], 0.3);
}

TEST_F(EvalTest, RowsDoNotDependOnThoseBefore) {
  options_.retrieval.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  options_.retrieval.sparsities = {10};
  const EvalResult both = run();
  options_.retrieval.estimators = {Estimator::kNormAware};
  const EvalResult alone = run();

  EXPECT_DOUBLE_EQ(both.rows[1].kl, alone.rows[0].kl);
  EXPECT_DOUBLE_EQ(both.rows[1].rows_attended, alone.rows[0].rows_attended);
}

TEST_F(EvalTest, PrintsAlignedTables) {
  options_.retrieval.estimators = {Estimator::kSoftCollision, Estimator::kNormAware};
  options_.retrieval.weightings = {ValueWeighting::kLinear, ValueWeighting::kLogit};
  const EvalResult result = run();
  std::ostringstream out;

  print_report(out, read_model_config(folder_.path()), result);

  EXPECT_THAT(out.str(), HasSubstr("soft_collision, linear"));
  EXPECT_THAT(out.str(), HasSubstr("Where the KV lives"));
  EXPECT_THAT(out.str(), HasSubstr("left out: soft_collision has no value weighting logit"));
  for (const char* sketches : {"   top_k, 600 bits, sign: ", "   priority, 256 bits, scalar: "}) {
    EXPECT_THAT(out.str(), HasSubstr(sketches));
  }
  std::istringstream lines(out.str());
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110U) << line;
}

TEST_F(EvalTest, PrintsPerplexityOfOtherKinds) {
  write_marked_tasks(tasks(), model_.vocab, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  options_.retrieval.estimators = {Estimator::kNormAware};
  const EvalResult result = run();
  std::ostringstream out;

  print_report(out, read_model_config(folder_.path()), result);

  EXPECT_THAT(out.str(), HasSubstr("then 12 tokens of copying, 1 sequence"));
  EXPECT_THAT(out.str(), HasSubstr("KL p99 KL max"));
  EXPECT_THAT(out.str(), HasSubstr("norm_aware, logit, per_kv_head"));
  std::istringstream lines(out.str());
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110U) << line;
}

TEST_F(EvalTest, WritesJson) {
  options_.retrieval.sparsities = {0, 10};
  const EvalResult result = run();

  write_json(folder_.path() / "out.json", {.model = "m", .command = "c", .threads = 2}, result);

  const auto json = nlohmann::json::parse(folder_.read("out.json"));
  EXPECT_EQ(json["model"], "m");
  EXPECT_EQ(json["command"], "c");
  EXPECT_EQ(json["date"].get<std::string>().size(), 20U);
  ASSERT_EQ(json["cases"].size(), 2U);
  const auto& row = json["cases"][1];
  EXPECT_EQ(row["case"], "tiny");
  EXPECT_EQ(row["sparsity"], 10.0);
  EXPECT_EQ(row["estimator"], "soft_collision");
  EXPECT_EQ(row["value_weighting"], "linear");
  EXPECT_EQ(row["selection"], "per_kv_head");
  EXPECT_EQ(row["backend"], "cpu");
  EXPECT_EQ(row["sequences"], 1);
  EXPECT_DOUBLE_EQ(row["kl"].get<double>(), result.rows[1].kl);
  for (const char* key :
       {"exact", "first_token", "fwe", "kl_answers", "rows_attended", "effective_sparsity",
        "device_bytes", "host_bytes", "tokens_per_second"}) {
    EXPECT_TRUE(row.contains(key)) << key;
  }
  EXPECT_EQ(row["kind"], "needle-llama");
  EXPECT_EQ(row["method"], "soft_collision, linear");
  EXPECT_EQ(row["kl_p99"].get<double>(), result.rows[1].kl_p99);
  EXPECT_EQ(row["kl_max"].get<double>(), result.rows[1].kl_max);
  EXPECT_EQ(row["same_argmax"].get<double>(), result.rows[1].same_argmax);
  EXPECT_EQ(row["perplexity"].get<double>(), result.rows[1].perplexity);
}

TEST_F(EvalTest, JsonThatCannotBeWrittenIsAnError) {
  try {
    write_json(folder_.path() / "absent" / "out.json", {}, {});
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  }
}

TEST_F(EvalTest, RejectsMoreSequencesThanThereAre) {
  options_.sequences = 3;

  EXPECT_THROW((void)run(), Error);
  options_.sequences = 2;
  options_.first_sequence = 1;
  EXPECT_THROW((void)run(), Error);
  options_.first_sequence = -1;
  EXPECT_THROW((void)run(), Error);
}

TEST_F(EvalTest, NamesTheCasesThereAre) {
  try {
    (void)TaskFile(tasks()).at("n1.d1");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_THAT(error.what(), HasSubstr("case: expected one of tiny, found n1.d1"));
  }
}

TEST_F(EvalTest, RejectsTasksThatContradictThemselves) {
  const auto code = [this] {
    try {
      (void)TaskFile(tasks()).at("tiny");
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  const std::vector<std::int32_t> good{304, 305, 306, 309, 310, 311};

  write_tiny_tasks(tasks(), 50, 1, "density=3", good);
  EXPECT_EQ(code(), ErrorCode::kDataLoss);
  write_tiny_tasks(tasks(), 50, 1, "context=304", good);
  EXPECT_EQ(code(), ErrorCode::kDataLoss);
  write_tiny_tasks(tasks(), 50, 1, "context=300", {304, 305, 306, 309, 310, 312});
  EXPECT_EQ(code(), ErrorCode::kDataLoss);
  write_tiny_tasks(tasks(), 50, 1, "context=300", {304, 306, 305, 309, 310, 311});
  EXPECT_EQ(code(), ErrorCode::kDataLoss);
  write_tiny_tasks(tasks(), 50, 1, "context=300", {304, 305, 306, 309});
  EXPECT_EQ(code(), ErrorCode::kDataLoss);
}

TEST_F(EvalTest, RejectsMarksThatContradictThemselves) {
  const auto message = [this](const std::vector<std::int32_t>& marks,
                              const std::string& metadata = "context=300") -> std::string {
    write_marked_tasks(tasks(), 50, marks, metadata);
    try {
      (void)TaskFile(tasks()).at("tiny");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
      return error.what();
    }
    return "accepted";
  };

  EXPECT_EQ(message({0, 1, 1, 0, 1, 2, 0, 0, 0, 0, 0, 3}), "accepted");
  EXPECT_EQ(message({0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}),
            "tiny.answers: expected a number for each of 12 tokens after a context, found 11");
  EXPECT_THAT(message({0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "context=0"), HasSubstr("found 12"));
  EXPECT_THAT(message({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}),
              HasSubstr("expected at least one, found none"));
  for (const std::vector<std::int32_t>& marks :
       {std::vector<std::int32_t>{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
        {0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
        {0, 1, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0},
        {0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0},
        {0, 1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0}}) {
    EXPECT_THAT(message(marks), HasSubstr("expected numbers from 1 in order"));
  }
}

}  // namespace
}  // namespace kvtier::llama
