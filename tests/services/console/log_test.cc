#include "services/console/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sstream>
#include <vector>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class LogTest : public ::testing::Test {
 protected:
  void make(LogFormat format, const std::string& level = "debug") {
    log_ = std::make_unique<Log>(out_, level, format, [this] { return now_; });
  }
  [[nodiscard]] std::vector<std::string> lines() const {
    std::vector<std::string> all;
    std::istringstream in(out_.str());
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  }

  std::ostringstream out_;
  std::chrono::system_clock::time_point now_{std::chrono::milliseconds(1'700'000'000'123)};
  std::unique_ptr<Log> log_;
};

TEST_F(LogTest, JsonHasTheFieldsThatThereAreOnOneLine) {
  make(LogFormat::kJson);
  log_->write({.level = LogLevel::kWarning,
               .event = "call_failed",
               .message = "two\nlines \"quoted\" \xff {}",
               .method = "SessionService/GetSession",
               .code = "DEVICE_LOST",
               .tenant = "alpha",
               .duration_seconds = 0.25});
  log_->write({.event = "started", .message = "serving"});

  ASSERT_THAT(lines(), SizeIs(2));
  const auto first = nlohmann::json::parse(lines()[0]);
  EXPECT_EQ(first["time"], "2023-11-14T22:13:20.123Z");
  EXPECT_EQ(first["level"], "warning");
  EXPECT_EQ(first["event"], "call_failed");
  EXPECT_EQ(first["method"], "SessionService/GetSession");
  EXPECT_EQ(first["code"], "DEVICE_LOST");
  EXPECT_EQ(first["tenant"], "alpha");
  EXPECT_EQ(first["duration_seconds"], 0.25);
  EXPECT_THAT(first["message"].get<std::string>(), HasSubstr("two\nlines \"quoted\""));
  const auto second = nlohmann::json::parse(lines()[1]);
  EXPECT_THAT(second, SizeIs(4));
  EXPECT_EQ(second["level"], "info");
}

TEST_F(LogTest, LevelCanBeChanged) {
  make(LogFormat::kText, "warning");
  log_->write({.event = "a", .message = "too little"});
  log_->set_level(LogLevel::kInfo);
  log_->write({.event = "b", .message = "written"});
  log_->set_level(std::nullopt);
  log_->write({.level = LogLevel::kError, .event = "c", .message = "off"});
  log_->set_level(LogLevel::kError);
  log_->write({.level = LogLevel::kWarning, .event = "d", .message = "too little again"});
  EXPECT_EQ(lines(), std::vector<std::string>{"info: written"});
}

TEST_F(LogTest, TextIsForReaders) {
  make(LogFormat::kText);
  log_->write({.level = LogLevel::kError, .event = "x", .message = "it failed", .code = "FAULT"});
  log_->library()(LogLevel::kWarning, "from the library");
  EXPECT_EQ(out_.str(), "error: it failed code=FAULT\nwarning: from the library\n");
}

TEST_F(LogTest, LevelsBelowTheWantedAreLeftOut) {
  make(LogFormat::kText, "warning");
  log_->write({.level = LogLevel::kInfo, .event = "x", .message = "info"});
  log_->write({.level = LogLevel::kWarning, .event = "x", .message = "warn"});
  EXPECT_EQ(out_.str(), "warning: warn\n");
}

TEST_F(LogTest, WarningsOfOneEventAreLimitedAndCounted) {
  make(LogFormat::kText);
  const auto warn = [this](const char* event) {
    log_->write({.level = LogLevel::kWarning, .event = event, .message = event});
  };
  for (int i = 0; i < 15; ++i) warn("a");
  EXPECT_THAT(lines(), SizeIs(10));
  EXPECT_EQ(log_->num_dropped(), 5U);
  warn("b");
  EXPECT_THAT(lines(), SizeIs(11)) << "another event has an allowance of its own";

  now_ += std::chrono::seconds(1);
  warn("a");
  warn("a");

  EXPECT_THAT(lines(), SizeIs(12));
  EXPECT_EQ(lines().back(), "warning: a dropped=5");
  EXPECT_EQ(log_->num_dropped(), 6U);
  for (int i = 0; i < 20; ++i) {
    log_->write({.level = LogLevel::kError, .event = "a", .message = "error"});
  }
  EXPECT_THAT(lines(), SizeIs(32)) << "errors are never dropped";
}

}  // namespace
}  // namespace kvtier::services
