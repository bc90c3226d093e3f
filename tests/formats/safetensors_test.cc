#include "formats/safetensors.h"

#include "kvtier/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace kvtier::formats {
namespace {

class SafeTensorsTest : public ::testing::Test {
 protected:
  SafeTensorsTest() {
    std::string name = (std::filesystem::temp_directory_path() / "kvtier.XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
  }
  ~SafeTensorsTest() override { std::filesystem::remove_all(directory_); }

  [[nodiscard]] std::filesystem::path path(const std::string& name = "file.safetensors") const {
    return directory_ / name;
  }
  std::filesystem::path write_bytes(const std::string& bytes) {
    std::ofstream file(path(), std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path();
  }
  /// A file of the given header, header length as it is or as given, and data.
  static std::string file_of(const std::string& header, const std::string& data,
                             std::optional<std::uint64_t> header_bytes = {}) {
    const std::uint64_t length = header_bytes.value_or(header.size());
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes + header + data;
  }
  void expect_error(const std::string& bytes, ErrorCode code, const std::string& part) {
    write_bytes(bytes);
    try {
      const SafeTensors file = SafeTensors::open(path());
      ADD_FAILURE() << "expected an error with '" << part << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find(path().string()), 0U) << error.what();
      EXPECT_LT(std::string(error.what()).size(), 2000U);
    }
  }
  void expect_bad_header(const std::string& header, const std::string& data,
                         const std::string& part) {
    SCOPED_TRACE(header);
    expect_error(file_of(header, data), ErrorCode::kDataLoss, part);
  }

  std::filesystem::path directory_;
};

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

const std::string kData = "0123456789ABCDEFGHIJKLMN";  // 24 bytes
const std::string kGoodHeader = R"({"a":)" + entry("F32", "[2,2]", "[0,16]") + R"(,"b":)" +
                                entry("BF16", "[4]", "[16,24]") +
                                R"(,"__metadata__":{"format":"pt","n":""}})";

TEST_F(SafeTensorsTest, ReadsTensorsAndMetadata) {
  const SafeTensors file = SafeTensors::open(write_bytes(file_of(kGoodHeader, kData)));

  ASSERT_EQ(file.tensors().size(), 2U);
  const Tensor& a = file.at("a");
  EXPECT_EQ(a.dtype, DType::kFloat32);
  EXPECT_EQ(a.shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(a.elements(), 4);
  EXPECT_EQ(std::string(a.as<char>(), a.bytes), kData.substr(0, 16));
  const Tensor& b = file.at("b", DType::kBFloat16, {4});
  EXPECT_EQ(std::string(b.as<char>(), b.bytes), kData.substr(16));
  EXPECT_TRUE(file.contains("a"));
  EXPECT_FALSE(file.contains("__metadata__"));
  EXPECT_EQ(file.metadata().size(), 2U);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.path(), path());
}

TEST_F(SafeTensorsTest, ReadsEveryDtypeAndRank) {
  std::string header = R"({"i":)" + entry("I32", "[1]", "[20,24]") + R"(,"h":)" +
                       entry("F16", "[1,1,1,2,1,1,1,1]", "[16,20]") + R"(,"s":)" +
                       entry("F32", "[]", "[0,4]") + R"(,"f":)" + entry("F32", "[3,1]", "[4,16]") +
                       "}   \n";
  const SafeTensors file = SafeTensors::open(write_bytes(file_of(header, kData)));

  EXPECT_EQ(file.at("i").dtype, DType::kInt32);
  EXPECT_EQ(file.at("h").dtype, DType::kFloat16);
  EXPECT_EQ(file.at("h").shape.size(), 8U);
  EXPECT_EQ(file.at("s").elements(), 1);
  EXPECT_EQ(file.at("f").elements(), 3);
  EXPECT_TRUE(file.metadata().empty());
}

TEST_F(SafeTensorsTest, ReadsEmptyFilesAndTensors) {
  EXPECT_TRUE(SafeTensors::open(write_bytes(file_of("{}", ""))).tensors().empty());

  const SafeTensors file = SafeTensors::open(write_bytes(
      file_of(R"({"a":)" + entry("F32", "[0,5]", "[0,0]") + R"(,"b":)" +
                  entry("F32", "[6]", "[0,24]") + R"(,"c":)" + entry("I32", "[3,0]", "[24,24]") +
                  R"(,"d":)" + entry("F16", "[0]", "[24,24]") + "}",
              kData)));
  for (const char* name : {"a", "c", "d"}) {
    EXPECT_EQ(file.at(name).bytes, 0U);
    EXPECT_EQ(file.at(name).elements(), 0);
    EXPECT_NE(file.at(name).data, nullptr);
  }
  EXPECT_EQ(file.at("b").bytes, 24U);
}

TEST_F(SafeTensorsTest, AlignsTensorsThatTheFileDoesNot) {
  for (std::size_t padding = 0; padding < 8; ++padding) {
    const std::string header = R"({"h":)" + entry("F16", "[1]", "[0,2]") + R"(,"f":)" +
                               entry("F32", "[5]", "[2,22]") + R"(,"g":)" +
                               entry("F16", "[1]", "[22,24]") + "}" + std::string(padding, ' ');
    const SafeTensors opened = SafeTensors::open(write_bytes(file_of(header, kData)));
    SafeTensors file = SafeTensors::open(path());
    file = SafeTensors::open(path());

    for (const auto& [name, tensor] : file.tensors()) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_bytes(tensor.dtype), 0U);
    }
    EXPECT_EQ(std::string(file.at("h").as<char>(), 2), kData.substr(0, 2));
    EXPECT_EQ(std::string(file.at("f").as<char>(), 20), kData.substr(2, 20));
    EXPECT_EQ(std::string(file.at("g").as<char>(), 2), kData.substr(22));
  }
}

