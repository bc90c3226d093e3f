#pragma once

#include "kvtier/engine.h"
#include "kvtier/tensor.h"

#include "services/client/data_call.h"
#include "services/client/device_memories.h"
#include "services/wire/each_tensor.h"
#include "services/wire/rpc.h"

#include <cstdint>
#include <string>
#include <vector>

/// The tensors of calls: checked, sent beside a message or in it, and taken from a reply. Checks
/// throw `kInvalidArgument` with the field; what a tensor means is the server's to check.
/// `memories` are those that device tensors may lie in.
namespace kvtier::services {

/// An argument, of an item of a batch where `item` is not below 0.
struct Field {
  const char* name = "";
  int item = -1;
  [[nodiscard]] std::string text() const;
};

/// Throws unless `view` is memory that a call can send, of rank 1 to 4 with dense rows.
void check_readable(const Field& field, const TensorView& view, const DeviceMemories& memories);
/// Checks what is refused in any case, before a step is stored: outputs that do not have the shapes
/// of the query's, and those that are not to be had over a service (`kUnimplemented`).
void check_attention(int item, const TensorView& query, const AttendOutputs& outputs,
                     const DeviceMemories& memories);
/// Checks the ids and the outputs of a fetch. The number of rows is that of the ids.
void check_fetch(int item, const TensorView& tokens, const FetchOutputs& outputs,
                 const DeviceMemories& memories);

/// Copies a tensor of a reply, unless the server has written it in its place; an empty view takes
/// none.
void take(const v1::Tensor& message, const Field& field, const MutableTensorView& view,
          const DeviceMemories& memories);
/// Those of an `AttendResponse` or a `DecodeResponse`.
template <typename Response>
void take(const Response& response, int item, const AttendOutputs& outputs,
          const DeviceMemories& memories) {
  take(response.out(), Field{"out", item}, outputs.out, memories);
  take(response.lse(), Field{"lse", item}, outputs.lse, memories);
  take(response.missed(), Field{"missed", item}, outputs.missed, memories);
}

/// Rows [first, first + count).
[[nodiscard]] TensorView rows_of(TensorView view, std::int64_t first, std::int64_t count);
/// Columns [first, first + count) of dimension 1.
[[nodiscard]] TensorView columns_of(TensorView view, std::int64_t first, std::int64_t count);
[[nodiscard]] MutableTensorView columns_of(MutableTensorView view, std::int64_t first,
                                           std::int64_t count);

/// The tensors of one request, and the room that those of its reply need. Views and messages live
/// as long.
class RequestTensors {
 public:
  explicit RequestTensors(const DeviceMemories& memories) : memories_(memories) {}

  [[nodiscard]] const DeviceMemories& memories() const noexcept { return memories_; }
  /// Adds a tensor, in the order in which they stand in the request. Throws as `check_readable`.
  void add(const Field& field, const TensorView& view, v1::Tensor& message);
  /// Adds `selected` and `bias` of `inputs`, each unless it is empty. Throws as `add`.
  template <typename Inputs, typename Request>
  void add_optional(int item, const Inputs& inputs, Request& request) {
    if (!inputs.selected.empty()) {
      add({"selected", item}, inputs.selected, *request.mutable_selected());
    }
    if (!inputs.bias.empty()) add({"bias", item}, inputs.bias, *request.mutable_bias());
  }
  /// Room for ids, scores and biases, of which the server knows the number; of a batch, at most a
  /// reply's.
  void add_selection() noexcept;
  /// Room for what is attended for a query, or its place in device memory.
  template <typename Request>
  void add_attention(const TensorView& query, const AttendOutputs& outputs, Request& request) {
    const auto out = memories_.place_of(outputs.out);
    const auto lse = memories_.place_of(outputs.lse);
    if (out) *request.mutable_out_memory() = *out;
    if (lse) *request.mutable_lse_memory() = *lse;
    if (!out || !lse) output_bytes_ += output_bytes_for(tensor_bytes(query));
    if (outputs.missed.empty()) return;
    request.set_with_missed(true);
    output_bytes_ += missed_bytes_for(tensor_bytes(query));
  }
  /// Room for the rows that `outputs` have.
  void add_rows(const FetchOutputs& outputs);

  /// Puts the bytes into the messages, as gRPC takes them.
  void fill() const;
  /// Puts them where the data plane takes them. Returns false when there is no room.
  [[nodiscard]] bool add_to(DataCall& call) const;

 private:
  struct Slot {
    v1::Tensor* message;
    TensorView view;
    CopyBytes copy;
  };

  const DeviceMemories& memories_;
  std::vector<Slot> slots_;
  std::uint64_t output_bytes_ = 0;
};

/// Makes a call over the data plane; the reply is filled as that of gRPC. Returns false, with
/// nothing sent, when the tensors do not fit, and throws as `DataChannel`.
template <typename Request, typename Response>
[[nodiscard]] bool call_over(DataChannel& channel, const Request& request,
                             const RequestTensors& tensors, Response& response) {
  DataCall call(channel, method_of<Request>());
  if (!tensors.add_to(call) || !call.run(request, response)) return false;
  each_tensor(response, [&call](v1::Tensor& tensor) {
    if (tensor.has_memory()) return;
    const std::span<const std::byte> bytes = call.next_tensor();
    tensor.set_data(bytes.data(), bytes.size());
  });
  return true;
}

}  // namespace kvtier::services
