#include "kvtier/client.h"

#include "services/client/client_impl.h"

#include <utility>

namespace kvtier {
namespace {

namespace v1 = ::kvtier::v1;

constexpr std::int64_t kStagingBytes = 4096;  // no tensor goes over this connection

template <std::size_t N>
std::string text_of(const std::array<std::byte, N>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), N};
}

}  // namespace

/// The memory is the server's for as long as an attachment of its own is connected.
class SharedDeviceMemory::Impl {
 public:
  Impl(std::shared_ptr<Client::Impl> client, ClientDeviceMemory memory)
      : client_(std::move(client)) {
    auto shared = std::make_shared<services::ClientMemory>();
    shared->data = static_cast<std::byte*>(memory.data);
    shared->bytes = memory.bytes;
    shared->copy = std::move(memory.copy);
    try {
      shared->region = region_of(memory);
    } catch (const ClientError& error) {
      refusal_ = error;
      end();
    }
    memory_ = std::move(shared);
    client_->memories.add(memory_);
  }
  ~Impl() {
    client_->memories.remove(memory_.get());
    end();
  }
  Impl(const Impl&) = delete;  // ends an attachment
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const std::optional<ClientError>& refusal() const noexcept { return refusal_; }

 private:
  std::string region_of(const ClientDeviceMemory& memory) {
    attached_ = client_->channels.attach(kStagingBytes);
    if (attached_.channel == nullptr) {
      throw ClientError(ErrorCode::kUnimplemented, "expected a server with a data plane",
                        "NO_DATA_PLANE");
    }
    v1::ShareDeviceMemoryRequest request;
    request.set_attachment(attached_.attachment);
    request.set_cuda_ipc_handle(text_of(memory.handle.ipc));
    request.set_device_uuid(text_of(memory.handle.device));
    request.set_bytes(static_cast<std::int64_t>(memory.bytes));
    return client_->connection.call_once<v1::ShareDeviceMemoryResponse>(request).region();
  }

  /// Waits until the server has let the memory go: its end of the connection would do so later.
  void end() noexcept {
    if (attached_.channel == nullptr) return;
    v1::DeleteAttachmentRequest request;
    request.set_name(attached_.attachment);
    client_->connection.end<v1::DeleteAttachmentResponse>(request);
    attached_.channel.reset();
  }

  std::shared_ptr<Client::Impl> client_;
  services::ChannelPool::Attached attached_;
  std::optional<ClientError> refusal_;
  std::shared_ptr<const services::ClientMemory> memory_;
};

SharedDeviceMemory Client::share(ClientDeviceMemory memory) {
  if (memory.data == nullptr || memory.bytes == 0 || !memory.copy) {
    throw Error(ErrorCode::kInvalidArgument,
                "memory: expected an allocation and a function that copies, found none");
  }
  return SharedDeviceMemory(std::make_unique<SharedDeviceMemory::Impl>(impl_, std::move(memory)));
}

SharedDeviceMemory::SharedDeviceMemory(std::unique_ptr<Impl> impl) noexcept
    : impl_(std::move(impl)) {}
SharedDeviceMemory::~SharedDeviceMemory() = default;
SharedDeviceMemory::SharedDeviceMemory(SharedDeviceMemory&&) noexcept = default;
SharedDeviceMemory& SharedDeviceMemory::operator=(SharedDeviceMemory&&) noexcept = default;
const std::optional<ClientError>& SharedDeviceMemory::refusal() const noexcept {
  return impl_->refusal();
}

}  // namespace kvtier