TEST_F(SafeTensorsTest, MovesItsMapping) {
  SafeTensors first = SafeTensors::open(write_bytes(file_of(kGoodHeader, kData)));
  const std::byte* const data = first.at("a").data;

  const SafeTensors second(std::move(first));

  EXPECT_EQ(second.at("a").data, data);
  EXPECT_EQ(std::string(second.at("a").as<char>(), 16), kData.substr(0, 16));
}

TEST_F(SafeTensorsTest, RefusesEveryTruncation) {
  const std::string whole = file_of(kGoodHeader, kData);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    SCOPED_TRACE("first " + std::to_string(bytes) + " bytes");
    expect_error(whole.substr(0, bytes), ErrorCode::kDataLoss, "expected");
  }
  expect_error(whole + "x", ErrorCode::kDataLoss, "expected 24 bytes of data, found 25");
}

TEST_F(SafeTensorsTest, SurvivesEveryFlippedByteOfTheHeader) {
  const std::string whole = file_of(kGoodHeader, kData);
  for (std::size_t i = 0; i < whole.size() - kData.size(); ++i) {
    for (const int flip : {0x01, 0x02, 0x10, 0x80, 0xFF}) {
      std::string broken = whole;
      broken[i] = static_cast<char>(broken[i] ^ flip);
      write_bytes(broken);
      try {
        const SafeTensors file = SafeTensors::open(path());
        std::size_t covered = 0;
        for (const auto& [name, tensor] : file.tensors()) covered += tensor.bytes;
        EXPECT_EQ(covered, kData.size()) << "byte " << i << " flipped by " << flip;
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::kDataLoss ||
                    error.code() == ErrorCode::kInvalidArgument)
            << error.what();
      }
    }
  }
}

TEST_F(SafeTensorsTest, RefusesABadHeaderLength) {
  for (const std::uint64_t length :
       {std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{0} - 7, std::uint64_t{1} << 32,
        std::uint64_t{kGoodHeader.size() + kData.size() + 1}}) {
    expect_error(file_of(kGoodHeader, kData, length), ErrorCode::kDataLoss,
                 "expected a safetensors file, with a header of at most " +
                     std::to_string(kGoodHeader.size() + kData.size()) + " bytes, found one of " +
                     std::to_string(length));
  }
  expect_error(file_of(kGoodHeader, kData, 0), ErrorCode::kDataLoss, "header: expected JSON");
  expect_error(file_of(kGoodHeader, kData, kGoodHeader.size() + kData.size()), ErrorCode::kDataLoss,
               "header: expected JSON");
}

