#include "services/evaluation/trace.h"

#include "kvtier/error.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <gmock/gmock.h>

#include <fstream>
#include <functional>

namespace kvtier::services {
namespace {

class TraceTest : public FolderTest {
 protected:
  void expect_rejected(const TraceValues& tensors, ErrorCode code, const std::string& message) {
    write_trace(file("trace.safetensors"), tensors);
    try {
      static_cast<void>(Trace::open(file("trace.safetensors")));
      ADD_FAILURE() << "expected an error with: " << message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(message));
    }
  }
  /// Expects a rejection after `change` to a good trace.
  void expect_rejected_after(const std::function<void(TraceValues&)>& change, ErrorCode code,
                             const std::string& message) {
    TraceValues tensors = make_layer({}, 1);
    change(tensors);
    expect_rejected(tensors, code, message);
  }
};

void reshape(TensorValues& tensor, std::vector<std::int64_t> shape) {
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  tensor.shape = std::move(shape);
  tensor.values.resize(count);
}

TEST_F(TraceTest, ReadsOneLayer) {
  const TraceValues tensors = make_layer({}, 1);
  write_trace(file("a.safetensors"), tensors);
  const Trace trace = Trace::open(file("a.safetensors"));

  ASSERT_EQ(trace.layers().size(), 1U);
  EXPECT_EQ(trace.layers()[0].name, "0");
  EXPECT_EQ(trace.kv_heads(), 2);
  EXPECT_EQ(trace.query_heads(), 4);
  EXPECT_EQ(trace.head_dim(), 64);
  EXPECT_EQ(trace.context(), 300);
  EXPECT_EQ(trace.steps(), 5);
  EXPECT_EQ(to_float(trace.layers()[0].keys), tensors.at("k").values);
}

TEST_F(TraceTest, NamesTheLayerOfTheRecordedTrace) {
  const Trace trace = Trace::open(recorded_trace());

  EXPECT_EQ(trace.layers()[0].name, "2");
  EXPECT_EQ(trace.context(), 3072);
  EXPECT_EQ(trace.steps(), 36);
}

TEST_F(TraceTest, ReadsLayersInNumericalOrder) {
  TraceValues tensors = make_layer({}, 1, "layers.10.");
  tensors.merge(make_layer({}, 2, "layers.9."));
  write_trace(file("a.safetensors"), tensors);
  const Trace trace = Trace::open(file("a.safetensors"));

  ASSERT_EQ(trace.layers().size(), 2U);
  EXPECT_EQ(trace.layers()[0].name, "9");
  EXPECT_EQ(to_float(trace.layers()[1].queries), tensors.at("layers.10.q").values);
}

TEST_F(TraceTest, ViewsTokensOfHeadMajorTensors) {
  write_trace(file("a.safetensors"), make_layer({}, 1));
  const Trace trace = Trace::open(file("a.safetensors"));
  const formats::Tensor& keys = trace.layers()[0].keys;
  const TensorView view = Trace::by_token(keys, 7, 3);

  EXPECT_EQ(view.shape[0], 3);
  EXPECT_EQ(view.shape[1], 2);
  EXPECT_EQ(view.shape[2], 64);
  const auto* element = static_cast<const std::uint16_t*>(view.data) + 2 * view.strides[0] +
                        1 * view.strides[1] + 5 * view.strides[2];
  EXPECT_EQ(element, keys.as<std::uint16_t>() + (305 + 9) * 64 + 5);
}

TEST_F(TraceTest, ConvertsEveryFloatDType) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    TraceValues tensors = make_layer({}, 1);
    const std::vector<float> values = {0.0F,     -0.0F,    1.0F,           -1.5F,
                                       0x1p-14F, 0x1p-24F, 65536.0F * 0.5F};
    std::copy(values.begin(), values.end(), tensors.at("o").values.begin());
    for (float& x : tensors.at("o").values) x = std::abs(x) < 1e-4F ? x : std::round(x * 4) / 4;
    tensors.at("o").values[4] = 0x1p-14F;
    tensors.at("o").dtype = dtype;
    write_trace(file("a.safetensors"), tensors);

    EXPECT_EQ(to_float(Trace::open(file("a.safetensors")).layers()[0].attention),
              tensors.at("o").values)
        << dtype_name(dtype);
  }
}

TEST_F(TraceTest, RejectsMissingTensors) {
  for (const char* name : {"k", "v", "q", "o"}) {
    expect_rejected_after([&](TraceValues& t) { t.erase(name); }, ErrorCode::kNotFound, name);
  }
  TraceValues tensors = make_layer({}, 1, "layers.0.");
  tensors.erase("layers.0.v");
  expect_rejected(tensors, ErrorCode::kNotFound, "layers.0.v");
}

TEST_F(TraceTest, RejectsShapesAndDTypesThatDoNotFit) {
  const auto invalid = [&](const std::function<void(TraceValues&)>& change,
                           const std::string& message) {
    expect_rejected_after(change, ErrorCode::kInvalidArgument, message);
  };
  invalid([](TraceValues& t) { reshape(t.at("k"), {2, 305 * 64}); }, "tensor k: expected float");
  invalid([](TraceValues& t) { reshape(t.at("v"), {2, 304, 64}); }, "tensor v: expected as k");
  invalid([](TraceValues& t) { t.at("v").dtype = DType::kFloat16; }, "tensor v: expected as k");
  invalid([](TraceValues& t) { t.at("k").dtype = DType::kInt32; }, "tensor k: expected float");
  invalid([](TraceValues& t) { reshape(t.at("q"), {3, 5, 64}); }, "tensor q: expected a multiple");
  invalid([](TraceValues& t) { reshape(t.at("q"), {4, 5, 32}); }, "tensor q: expected a multiple");
  invalid([](TraceValues& t) { reshape(t.at("q"), {4, 306, 64}); }, "at most 305 steps");
  invalid([](TraceValues& t) { reshape(t.at("o"), {4, 4, 64}); }, "tensor o: expected a float");
  invalid([](TraceValues& t) { t.at("o").dtype = DType::kInt32; }, "tensor o: expected a float");
}

TEST_F(TraceTest, RejectsLayersThatDiffer) {
  TraceValues tensors = make_layer({}, 1, "layers.0.");
  tensors.merge(make_layer({.context = 299}, 2, "layers.1."));
  expect_rejected(tensors, ErrorCode::kInvalidArgument,
                  "layers.1.k: expected as in the first layer");
  tensors = make_layer({}, 1, "layers.0.");
  tensors.merge(make_layer({.context = 301, .steps = 4}, 2, "layers.1."));
  expect_rejected(tensors, ErrorCode::kInvalidArgument,
                  "layers.1.q: expected as in the first layer");
}

TEST_F(TraceTest, RejectsATruncatedFile) {
  write_trace(file("a.safetensors"), make_layer({}, 1));
  std::filesystem::resize_file(file("a.safetensors"),
                               std::filesystem::file_size(file("a.safetensors")) - 2);
  try {
    static_cast<void>(Trace::open(file("a.safetensors")));
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
  }
}

}  // namespace
}  // namespace kvtier::services
