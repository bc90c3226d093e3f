#include "kvtier/page_tier.h"

#include "services/metrics/families.h"
#include "services/metrics/server_metrics.h"
#include "tests/services/metrics/exposition.h"
#include "tests/services/server/server_fixture.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

namespace kvtier::services::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const fs::path kSource = KVTIER_SOURCE_DIR;

std::string read_file(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::vector<std::string> all_matches(const std::string& text, const std::string& pattern,
                                     int group = 1) {
  const std::regex expression(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), expression), end; it != end; ++it) {
    found.push_back((*it)[static_cast<std::size_t>(group)].str());
  }
  return found;
}

/// The expressions of a dashboard's panels.
std::vector<std::string> expressions_of(const nlohmann::json& dashboard) {
  std::vector<std::string> expressions;
  for (const auto& panel : dashboard["panels"]) {
    if (!panel.contains("targets")) continue;
    for (const auto& target : panel["targets"]) {
      expressions.push_back(target["expr"].get<std::string>());
    }
  }
  return expressions;
}

/// A tier of three servers that take nothing.
class IdleServers final : public PageTier {
 public:
  void put(std::span<TierPut> pages, Deadline /*deadline*/) override {
    for (TierPut& page : pages) page.status = TierStatus::kUnavailable;
  }
  void get(std::span<TierGet> pages, Deadline /*deadline*/) override {
    for (TierGet& page : pages) page.status = TierStatus::kMiss;
  }
  void remove(std::span<const kvtier::PageKey> /*keys*/, Deadline /*deadline*/) override {}
  [[nodiscard]] std::size_t max_page_bytes() const noexcept override { return 16 * MiB; }
  [[nodiscard]] bool retains() const noexcept override { return true; }
  [[nodiscard]] TierStats stats() const override { return {.servers = 3}; }
  [[nodiscard]] std::string describe() const override { return "three servers"; }
};

/// What operators deploy beside the server, against what a server tells.
class DeployTest : public ServerTest {
 protected:
  void SetUp() override {
    if (!fs::exists(kSource)) GTEST_SKIP() << "no source tree on this machine";
    ServerTest::SetUp();
    ServerOptions tiered = options();
    tiered.core.models.memory.tiers = {std::make_shared<IdleServers>()};
    start(std::move(tiered));
    text_ = server_->metrics().text();
    told_ = read_exposition(text_);
  }
  void TearDown() override {
    if (fs::exists(kSource)) ServerTest::TearDown();
  }
  /// Checks the metrics that an expression names, and the labels that it selects by.
  void expect_told(const std::string& expression) const {
    const std::string name = R"(((?:kvtier|process)_[a-z0-9_]+))";
    EXPECT_FALSE(all_matches(expression, name + R"(|\bup\{)").empty()) << expression;
    for (const std::string& metric : all_matches(expression, name)) {
      EXPECT_TRUE(told_.has(metric)) << metric << " in " << expression;
    }
    const std::string selection = name + R"(\{([^}]*)\})";
    const auto metrics = all_matches(expression, selection, 1);
    const auto selectors = all_matches(expression, selection, 2);
    for (std::size_t i = 0; i < metrics.size(); ++i) {
      for (const std::string& label : all_matches(selectors[i], R"((\w+)\s*[=!]~?=?\s*")")) {
        if (label == "instance" || label == "job") continue;  // Prometheus adds these
        EXPECT_THAT(told_.values(metrics[i], label), ::testing::Not(IsEmpty()))
            << metrics[i] << " by " << label << " in " << expression;
      }
    }
  }
  /// Runs promtool; skips the test where there is none.
  static void promtool(const std::string& arguments) {
    if (std::system("command -v promtool >/dev/null") != 0) {
      GTEST_SKIP() << "promtool is not installed (Debian: prometheus): not run: " << arguments;
    }
    EXPECT_EQ(std::system(("promtool " + arguments + " >&2").c_str()), 0) << arguments;
  }

  std::string text_;
  MetricsReading told_;
};

TEST_F(DeployTest, DashboardShowsOnlyWhatTheServerTells) {
  const auto dashboard = nlohmann::json::parse(read_file(kSource / "deploy/grafana/kvtier.json"));
  const auto expressions = expressions_of(dashboard);
  EXPECT_GT(expressions.size(), 30U);
  for (const std::string& expression : expressions) expect_told(expression);
  std::set<std::pair<int, int>> places;
  for (const auto& panel : dashboard["panels"]) {
    EXPECT_TRUE(places.emplace(panel["gridPos"]["x"], panel["gridPos"]["y"]).second)
        << panel["title"] << " lies over another panel";
  }
}

TEST_F(DeployTest, EveryAlertIsToldTestedAndHasARunbook) {
  const std::string rules = read_file(kSource / "deploy/prometheus/alerts.yml");
  const std::string tests = read_file(kSource / "deploy/prometheus/alerts_test.yml");
  const std::string runbook = read_file(kSource / "docs/operations.md");
  const auto alerts = all_matches(rules, R"(- alert: (\w+))");
  EXPECT_THAT(alerts, SizeIs(::testing::Ge(12U)));
  for (const std::string& alert : alerts) {
    EXPECT_THAT(all_matches(tests, "- name: (" + alert + ")\n"), SizeIs(1)) << alert;
    EXPECT_THAT(all_matches(runbook, "### (" + alert + ")\n"), SizeIs(1)) << alert;
  }
  const std::regex block(R"(expr:([\s\S]*?)\n +(for|labels):)");
  std::size_t expressions = 0;
  for (std::sregex_iterator it(rules.begin(), rules.end(), block), end; it != end; ++it) {
    expect_told((*it)[1].str());
    ++expressions;
  }
  EXPECT_EQ(expressions, alerts.size());
}

TEST_F(DeployTest, PromtoolAcceptsTheMetrics) {
  const fs::path file = folder_ / "metrics";
  std::ofstream(file) << text_;
  promtool("check metrics <" + file.string());
}

TEST_F(DeployTest, PromtoolAcceptsAndTestsTheRules) {
  const std::string folder = (kSource / "deploy/prometheus/").string();
  promtool("check rules " + folder + "alerts.yml");
  promtool("check config " + folder + "prometheus.yml");
  promtool("test rules " + folder + "alerts_test.yml");
}

}  // namespace
}  // namespace kvtier::services::testing
