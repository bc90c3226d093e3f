#include "kvtier/calibration.h"

#include "kvtier/engine.h"
#include "kvtier/error.h"

#include "runtime/api/calibration.h"
#include "runtime/engine_fixture.h"
#include "support/backend_fixture.h"
#include "transfer/device/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <unistd.h>

namespace kvtier {
namespace {

using ::testing::HasSubstr;

Calibration example() {
  return {.device = "NVIDIA H200, 132 SMs",
          .region_bytes = 8 * GiB,
          .best = HostAllocation::kDriver,
          .entries = {{.allocation = HostAllocation::kRegistered,
                       .obtain_seconds = 0.1,
                       .gb_per_s = {1.0 / 3.0, 17.25, 1e-9},
                       .refused = {}},
                      {.allocation = HostAllocation::kManaged,
                       .obtain_seconds = 0.0,
                       .gb_per_s = {},
                       .refused = "fewer pages: wanted 7, found 3"},
                      {.allocation = HostAllocation::kDriver,
                       .obtain_seconds = 3.0,
                       .gb_per_s = {42.0, 48.5, 50.0},
                       .refused = {}}}};
}

template <typename Call>
void expect_error(ErrorCode code, const std::string& part, Call&& call) {
  try {
    static_cast<void>(call());
    ADD_FAILURE() << "expected an error with \"" << part << "\"";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(CalibrationFile, ReadsBackWhatItWrites) {
  const Calibration written = example();
  EXPECT_EQ(parse_calibration(to_text(written), "x"), written);
}

TEST(CalibrationFile, AllowsCommentsAndEmptyLines) {
  std::string text = to_text(example());
  text.insert(text.find('\n') + 1, "# by hand\n\n");
  EXPECT_EQ(parse_calibration(text, "x"), example());
  text.pop_back();  // no newline at the end
  EXPECT_EQ(parse_calibration(text, "x"), example());
}

TEST(CalibrationFile, NamesTheLineAndWhatItExpected) {
  struct Case {
    std::string from;
    std::string to;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"kvtier calibration 1", "kvtier calibration 2",
       "f, line 1: expected kvtier calibration 1, found \"kvtier calibration 2\""},
      {"region_bytes: 8589934592", "region_bytes: many",
       "f, line 3: expected a number of bytes, found \"many\""},
      {"region_bytes: 8589934592", "region_bytes: -1", "a number of bytes, found \"-1\""},
      {"region_bytes: 8589934592", "region_bytes: 99999999999999999999",
       "a number of bytes, found \"99999999999999999999\""},
      {"region_bytes: 8589934592\n", "", "a line region_bytes: ... before the end"},
      {"device: NVIDIA H200, 132 SMs\n", "", "a line device: ... before the end"},
      {"host_allocation: driver\n", "", "a line host_allocation: ... before the end"},
      {"device: ", "gadget: ",
       "expected device, region_bytes, host_allocation, measured or refused, found \"gadget\""},
      {"device: ", "device ", "expected key: value"},
      {"host_allocation: driver", "host_allocation: auto",
       "expected managed, registered or driver, found \"auto\""},
      {"host_allocation: driver", "host_allocation: managed",
       "a line measured: ... of the host_allocation before the end, found \"managed\""},
      {"host_allocation: driver", "host_allocation: huge_pages", "found \"huge_pages\""},
      {"measured: driver", "measured: registered", "expected each allocation once"},
      {"host_allocation: driver\n", "host_allocation: driver\nhost_allocation: driver\n",
       "f, line 5: expected each key once"},
      {" 42 48.5 50", " 42 48.5", "expected a rate in GB/s, found \"\""},
      {" 42 48.5 50", " 42 48.5 fast", "expected a rate in GB/s, found \"fast\""},
      {" 42 48.5 50", " 42 nan 50", "expected a rate in GB/s, found \"nan\""},
      {" 42 48.5 50", " 42 -1 50", "expected a rate in GB/s, found \"-1\""},
      {" 42 48.5 50", " 42 48.5 50 51", "expected the end of the line after 3 rates"},
      {"fewer pages: wanted 7, found 3", "", "expected a reason"},
  };
  for (const Case& c : cases) {
    std::string text = to_text(example());
    const std::size_t at = text.find(c.from);
    ASSERT_NE(at, std::string::npos) << c.from;
    text.replace(at, c.from.size(), c.to);
    expect_error(ErrorCode::kInvalidArgument, c.message,
                 [&] { return parse_calibration(text, "f"); });
  }
  expect_error(ErrorCode::kInvalidArgument, "expected kvtier calibration 1, found \"\"",
               [] { return parse_calibration("", "f"); });
  expect_error(ErrorCode::kNotFound, "/nowhere/at/all",
               [] { return read_calibration("/nowhere/at/all"); });
  expect_error(ErrorCode::kNotFound, "found /", [] { return read_calibration("/"); });
}

TEST(CalibrationFile, NamesEveryAllocation) {
  EXPECT_EQ(host_allocation_name(HostAllocation::kAuto), "auto");
  EXPECT_EQ(host_allocation_name(HostAllocation::kManaged), "managed");
  EXPECT_EQ(host_allocation_name(HostAllocation::kRegistered), "registered");
  EXPECT_EQ(host_allocation_name(HostAllocation::kDriver), "driver");
}

CalibrationEntry measured(HostAllocation allocation, double seconds, double rate) {
  return {.allocation = allocation,
          .obtain_seconds = seconds,
          .gb_per_s = {99.0, rate, 99.0},
          .refused = {}};
}

TEST(Calibrate, PrefersTheFastestThenTheSoonestObtained) {
  using runtime::best_allocation;
  const CalibrationEntry registered = measured(HostAllocation::kRegistered, 1.0, 20.0);
  CalibrationEntry refused = measured(HostAllocation::kManaged, 0.1, 100.0);
  refused.refused = "none there";
  EXPECT_EQ(best_allocation({registered, refused}), HostAllocation::kRegistered);
  EXPECT_EQ(best_allocation({registered, refused, measured(HostAllocation::kDriver, 9.0, 40.0)}),
            HostAllocation::kDriver);
  // Within a twentieth: noise.
  EXPECT_EQ(best_allocation({registered, measured(HostAllocation::kDriver, 9.0, 20.9)}),
            HostAllocation::kRegistered);
  EXPECT_EQ(best_allocation({registered, measured(HostAllocation::kDriver, 0.5, 19.5)}),
            HostAllocation::kDriver);
}

TEST(Calibrate, MeasuresEachAllocationOnAnyDevice) {
  const auto device = transfer::make_device(Backend::kCpu);
  std::vector<CalibrationEntry> reported;
  const CalibrationOptions options{
      .backend = Backend::kCpu,
      .region_bytes = 64 * MiB,
      .allocations = {HostAllocation::kDriver, HostAllocation::kRegistered},
      .pin_threads = 1,
      .progress = [&](const CalibrationEntry& entry) { reported.push_back(entry); }};

  const Calibration calibration = calibrate(options);

  EXPECT_EQ(calibration.device, device->name());
  EXPECT_EQ(calibration.region_bytes, 64 * MiB);
  EXPECT_EQ(calibration.entries, reported);
  ASSERT_EQ(reported.size(), 2U);
  EXPECT_EQ(reported[0].allocation, HostAllocation::kDriver);
  EXPECT_EQ(reported[1].allocation, HostAllocation::kRegistered);
  for (const CalibrationEntry& entry : reported) {
    EXPECT_EQ(entry.refused, "");
    for (const double rate : entry.gb_per_s) EXPECT_GT(rate, 0.0);
  }
  EXPECT_EQ(calibration.best, runtime::best_allocation(reported));
  EXPECT_EQ(parse_calibration(to_text(calibration), "x"), calibration);
}

TEST(Calibrate, SaysWhenEveryAllocationIsRefused) {
  const std::size_t bytes = std::size_t{1} << 60;
  expect_error(ErrorCode::kResourceExhausted, std::to_string(bytes),
               [&] { return calibrate({.backend = Backend::kCpu, .region_bytes = bytes}); });
}

TEST(Calibrate, RejectsOptionsThatMakeNoSense) {
  expect_error(ErrorCode::kInvalidArgument, "region_bytes: expected at least 67108864, found 1",
               [] { return calibrate({.backend = Backend::kCpu, .region_bytes = 1}); });
  expect_error(ErrorCode::kInvalidArgument, "pin_threads: expected at least 0, found -1",
               [] { return calibrate({.backend = Backend::kCpu, .pin_threads = -1}); });
  expect_error(ErrorCode::kInvalidArgument, "found auto", [] {
    return calibrate({.backend = Backend::kCpu, .allocations = {HostAllocation::kAuto}});
  });
  expect_error(ErrorCode::kInvalidArgument, "found driver again", [] {
    return calibrate({.backend = Backend::kCpu,
                      .allocations = {HostAllocation::kDriver, HostAllocation::kDriver}});
  });
}

TEST(Calibrate, NeedsAGpuUnlessToldOtherwise) {
  if (!testing::why_unusable(Backend::kCuda)) GTEST_SKIP() << "a GPU is here";
  expect_error(ErrorCode::kUnimplemented, "", [] { return calibrate({}); });
}

/// Writes text to a file that is removed at the end.
class TextFile {
 public:
  explicit TextFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("kvtier-calibration-" + std::to_string(getpid()))) {
    std::ofstream(path_) << text;
  }
  TextFile(const TextFile&) = delete;  // owns the file
  TextFile& operator=(const TextFile&) = delete;
  ~TextFile() { std::filesystem::remove(path_); }
  [[nodiscard]] std::string path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// An engine reads the file that it is given, on CUDA; the CPU backend has no choice to make.
class CalibratedEngine : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (GetParam() == Backend::kCpu) return;
    try {
      device_ = transfer::make_device(GetParam())->name();
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  void expect_on_cuda(ErrorCode code, const std::string& part, const Config& config) {
    if (GetParam() == Backend::kCpu) {
      const Engine engine(config);
    } else {
      expect_error(code, part, [&] { return Engine(config).backend(); });
    }
  }

  std::string device_;
};
KVTIER_INSTANTIATE_BACKENDS(CalibratedEngine);

TEST_P(CalibratedEngine, TakesTheAllocationOfItsMachine) {
  Calibration calibration = example();
  calibration.device = device_;
  const TextFile file(to_text(calibration));
  Config config = testing::small_config(GetParam());
  config.memory.calibration_file = file.path();

  EXPECT_EQ(Engine(config).backend(), GetParam());
}

TEST_P(CalibratedEngine, RefusesTheFileOfAnotherMachine) {
  const TextFile file(to_text(example()));
  Config config = testing::small_config(GetParam());
  config.memory.calibration_file = file.path();
  if (device_ == example().device) GTEST_SKIP() << "this machine is the example";

  expect_on_cuda(ErrorCode::kFailedPrecondition, "found one of NVIDIA H200, 132 SMs", config);
}

TEST_P(CalibratedEngine, RefusesAFileThatIsNotThere) {
  Config config = testing::small_config(GetParam());
  config.memory.calibration_file = "/nowhere/at/all";

  expect_on_cuda(ErrorCode::kNotFound, "/nowhere/at/all", config);
}

}  // namespace
}  // namespace kvtier
