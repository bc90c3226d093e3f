#include "tests/services/evaluation/trace_fixture.h"

#include "formats/safetensors.h"
#include "services/program/cli.h"
#include "support/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <span>
#include <sstream>
#include <unistd.h>

namespace kvtier::services {
namespace {

std::vector<std::byte> stored(const TensorValues& tensor) {
  const std::size_t element = dtype_bytes(tensor.dtype);
  std::vector<std::byte> bytes(tensor.values.size() * element);
  for (std::size_t i = 0; i < tensor.values.size(); ++i) {
    const auto value = static_cast<double>(tensor.values[i]);
    const std::uint16_t half =
        tensor.dtype == DType::kFloat16 ? oracle::to_fp16(value) : oracle::to_bf16(value);
    const auto integer = static_cast<std::int32_t>(tensor.values[i]);
    const void* from = &half;
    if (tensor.dtype == DType::kFloat32) from = &tensor.values[i];
    if (tensor.dtype == DType::kInt32) from = &integer;
    std::memcpy(bytes.data() + i * element, from, element);
  }
  return bytes;
}

}  // namespace

TraceValues make_layer(const TraceShape& shape, std::uint64_t seed, const std::string& prefix) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  const auto random = [&](std::int64_t heads, std::int64_t extent, double scale) {
    TensorValues tensor{{heads, extent, shape.head_dim}, {}};
    tensor.values.resize(static_cast<std::size_t>(heads * extent * shape.head_dim));
    for (float& x : tensor.values) {
      x = static_cast<float>(oracle::round_to(DType::kBFloat16, scale * normal(engine)));
    }
    return tensor;
  };
  const TensorValues k = random(shape.kv_heads, shape.tokens(), 1.0);
  const TensorValues v = random(shape.kv_heads, shape.tokens(), 1.0);
  const TensorValues q = random(shape.query_heads, shape.steps, 2.0);
  TensorValues o{q.shape, {}, DType::kFloat32};
  const auto d = static_cast<std::size_t>(shape.head_dim);
  for (std::int64_t head = 0; head < shape.query_heads; ++head) {
    const std::int64_t begin =
        head * shape.kv_heads / shape.query_heads * shape.tokens() * shape.head_dim;
    const oracle::KvView view{k.values.data() + begin, v.values.data() + begin, shape.head_dim,
                              static_cast<int>(shape.head_dim)};
    for (std::int64_t step = 0; step < shape.steps; ++step) {
      std::vector<std::int64_t> tokens(static_cast<std::size_t>(shape.context + step + 1));
      std::iota(tokens.begin(), tokens.end(), 0);
      const auto query = static_cast<std::size_t>(head * shape.steps + step) * d;
      const oracle::Attention dense =
          oracle::attend(std::span(q.values).subspan(query, d), view, tokens,
                         1.0 / std::sqrt(static_cast<double>(d)));
      for (const double x : dense.out) o.values.push_back(static_cast<float>(x));
    }
  }
  return {{prefix + "k", k}, {prefix + "v", v}, {prefix + "q", q}, {prefix + "o", o}};
}

void write_trace(const std::filesystem::path& path, const TraceValues& tensors) {
  std::map<std::string, std::vector<std::byte>> bytes;
  std::map<std::string, formats::Tensor> views;
  for (const auto& [name, tensor] : tensors) {
    const std::vector<std::byte>& data = bytes[name] = stored(tensor);
    views[name] = {tensor.dtype, tensor.shape, data.data(), data.size()};
  }
  formats::write_safetensors(path, views);
}

std::filesystem::path recorded_trace() {
  const char* data = std::getenv("KVTIER_DATA_DIR");
  return std::filesystem::path(data != nullptr ? data : "data") / "traces" /
         "needle-layer2-cut.safetensors";
}

CliResult run_kvtier(std::vector<std::string> arguments, bool err_is_terminal) {
  std::ostringstream out;
  std::ostringstream err;
  const int code =
      run_cli(std::move(arguments), {.out = out, .err = err, .err_is_terminal = err_is_terminal});
  return {code, out.str(), err.str()};
}

void FolderTest::SetUp() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  folder_ = std::filesystem::temp_directory_path() /
            ("kvtier-" + std::string(info->test_suite_name()) + "-" + info->name() + "-" +
             std::to_string(::getpid()));
  std::filesystem::create_directories(folder_);
}

void FolderTest::TearDown() { std::filesystem::remove_all(folder_); }

std::vector<std::string> FolderTest::listing() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace kvtier::services
