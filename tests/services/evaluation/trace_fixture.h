#pragma once

#include "kvtier/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvtier::services {

/// A tensor as a test makes it; values must be exact in `dtype`.
struct TensorValues {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
  DType dtype = DType::kBFloat16;
};
using TraceValues = std::map<std::string, TensorValues>;

/// Shape of a synthetic trace.
struct TraceShape {
  std::int64_t kv_heads = 2;
  std::int64_t query_heads = 4;
  std::int64_t context = 300;
  std::int64_t steps = 5;
  std::int64_t head_dim = 64;

  [[nodiscard]] std::int64_t tokens() const { return context + steps; }
};

/// Random k, v, q, and o computed by dense attention in double and rounded to fp32, under
/// `prefix` + name. Values are exact in bf16.
[[nodiscard]] TraceValues make_layer(const TraceShape& shape, std::uint64_t seed,
                                     const std::string& prefix = "");

void write_trace(const std::filesystem::path& path, const TraceValues& tensors);

/// Returns the committed trace of needle-llama.
[[nodiscard]] std::filesystem::path recorded_trace();

/// What the program did with a command line.
struct CliResult {
  int code = -1;
  std::string out;
  std::string err;
};
[[nodiscard]] CliResult run_kvtier(std::vector<std::string> arguments,
                                   bool err_is_terminal = false);

/// Gives each test an empty folder, removed afterwards.
class FolderTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
  [[nodiscard]] std::filesystem::path file(const std::string& name) const { return folder_ / name; }
  [[nodiscard]] std::vector<std::string> listing() const;

  std::filesystem::path folder_;
};

[[nodiscard]] std::string read_text(const std::filesystem::path& path);

}  // namespace kvtier::services
