#include "services/client/request_tensors.h"

#include "include/types/failure.h"
#include "services/wire/to_message.h"

#include <algorithm>

namespace kvtier::services {
namespace {

constexpr std::uint64_t kSelectionBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kReplyBytes = std::uint64_t{4} << 20;
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 16;  ///< Of heads, and of a row.

/// Throws, with the field.
template <typename... Parts>
[[noreturn]] void invalid(const Field& field, const Parts&... parts) {
  throw_error(ErrorCode::kInvalidArgument, field.text(), ": expected ", parts...);
}

/// Checks an output whose shape is the first `rank` extents of the query's. An empty one is not
/// wanted.
void check_output(const Field& field, const MutableTensorView& view, const TensorView& query,
                  int rank, DType dtype, const DeviceMemories& memories) {
  if (view.empty()) return;
  check_readable(field, view, memories);
  TensorView expected = query;
  expected.dtype = dtype;
  expected.rank = rank;
  const bool fits = view.rank == rank && view.dtype == dtype &&
                    std::equal(view.shape.begin(), view.shape.begin() + rank, query.shape.begin());
  if (fits) return;
  invalid(field, describe(expected), ", found ", describe(view));
}

template <typename View, typename Byte>
View part_of(View view, std::size_t dimension, std::int64_t first, std::int64_t count) {
  view.data = static_cast<Byte*>(view.data) +
              first * view.strides[dimension] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  view.shape[dimension] = count;
  return view;
}

}  // namespace

std::string Field::text() const { return item < 0 ? name : join("items[", item, "].", name); }

void check_readable(const Field& field, const TensorView& view, const DeviceMemories& memories) {
  if (view.empty() || view.rank < 1 || view.rank > kMaxTensorRank) {
    invalid(field, "a tensor of rank 1 to 4, found ", view.empty() ? "none" : describe(view));
  }
  const auto last = static_cast<std::size_t>(view.rank) - 1;
  const bool dense_rows = view.shape[last] <= 1 || view.strides[last] == 1;
  const bool extents = std::all_of(view.shape.begin(), view.shape.begin() + view.rank,
                                   [](std::int64_t extent) { return extent >= 0; });
  const bool there = view.space == MemorySpace::kHost || memories.of(view) != nullptr;
  if (!there || !dense_rows || !extents) {
    invalid(field,
            "host memory with rows that are dense, or device memory that the client shares, found ",
            describe(view));
  }
}

void check_attention(int item, const TensorView& query, const AttendOutputs& outputs,
                     const DeviceMemories& memories) {
  if (!outputs.selected.empty()) {
    throw Error(ErrorCode::kUnimplemented,
                "selected: ids are returned by select, expected no output");
  }
  check_readable({"query", item}, query, memories);
  if (outputs.out.dtype != query.dtype) {
    invalid({"out", item}, "the dtype of the query, ", dtype_name(query.dtype), ", found ",
            dtype_name(outputs.out.dtype));
  }
  if (query.rank != 3) return;  // the server refuses it
  check_output({"out", item}, outputs.out, query, 3, query.dtype, memories);
  check_output({"lse", item}, outputs.lse, query, 2, DType::kFloat32, memories);
  check_output({"missed", item}, outputs.missed, query, 2, DType::kFloat32, memories);
}

void check_fetch(int item, const TensorView& tokens, const FetchOutputs& outputs,
                 const DeviceMemories& memories) {
  check_readable({"tokens", item}, tokens, memories);
  if (tokens.rank != 2) {
    invalid({"tokens", item}, "[kv_heads, n], found ", describe(tokens));
  }
  const auto check = [&](const char* name, const MutableTensorView& view) {
    check_readable({name, item}, view, memories);
    const bool fits = view.rank == 3 && view.shape[0] == tokens.shape[0] &&
                      view.shape[1] == tokens.shape[1] && view.shape[0] > 0 && view.shape[2] > 0 &&
                      view.shape[0] <= kMaxExtent && view.shape[2] <= kMaxExtent;
    if (fits) return;
    invalid({name, item}, "[", tokens.shape[0], ", ", tokens.shape[1], ", head_dim], found ",
            describe(view));
  };
  check("keys", outputs.keys);
  check("values", outputs.values);
}

void take(const v1::Tensor& message, const Field& field, const MutableTensorView& view,
          const DeviceMemories& memories) {
  if (view.empty() || message.has_memory()) return;
  check_readable(field, view, memories);
  const std::shared_ptr<const ClientMemory> memory = memories.of(view);
  if (copy_back(message, view, memory ? memory->copy : CopyBytes())) return;
  std::string shape = "[";
  for (const std::int64_t extent : message.shape()) {
    shape += (shape.size() == 1 ? "" : ", ") + std::to_string(extent);
  }
  invalid(field, "host memory for ", shape, "] of ", v1::DataType_Name(message.dtype()), ", found ",
          describe(view));
}

TensorView rows_of(TensorView view, std::int64_t first, std::int64_t count) {
  return part_of<TensorView, const std::byte>(view, 0, first, count);
}
TensorView columns_of(TensorView view, std::int64_t first, std::int64_t count) {
  return part_of<TensorView, const std::byte>(view, 1, first, count);
}
MutableTensorView columns_of(MutableTensorView view, std::int64_t first, std::int64_t count) {
  return part_of<MutableTensorView, std::byte>(view, 1, first, count);
}

void RequestTensors::add(const Field& field, const TensorView& view, v1::Tensor& message) {
  check_readable(field, view, memories_);
  if (const auto place = memories_.place_of(view)) {
    describe_tensor(view, message);
    *message.mutable_memory() = *place;
    return;
  }
  const std::shared_ptr<const ClientMemory> memory = memories_.of(view);
  slots_.push_back({&message, view, memory ? memory->copy : CopyBytes()});
}

void RequestTensors::add_selection() noexcept {
  output_bytes_ = std::min(output_bytes_ + kSelectionBytes, kReplyBytes);
}

void RequestTensors::add_rows(const FetchOutputs& outputs) {
  output_bytes_ +=
      aligned_bytes(tensor_bytes(outputs.keys)) + aligned_bytes(tensor_bytes(outputs.values));
}

void RequestTensors::fill() const {
  for (const Slot& slot : slots_) {
    copy_tensor(slot.view, *slot.message, slot.copy);
  }
}

bool RequestTensors::add_to(DataCall& call) const {
  for (const Slot& slot : slots_) {
    if (!call.add(slot.view, *slot.message, slot.copy)) return false;
  }
  return call.reserve_output(output_bytes_);
}

}  // namespace kvtier::services