TEST_F(SafeTensorsTest, RefusesAHeaderThatIsNoObject) {
  for (const std::string header : {"", " ", "[]", "1", "null", "\"a\"", "{", "{\"a\"}", "{} {}",
                                   "{\"a\":1,}", "\xFF\xFE", "{\"\xC3\":1}"}) {
    expect_bad_header(header, "", "header: expected");
  }
}

TEST_F(SafeTensorsTest, RefusesDeepNesting) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  expect_bad_header(R"({"a":)" + deep + "}", "", "levels");
  expect_bad_header(R"({"a":{"shape":[[1]]}})", "", "levels");
}

TEST_F(SafeTensorsTest, RefusesNamesGivenTwice) {
  const std::string good = entry("F32", "[6]", "[0,24]");
  expect_bad_header(R"({"a":)" + good + R"(,"a":)" + good + "}", kData, "'a' twice");
  expect_bad_header(R"({"a":)" + good + R"(,"\u0061":)" + good + "}", kData, "'a' twice");
  expect_bad_header(R"({"a":{"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}})",
                    kData, "'dtype' twice");
  expect_bad_header(R"({"__metadata__":{"k":"1","k":"2"}})", "", "'k' twice");
}

TEST_F(SafeTensorsTest, RefusesBadMetadata) {
  for (const std::string value :
       {"1", "null", "[]", "\"text\"", R"({"k":1})", R"({"k":null})", R"({"k":"v","l":["v"]})"}) {
    expect_bad_header(R"({"__metadata__":)" + value + "}", "", "__metadata__: expected");
  }
}

TEST_F(SafeTensorsTest, RefusesBadEntries) {
  for (const std::string value : {"1", "null", "[]", "\"F32\""}) {
    expect_bad_header(R"({"a":)" + value + "}", "", "tensor 'a': expected an object");
  }
  expect_bad_header(R"({"a":{"shape":[6],"data_offsets":[0,24]}})", kData, "expected dtype");
  expect_bad_header(R"({"a":{"dtype":"F32","data_offsets":[0,24]}})", kData, "expected shape");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[6]}})", kData, "expected data_offsets");
  expect_bad_header(R"({"a":{"dtype":4,"shape":[6],"data_offsets":[0,24]}})", kData,
                    "dtype: expected a string");
}

TEST_F(SafeTensorsTest, RefusesOtherDtypes) {
  for (const std::string dtype : {"F64", "I64", "U8", "BOOL", "F8_E4M3", "f32", "", "F32 "}) {
    expect_error(file_of(R"({"a":)" + entry(dtype, "[6]", "[0,24]") + "}", kData),
                 ErrorCode::kInvalidArgument, "tensor 'a': dtype: expected F32");
  }
}

TEST_F(SafeTensorsTest, RefusesBadShapes) {
  for (const std::string shape :
       {"[-6]", "[-1,-6]", "[6.0]", "[6.5]", "[1e1]", "[\"6\"]", "[null]", "[true]", "6", "\"6\"",
        "null", "[18446744073709551615]", "[18446744073709551617]", "[9223372036854775808]"}) {
    expect_bad_header(R"({"a":)" + entry("F32", shape, "[0,24]") + "}", kData, "shape: expected");
  }
}

TEST_F(SafeTensorsTest, RefusesShapesWhoseProductOverflows) {
  for (const std::string shape :
       {"[9223372036854775807]", "[4294967296,4294967296]", "[4611686018427387910]",
        "[2305843009213693958]", "[4294967296,4294967296,0]", "[3,6148914691236517207]"}) {
    expect_bad_header(R"({"a":)" + entry("F32", shape, "[0,24]") + "}", kData, "shape: expected");
  }
}

