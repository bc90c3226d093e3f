#include "services/client/plane_calls.h"

#include "services/client/data_call.h"

namespace kvtier::services {
namespace {

/// Room for the ids and scores of a selection, of which the client does not know the size.
constexpr std::uint64_t kSelectionBytes = std::uint64_t{2} << 20;

bool add_all(DataCall& call, const TensorView& view, v1::Tensor& message) {
  return call.add(view, 0, view.shape[0], message);
}

void take(DataCall& call, v1::Tensor& message) {
  const std::span<const std::byte> bytes = call.next_tensor();
  message.set_data(bytes.data(), bytes.size());
}

std::uint64_t output_of(const TensorView& query) {
  std::uint64_t bytes = dtype_bytes(query.dtype);
  for (int i = 0; i < query.rank; ++i) {
    bytes *= static_cast<std::uint64_t>(query.shape[static_cast<std::size_t>(i)]);
  }
  return output_bytes_for(bytes);
}

}  // namespace

bool append_over(DataChannel& channel, v1::AppendRequest request, const TensorView& keys,
                 const TensorView& values, std::int64_t first, std::int64_t count,
                 v1::AppendResponse& response) {
  DataCall call(channel, Method::kAppend);
  if (!call.add(keys, first, count, *request.mutable_key()) ||
      !call.add(values, first, count, *request.mutable_value())) {
    return false;
  }
  call.run(request, response);
  return true;
}

bool select_over(DataChannel& channel, v1::SelectRequest request, const TensorView& query,
                 v1::SelectResponse& response) {
  DataCall call(channel, Method::kSelect);
  if (!add_all(call, query, *request.mutable_query()) || !call.reserve_output(kSelectionBytes)) {
    return false;
  }
  call.run(request, response);
  take(call, *response.mutable_ids());
  if (response.has_scores()) take(call, *response.mutable_scores());
  return true;
}

bool attend_over(DataChannel& channel, v1::AttendRequest request, const AttendInputs& inputs,
                 v1::AttendResponse& response) {
  DataCall call(channel, Method::kAttend);
  if (!add_all(call, inputs.query, *request.mutable_query())) return false;
  if (!inputs.selected.empty() && !add_all(call, inputs.selected, *request.mutable_selected())) {
    return false;
  }
  if (!call.reserve_output(output_of(inputs.query))) return false;
  call.run(request, response);
  take(call, *response.mutable_out());
  take(call, *response.mutable_lse());
  return true;
}

bool decode_over(DataChannel& channel, v1::DecodeRequest request, const DecodeInputs& inputs,
                 v1::DecodeResponse& response) {
  DataCall call(channel, Method::kDecode);
  if (!add_all(call, inputs.query, *request.mutable_query()) ||
      !add_all(call, inputs.key, *request.mutable_key()) ||
      !add_all(call, inputs.value, *request.mutable_value())) {
    return false;
  }
  if (!inputs.selected.empty() && !add_all(call, inputs.selected, *request.mutable_selected())) {
    return false;
  }
  if (!call.reserve_output(output_of(inputs.query))) return false;
  call.run(request, response);
  take(call, *response.mutable_out());
  take(call, *response.mutable_lse());
  return true;
}

bool fetch_over(DataChannel& channel, v1::FetchRequest request, const TensorView& tokens,
                std::uint64_t row_bytes, v1::FetchResponse& response) {
  DataCall call(channel, Method::kFetch);
  if (!add_all(call, tokens, *request.mutable_tokens()) ||
      !call.reserve_output(2 * aligned_bytes(row_bytes))) {
    return false;
  }
  call.run(request, response);
  take(call, *response.mutable_key());
  take(call, *response.mutable_value());
  return true;
}

}  // namespace kvtier::services
