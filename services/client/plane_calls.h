#pragma once

#include "kvtier/engine.h"
#include "kvtier/v1/attention.pb.h"

#include "services/client/data_channel.h"

#include <cstdint>

/// The calls of a session over the data plane. Requests come without tensors; replies are filled as
/// those of gRPC. Each returns false, with nothing sent, when its tensors do not fit, and throws as
/// `DataChannel`.
namespace kvtier::services {

/// Stores rows `[first, first + count)`.
[[nodiscard]] bool append_over(DataChannel& channel, v1::AppendRequest request,
                               const TensorView& keys, const TensorView& values, std::int64_t first,
                               std::int64_t count, v1::AppendResponse& response);
[[nodiscard]] bool select_over(DataChannel& channel, v1::SelectRequest request,
                               const TensorView& query, v1::SelectResponse& response);
[[nodiscard]] bool attend_over(DataChannel& channel, v1::AttendRequest request,
                               const AttendInputs& inputs, v1::AttendResponse& response);
[[nodiscard]] bool decode_over(DataChannel& channel, v1::DecodeRequest request,
                               const DecodeInputs& inputs, v1::DecodeResponse& response);
/// `row_bytes`: of each of the reply's two tensors, in all.
[[nodiscard]] bool fetch_over(DataChannel& channel, v1::FetchRequest request,
                              const TensorView& tokens, std::uint64_t row_bytes,
                              v1::FetchResponse& response);

}  // namespace kvtier::services