TEST_F(SafeTensorsTest, RefusesBadOffsets) {
  for (const std::string offsets :
       {"[0]", "[]", "[0,24,24]", "[24,0]", "[0,25]", "[1,25]", "[-1,23]", "[0.0,24]", "[0,\"24\"]",
        "24", "null", "{}", "[18446744073709551592,18446744073709551615]",
        "[9223372036854775800,9223372036854775807]"}) {
    expect_bad_header(R"({"a":)" + entry("F32", "[6]", offsets) + "}", kData,
                      "data_offsets: expected");
  }
  for (const std::string offsets : {"[0,20]", "[0,23]", "[0,0]", "[4,24]"}) {
    expect_bad_header(R"({"a":)" + entry("F32", "[6]", offsets) + "}", kData,
                      "expected the 24 bytes of its shape");
  }
}

TEST_F(SafeTensorsTest, RefusesOverlapsAndHoles) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":)" + entry("F32", "[3]", first) + R"(,"b":)" + entry("F32", "[3]", second) + "}";
  };
  expect_bad_header(two("[0,12]", "[0,12]"), kData.substr(0, 12), "overlap");
  expect_bad_header(two("[0,12]", "[8,20]"), kData.substr(0, 20), "overlap");
  expect_bad_header(two("[8,20]", "[0,12]"), kData.substr(0, 20), "overlap");
  expect_bad_header(two("[0,12]", "[12,24]"), kData + "more", "bytes of data");
  expect_bad_header(two("[4,16]", "[16,28]"), kData + "more", "hole");
  expect_bad_header(two("[0,12]", "[16,28]"), kData + "more", "hole");
  expect_bad_header(
      R"({"a":)" + entry("F32", "[0]", "[4,4]") + R"(,"b":)" + entry("F32", "[6]", "[0,24]") + "}",
      kData, "overlap");
  expect_bad_header("{}", kData, "expected 0 bytes of data, found 24");
  // In any order of the header, what covers the data is fine.
  EXPECT_EQ(
      SafeTensors::open(write_bytes(file_of(two("[12,24]", "[0,12]"), kData))).tensors().size(),
      2U);
}

TEST_F(SafeTensorsTest, QuotesLittleOfAHostileFile) {
  const std::string name(1'000'000, 'n');
  expect_bad_header(R"({")" + name + R"(":{"dtype":4}})", "", "...");
  expect_bad_header(R"({"a":{"dtype":"F32","shape":")" + name + R"("}})", "", "...");
}

TEST_F(SafeTensorsTest, NamesWhatItCannotOpen) {
  for (const std::filesystem::path& missing : {path("none"), directory_, path("no/file")}) {
    try {
      const SafeTensors file = SafeTensors::open(missing);
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNotFound);
      EXPECT_EQ(std::string(error.what()).find(missing.string()), 0U) << error.what();
    }
  }
}

TEST_F(SafeTensorsTest, MissingTensorListsTheNames) {
  const SafeTensors file = SafeTensors::open(write_bytes(file_of(kGoodHeader, kData)));
  try {
    static_cast<void>(file.at("c"));
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_NE(std::string(error.what()).find("'c', found: a, b"), std::string::npos)
        << error.what();
  }
}

TEST_F(SafeTensorsTest, ChecksDtypeAndShapeOnRequest) {
  const SafeTensors file = SafeTensors::open(write_bytes(file_of(kGoodHeader, kData)));

  EXPECT_EQ(file.at("a", DType::kFloat32, {2, 2}).bytes, 16U);
  EXPECT_EQ(file.at("a", DType::kFloat32, {-1, 2}).bytes, 16U);
  EXPECT_EQ(file.at("a", DType::kFloat32, {-1, -1}).bytes, 16U);
  const std::vector<std::pair<DType, std::vector<std::int64_t>>> wrong = {
      {DType::kInt32, {2, 2}},      {DType::kFloat32, {2, 3}}, {DType::kFloat32, {4}},
      {DType::kFloat32, {2, 2, 1}}, {DType::kFloat32, {-1}},   {DType::kFloat32, {}}};
  for (const auto& [dtype, shape] : wrong) {
    try {
      static_cast<void>(file.at("a", dtype, shape));
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("found fp32 [2, 2]"), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace kvtier::formats
