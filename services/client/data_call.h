#pragma once

#include "kvtier/tensor.h"
#include "kvtier/v1/tensor.pb.h"

#include "services/client/data_channel.h"
#include "services/wire/to_message.h"

#include <google/protobuf/message_lite.h>

#include <cstdint>

namespace kvtier::services {

/// One call of AttentionService over a channel: its tensors go to the staging region, or into the
/// frame where memory is not shared. Add the tensors in the order in which they stand in the
/// request, then run, then take those of the reply in theirs.
class DataCall {
 public:
  DataCall(DataChannel& channel, Method method) : channel_(channel) { body_.method = method; }

  /// Copies a tensor, and gives `message` its dtype and shape. Returns false when there is no room:
  /// the call must go another way then.
  [[nodiscard]] bool add(const TensorView& view, v1::Tensor& message, const CopyBytes& copy = {});
  /// Makes room for the reply, as `output_bytes_for` says for attention. Returns as `add`.
  [[nodiscard]] bool reserve_output(std::uint64_t bytes);
  /// Returns as `add`, and throws as `DataChannel`.
  [[nodiscard]] bool run(const google::protobuf::MessageLite& request,
                         google::protobuf::MessageLite& response);
  /// The bytes of the reply's next tensor.
  [[nodiscard]] std::span<const std::byte> next_tensor();

 private:
  [[nodiscard]] bool shares() const { return !channel_.staging().empty(); }

  DataChannel& channel_;
  CallBody body_;
  ReplyBody reply_;
  DataChannel::Frame frame_;
  Bytes payload_;  ///< Without shared memory.
  std::uint64_t used_ = 0;
  std::size_t taken_ = 0;
};

}  // namespace kvtier::services
