#include "kvtier/error.h"

#include "formats/safetensors.h"
#include "tests/support/file_size_limit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace kvtier::formats {
namespace {

class WriteSafeTensorsTest : public ::testing::Test {
 protected:
  WriteSafeTensorsTest() {
    std::string name = (std::filesystem::temp_directory_path() / "kvtier.XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
    std::iota(values_.begin(), values_.end(), std::uint8_t{0});
  }
  ~WriteSafeTensorsTest() override { std::filesystem::remove_all(directory_); }

  [[nodiscard]] std::filesystem::path path() const { return directory_ / "file.safetensors"; }
  [[nodiscard]] Tensor tensor(DType dtype, std::vector<std::int64_t> shape,
                              std::size_t offset = 0) const {
    Tensor made{.dtype = dtype, .shape = std::move(shape), .data = bytes() + offset, .bytes = 0};
    made.bytes = static_cast<std::size_t>(made.elements()) * dtype_bytes(dtype);
    return made;
  }
  [[nodiscard]] const std::byte* bytes() const {
    return reinterpret_cast<const std::byte*>(values_.data());
  }
  [[nodiscard]] std::vector<std::string> names_in_directory() const {
    std::vector<std::string> names;
    for (const auto& one : std::filesystem::directory_iterator(directory_)) {
      names.push_back(one.path().filename().string());
    }
    std::ranges::sort(names);
    return names;
  }
  static std::string contents(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  void expect_error(const std::map<std::string, Tensor>& tensors, ErrorCode code,
                    const std::map<std::string, std::string>& metadata = {}) {
    try {
      write_safetensors(path(), tensors, metadata);
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
  }

  std::filesystem::path directory_;
  std::vector<std::uint8_t> values_ = std::vector<std::uint8_t>(100'000);
};

TEST_F(WriteSafeTensorsTest, ReadsBackWhatItWrote) {
  const std::map<std::string, Tensor> tensors = {
      {"a.half", tensor(DType::kFloat16, {3}, 1)},
      {"b", tensor(DType::kFloat32, {2, 3, 5}, 7)},
      {"c", tensor(DType::kBFloat16, {1, 1, 1, 1, 1, 1, 1, 9}, 100)},
      {"d \"quoted\" \xC3\xA9", tensor(DType::kInt32, {10'000}, 200)},
      {"empty", tensor(DType::kFloat32, {0, 7})},
      {"scalar", tensor(DType::kFloat32, {}, 13)}};
  const std::map<std::string, std::string> metadata = {{"k", "v"}, {"note", "\n\t\"\\"}};

  write_safetensors(path(), tensors, metadata);

  const SafeTensors file = SafeTensors::open(path());
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const auto& [name, expected] : tensors) {
    const Tensor& found = file.at(name, expected.dtype, expected.shape);
    ASSERT_EQ(found.bytes, expected.bytes) << name;
    EXPECT_EQ(std::memcmp(found.data, expected.data, found.bytes), 0) << name;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(found.data) % dtype_bytes(found.dtype), 0U);
  }
  EXPECT_TRUE(std::ranges::equal(file.metadata(), metadata));
  EXPECT_EQ(names_in_directory(), std::vector<std::string>{"file.safetensors"});
}

TEST_F(WriteSafeTensorsTest, AlignsTheDataAndPadsTheHeaderWithBlanks) {
  write_safetensors(path(),
                    {{"a", tensor(DType::kFloat16, {3})}, {"b", tensor(DType::kFloat32, {1})}});

  const std::string file = contents(path());
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  EXPECT_EQ((8 + header_bytes) % 8, 0U);
  EXPECT_EQ(file[8], '{');
  EXPECT_EQ(file.size(), 8 + header_bytes + 10);
  const std::size_t end = file.find_last_not_of(' ', 7 + header_bytes);
  EXPECT_EQ(file[end], '}');
}

TEST_F(WriteSafeTensorsTest, WritesTheSameBytesEachTime) {
  const std::map<std::string, Tensor> tensors = {{"a", tensor(DType::kFloat16, {3})},
                                                 {"b", tensor(DType::kFloat32, {50})}};
  write_safetensors(path(), tensors, {{"k", "v"}});
  const std::string first = contents(path());

  write_safetensors(path(), tensors, {{"k", "v"}});

  EXPECT_EQ(contents(path()), first);
}

TEST_F(WriteSafeTensorsTest, WritesNoTensors) {
  write_safetensors(path(), {});

  EXPECT_TRUE(SafeTensors::open(path()).tensors().empty());
}

TEST_F(WriteSafeTensorsTest, ReplacesAFileWhoseReaderKeepsTheOldOne) {
  write_safetensors(path(), {{"a", tensor(DType::kFloat32, {100}, 0)}});
  const SafeTensors old = SafeTensors::open(path());

  write_safetensors(path(), {{"a", tensor(DType::kFloat32, {100}, 400)}});

  EXPECT_EQ(std::memcmp(old.at("a").data, bytes(), 400), 0);
  const SafeTensors replaced = SafeTensors::open(path());
  EXPECT_EQ(std::memcmp(replaced.at("a").data, bytes() + 400, 400), 0);
}

TEST_F(WriteSafeTensorsTest, RefusesTensorsThatDoNotFitTheirShape) {
  Tensor longer = tensor(DType::kFloat32, {4});
  longer.bytes += 4;
  Tensor negative = tensor(DType::kFloat32, {4});
  negative.shape = {-2, -2};
  Tensor overflowing = tensor(DType::kFloat32, {0});
  overflowing.shape = {std::int64_t{1} << 62, 4};
  Tensor missing = tensor(DType::kFloat32, {4});
  missing.data = nullptr;
  for (const Tensor& bad : {longer, negative, overflowing, missing}) {
    expect_error({{"a", bad}}, ErrorCode::kInvalidArgument);
  }
  expect_error({{"__metadata__", tensor(DType::kFloat32, {4})}}, ErrorCode::kInvalidArgument);
  expect_error({{"\xFF", tensor(DType::kFloat32, {4})}}, ErrorCode::kInvalidArgument);
  expect_error({}, ErrorCode::kInvalidArgument, {{"k", "\xFF"}});

  EXPECT_TRUE(names_in_directory().empty());
}

TEST_F(WriteSafeTensorsTest, SaysThatADirectoryIsMissing) {
  directory_ /= "none";

  expect_error({{"a", tensor(DType::kFloat32, {4})}}, ErrorCode::kUnavailable);

  directory_ = directory_.parent_path();
  EXPECT_TRUE(names_in_directory().empty());
}

TEST_F(WriteSafeTensorsTest, LeavesNothingWhenItCannotRename) {
  std::filesystem::create_directories(path() / "occupied");

  expect_error({{"a", tensor(DType::kFloat32, {4})}}, ErrorCode::kUnavailable);

  EXPECT_EQ(names_in_directory(), std::vector<std::string>{"file.safetensors"});
}

TEST_F(WriteSafeTensorsTest, FailureHalfwayKeepsTheOldFileAndNothingElse) {
  write_safetensors(path(), {{"a", tensor(DType::kFloat32, {4})}});
  const std::string before = contents(path());
  {
    const kvtier::testing::FileSizeLimit limit(10'000);
    expect_error({{"a", tensor(DType::kFloat32, {20'000})}}, ErrorCode::kUnavailable);
  }

  EXPECT_EQ(names_in_directory(), std::vector<std::string>{"file.safetensors"});
  EXPECT_EQ(contents(path()), before);
}

}  // namespace
}  // namespace kvtier::formats
