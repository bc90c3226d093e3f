#include "kvtier/tensor.h"

#include "kvtier/error.h"

#include "transfer/device/device.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace kvtier {
namespace {

TEST(TensorView, DescribesDtypeAndShape) {
  const float data[1] = {};

  EXPECT_EQ(describe(TensorView(data, DType::kBFloat16, {5, 2, 128})), "bf16 [5, 2, 128]");
  EXPECT_EQ(describe(TensorView(data, DType::kFloat32, {})), "fp32 []");
  EXPECT_EQ(describe(TensorView(data, DType::kFloat16, {1, 2, 3, 4})), "fp16 [1, 2, 3, 4]");
  EXPECT_EQ(describe(TensorView(data, DType::kInt32, {1, 2, 3, 4, 5, 6})),
            "int32 [1, 2, 3, 4, ...]");
  EXPECT_EQ(describe(TensorView()), "no tensor");
}

TEST(TensorView, IsDenseRowMajorByDefault) {
  float data[1] = {};
  const MutableTensorView view(data, DType::kFloat32, {5, 2, 128});
  const TensorView read_only = view;

  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{256, 128, 1, 0}));
  EXPECT_EQ(read_only.strides, view.strides);
  EXPECT_EQ(read_only.data, view.data);
}

TEST(DType, HasBytesAndName) {
  EXPECT_EQ(dtype_bytes(DType::kFloat32), 4U);
  EXPECT_EQ(dtype_bytes(DType::kFloat16), 2U);
  EXPECT_EQ(dtype_bytes(DType::kBFloat16), 2U);
  EXPECT_EQ(dtype_bytes(DType::kInt32), 4U);
  EXPECT_EQ(dtype_name(DType::kFloat32), "fp32");
  EXPECT_EQ(dtype_name(DType::kFloat16), "fp16");
  EXPECT_EQ(dtype_name(DType::kBFloat16), "bf16");
  EXPECT_EQ(dtype_name(DType::kInt32), "int32");
}

TEST(Error, KeepsCodeAndMessage) {
  const Error error(ErrorCode::kDataLoss, "expected 2, found 1");

  EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
  EXPECT_STREQ(error.what(), "expected 2, found 1");
}

TEST(Error, CodesHaveTheCanonicalNames) {
  EXPECT_EQ(error_code_name(ErrorCode::kCancelled), "CANCELLED");
  EXPECT_EQ(error_code_name(ErrorCode::kInvalidArgument), "INVALID_ARGUMENT");
  EXPECT_EQ(error_code_name(ErrorCode::kDeadlineExceeded), "DEADLINE_EXCEEDED");
  EXPECT_EQ(error_code_name(ErrorCode::kNotFound), "NOT_FOUND");
  EXPECT_EQ(error_code_name(ErrorCode::kResourceExhausted), "RESOURCE_EXHAUSTED");
  EXPECT_EQ(error_code_name(ErrorCode::kFailedPrecondition), "FAILED_PRECONDITION");
  EXPECT_EQ(error_code_name(ErrorCode::kAborted), "ABORTED");
  EXPECT_EQ(error_code_name(ErrorCode::kUnimplemented), "UNIMPLEMENTED");
  EXPECT_EQ(error_code_name(ErrorCode::kInternal), "INTERNAL");
  EXPECT_EQ(error_code_name(ErrorCode::kUnavailable), "UNAVAILABLE");
  EXPECT_EQ(error_code_name(ErrorCode::kDataLoss), "DATA_LOSS");
}

TEST(Task, MovesItsCallableAndDestroysItOnce) {
  auto alive = std::make_shared<int>(0);
  transfer::Task task([alive] { ++*alive; });
  EXPECT_EQ(alive.use_count(), 2);

  transfer::Task moved(std::move(task));
  moved();
  EXPECT_TRUE(task.empty());  // NOLINT(bugprone-use-after-move): a moved-from task is empty
  EXPECT_EQ(alive.use_count(), 2);

  moved = transfer::Task([] {});
  EXPECT_EQ(*alive, 1);
  EXPECT_EQ(alive.use_count(), 1);
}

TEST(Task, HoldsOnlyMovableState) {
  int result = 0;
  transfer::Task task([value = std::make_unique<int>(7), &result] { result = *value; });
  transfer::Task moved;

  EXPECT_TRUE(moved.empty());
  moved = std::move(task);
  moved();

  EXPECT_EQ(result, 7);
}

}  // namespace
}  // namespace kvtier
