#include "services/tools/calibrate/calibrate.h"

#include "kvtier/error.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

namespace kvtier::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Sets or unsets a variable of the environment for the time of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  Variable(const Variable&) = delete;  // restores the variable once
  Variable& operator=(const Variable&) = delete;
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }

 private:
  void set(const char* value) {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }

  const char* name_;
  std::optional<std::string> before_;
};

class CalibrateTest : public FolderTest {
 protected:
  static CliResult calibrate_small(std::vector<std::string> options) {
    options.insert(options.begin(), {"calibrate", "--backend", "cpu", "--region", "64M",
                                     "--allocation", "registered,driver"});
    return run_kvtier(std::move(options));
  }
};

TEST_F(CalibrateTest, PrintsATableAndWritesTheFile) {
  const std::string path = file("new/folder/calibration").string();

  const CliResult result = calibrate_small({"--output", path});

  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  const Calibration written = read_calibration(path);
  EXPECT_EQ(written.region_bytes, 64 * MiB);
  ASSERT_EQ(written.entries.size(), 2U);
  for (const CalibrationEntry& entry : written.entries) {
    EXPECT_THAT(result.out, HasSubstr(std::string(host_allocation_name(entry.allocation))));
  }
  for (const int rows : kCalibrationRows) EXPECT_THAT(result.out, HasSubstr(std::to_string(rows)));
  EXPECT_THAT(result.out,
              HasSubstr(written.device + ": " + std::string(host_allocation_name(written.best)) +
                        ", written to " + path));
}

TEST_F(CalibrateTest, WritesToTheUsersConfiguration) {
  {
    const Variable config("XDG_CONFIG_HOME", file("config").c_str());
    EXPECT_EQ(default_calibration_path(), file("config/kvtier/calibration"));
    EXPECT_EQ(calibrate_small({}).code, 0);
    EXPECT_EQ(read_calibration(file("config/kvtier/calibration")).entries.size(), 2U);
  }
  const Variable home("HOME", file("home").c_str());
  for (const char* unusable : {static_cast<const char*>(nullptr), "", "relative/path"}) {
    const Variable config("XDG_CONFIG_HOME", unusable);
    EXPECT_EQ(default_calibration_path(), file("home/.config/kvtier/calibration"));
  }
  const Variable no_config("XDG_CONFIG_HOME", nullptr);
  const Variable no_home("HOME", nullptr);
  const CliResult result = calibrate_small({});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("INVALID_ARGUMENT: --output: expected a path"));
}

TEST_F(CalibrateTest, MeasuresNothingForAPlaceThatCannotBeWritten) {
  const CliResult folder = calibrate_small({"--output", file("").string()});
  EXPECT_EQ(folder.code, 1);
  EXPECT_EQ(folder.out, "");
  const CliResult below = calibrate_small({"--output", "/dev/null/calibration"});
  EXPECT_EQ(below.code, 1);
  EXPECT_EQ(below.out, "");
  EXPECT_THAT(below.err, HasSubstr("/dev/null"));
}

TEST_F(CalibrateTest, LeavesTheFileAloneWhenItFails) {
  write_trace(file("unrelated"), {});
  const CliResult result = run_kvtier({"calibrate", "--backend", "cpu", "--region", "1M",
                                       "--output", file("calibration").string()});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("--region: expected a size of at least 64M, found 1048576"));
  EXPECT_THAT(listing(), ElementsAre("unrelated"));
}

TEST_F(CalibrateTest, LeavesNoFoldersWhenItFails) {
  // A way to obtain memory that is named twice is refused.
  const CliResult result =
      run_kvtier({"calibrate", "--backend", "cpu", "--region", "64M", "--allocation",
                  "driver,driver", "--output", file("d1/d2/calibration").string()});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(listing(), IsEmpty());
}

TEST_F(CalibrateTest, RejectsCommandLinesItDoesNotUnderstand) {
  const std::string path = file("calibration").string();
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--region", "big"}, "big"},
      {{"--region", "-8G"}, "--region"},
      {{"--region", "8X"}, "a size such as 64K, found 8X"},
      {{"--allocation", "auto"}, "auto"},
      {{"--allocation", "malloc"}, "malloc"},
      {{"--backend", "tpu"}, "tpu"},
      {{"--regoin", "8G"}, "--regoin"},
      {{"extra"}, "extra"},
  };
  for (const auto& [options, part] : cases) {
    std::vector<std::string> arguments{"calibrate", "--output", path};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const CliResult result = run_kvtier(arguments);
    EXPECT_EQ(result.code, 2) << part;
    EXPECT_THAT(result.err, HasSubstr(part));
  }
  EXPECT_THAT(listing(), IsEmpty());
}

TEST_F(CalibrateTest, SaysThatThereIsNoGpu) {
  try {
    const CliResult result =
        run_kvtier({"calibrate", "--region", "64M", "--output", file("calibration").string()});
    if (result.code == 0) GTEST_SKIP() << "a GPU is here";
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.err, HasSubstr("error: UNIMPLEMENTED: "));
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(listing(), IsEmpty());
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
}

}  // namespace
}  // namespace kvtier::services
