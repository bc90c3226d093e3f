#include "services/client/data_call.h"

namespace kvtier::services {

bool DataCall::add(const TensorView& view, v1::Tensor& message, const CopyBytes& copy) {
  const std::uint64_t bytes = describe_tensor(view, message);
  const std::uint64_t room = shares() ? channel_.staging().size() : kMaxPayloadBytes;
  if (bytes > kMaxPayloadBytes || !lies_within({used_, bytes}, room) ||
      body_.tensors.size() == kMaxDescriptors) {
    return false;
  }
  std::byte* to = nullptr;
  if (shares()) {
    to = channel_.staging().data() + used_;
  } else {
    payload_.resize(used_ + bytes);
    to = payload_.data() + used_;
  }
  if (bytes > 0) copy_tensor(view, to, copy);
  body_.tensors.push_back({used_, bytes});
  used_ += aligned_bytes(bytes);
  return true;
}

bool DataCall::reserve_output(std::uint64_t bytes) {
  if (!shares()) return true;
  if (!lies_within({used_, bytes}, channel_.staging().size())) return false;
  body_.output = {used_, bytes};
  used_ += bytes;
  return true;
}

bool DataCall::run(const google::protobuf::MessageLite& request,
                   google::protobuf::MessageLite& response) {
  body_.message = request.SerializeAsString();
  body_.timeout_ms = static_cast<std::uint32_t>(
      std::min<std::int64_t>(channel_.options().timeout.count(), 0xFFFFFFFF));
  const Bytes control = encode(body_);
  if (control.size() > kMaxControlBytes) return false;
  const iovec payload{payload_.data(), payload_.size()};
  const std::uint64_t id =
      channel_.send(FrameType::kCall, shares() ? 0U : kInline, control, {&payload, 1});
  frame_ = channel_.reply_to(id);
  reply_ = decode_reply(frame_.control());
  if (!response.ParseFromString(reply_.message)) {
    throw ClientError(ErrorCode::kInternal, "data plane: expected a reply of the method", "");
  }
  return true;
}

std::span<const std::byte> DataCall::next_tensor() {
  const std::span<const std::byte> from =
      shares() ? std::span<const std::byte>(channel_.staging()) : frame_.payload();
  if (taken_ >= reply_.tensors.size() || !lies_within(reply_.tensors[taken_], from.size())) {
    throw ClientError(ErrorCode::kInternal, "data plane: expected another tensor in the reply", "");
  }
  const Extent& extent = reply_.tensors[taken_++];
  return from.subspan(extent.offset, extent.bytes);
}

}  // namespace kvtier::services
