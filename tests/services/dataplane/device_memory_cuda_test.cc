#include "services/client/data_call.h"
#include "support/device_exporter_cuda.h"
#include "tests/services/dataplane/plane_fixture.h"

#include <gmock/gmock.h>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

/// A data plane over engines of the GPU, and a client whose tensors lie in memory that it has
/// allocated there, in a process of its own.
class PlaneCudaMemory : public PlaneTest {
 protected:
  static constexpr std::size_t kBytes = 8 << 20;
  static constexpr std::int64_t kOut = 4 << 20;
  static constexpr std::int64_t kLse = 5 << 20;

  void SetUp() override {
    PlaneTest::SetUp();
    ServiceCoreOptions core = small_options();
    core.models.backend = Backend::kCuda;
    core.models.memory.device_bytes = 256 * MiB;
    DataPlaneOptions options;
    options.listen = {parse_endpoint(socket())};
    options.open_device_memory = [](const DeviceMemoryHandle& handle, std::size_t bytes) {
      return open_device_memory(Backend::kCuda, handle, bytes);
    };
    try {
      client_ = std::make_unique<kvtier::testing::DeviceExporter>(kBytes);
    } catch (const std::runtime_error& error) {
      GTEST_SKIP() << error.what();
    }
    start(std::move(core), std::move(options));
    const Attachments::Created created = plane_->attachments().create(tenant(), 0, 1 << 20);
    attachment_ = created.name;
    channel_ = std::make_unique<DataChannel>(DataChannelOptions{
        .endpoint = plane_->endpoints()[0].text(), .token = created.token, .tls = {}});
    v1::ShareDeviceMemoryResponse response;
    plane_->share_device_memory(tenant(), request_for(client_->handle()), response);
    region_ = response.region();
  }
  void TearDown() override {
    channel_.reset();
    PlaneTest::TearDown();
  }
  [[nodiscard]] v1::ShareDeviceMemoryRequest request_for(const DeviceMemoryHandle& handle) const {
    v1::ShareDeviceMemoryRequest request;
    request.set_attachment(attachment_);
    request.set_cuda_ipc_handle(handle.ipc.data(), handle.ipc.size());
    request.set_device_uuid(handle.device.data(), handle.device.size());
    request.set_bytes(kBytes);
    return request;
  }
  void name(v1::DeviceMemory& place, std::int64_t offset) const {
    place.set_region(region_);
    place.set_offset(offset);
  }
  /// Moves the bytes of a tensor to the client's memory.
  void move(v1::Tensor& tensor, std::int64_t offset) {
    client_->write(static_cast<std::uint64_t>(offset), std::as_bytes(std::span(tensor.data())));
    tensor.clear_data();
    name(*tensor.mutable_memory(), offset);
  }
  void append(const std::string& session, v1::AppendRequest request, bool there) {
    request.set_session(session);
    v1::AppendResponse response;
    if (there) {
      move(*request.mutable_key(), 0);
      move(*request.mutable_value(), 2 << 20);
      DataCall call(*channel_, Method::kAppend);
      ASSERT_TRUE(call.run(request, response));
      return;
    }
    std::promise<std::string> reason;
    core_->run_in(session, {.tenant = &tenant()}, request, response,
                  [&](const ServiceError* error) {
                    reason.set_value(error == nullptr ? "OK" : error->what());
                  });
    ASSERT_EQ(await(reason), "OK");
  }
  v1::DecodeResponse decode_here(v1::DecodeRequest request) {
    v1::DecodeResponse response;
    std::promise<std::string> reason;
    core_->run({.tenant = &tenant()}, request, response, [&](const ServiceError* error) {
      reason.set_value(error == nullptr ? "OK" : error->what());
    });
    EXPECT_EQ(await(reason), "OK");
    return response;
  }
  [[nodiscard]] std::string client_bytes(std::int64_t offset, std::size_t count) {
    const std::vector<std::byte> bytes = client_->read(static_cast<std::uint64_t>(offset), count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  std::unique_ptr<kvtier::testing::DeviceExporter> client_;
  std::unique_ptr<DataChannel> channel_;
  std::string attachment_, region_;
};

TEST_F(PlaneCudaMemory, HasTheTensorsOfAClientInAnotherProcess) {
  const std::string ours = open_session();
  const std::string theirs = open_session();
  for (int layer = 0; layer < kLayers; ++layer) {
    const v1::AppendRequest chunk = append_request(layer, 600, 5);
    append(ours, chunk, true);
    append(theirs, chunk, false);
  }
  for (std::uint64_t step = 1; step <= 8; ++step) {
    const int layer = static_cast<int>(step) % kLayers;
    const auto number = static_cast<std::int64_t>(step);
    v1::DecodeRequest request = decode_request(ours, layer, number, 10 * step);
    move(*request.mutable_query(), 0);
    move(*request.mutable_key(), 1 << 20);
    move(*request.mutable_value(), 2 << 20);
    name(*request.mutable_out_memory(), kOut);
    name(*request.mutable_lse_memory(), kLse);
    DataCall call(*channel_, Method::kDecode);
    v1::DecodeResponse response;
    ASSERT_TRUE(call.run(request, response));

    const v1::DecodeResponse expected =
        decode_here(decode_request(theirs, layer, number, 10 * step));
    EXPECT_EQ(client_bytes(kOut, expected.out().data().size()), expected.out().data()) << step;
    EXPECT_EQ(client_bytes(kLse, expected.lse().data().size()), expected.lse().data()) << step;
  }
}

TEST_F(PlaneCudaMemory, RefusesWhatCannotBeMapped) {
  DeviceMemoryHandle handle = client_->handle();
  v1::ShareDeviceMemoryResponse response;
  const auto refusal = [&](const v1::ShareDeviceMemoryRequest& request) -> std::string {
    try {
      plane_->share_device_memory(tenant(), request, response);
    } catch (const ServiceError& error) {
      return error.reason();
    }
    return "OK";
  };
  handle.device[0] ^= std::byte{1};
  EXPECT_EQ(refusal(request_for(handle)), "OTHER_DEVICE");
  handle = client_->handle();
  handle.ipc.fill(std::byte{0xFF});
  EXPECT_EQ(refusal(request_for(handle)), "HANDLE_REFUSED");
  v1::ShareDeviceMemoryRequest larger = request_for(client_->handle());
  larger.set_bytes(std::int64_t{1} << 40);
  EXPECT_EQ(refusal(larger), "INVALID_ARGUMENT");
  EXPECT_EQ(tenant().regions().size(), 1U);
}

TEST_F(PlaneCudaMemory, OutlivesAClientThatIsKilled) {
  const std::string session = open_session();
  append(session, append_request(0, 300, 1), true);
  client_->kill();
  v1::DecodeRequest request = decode_request(session, 0, 1, 3);
  request.clear_query();
  *request.mutable_query() = random_tensor(1, kQueryHeads, 3);
  request.mutable_query()->clear_data();
  name(*request.mutable_query()->mutable_memory(), 0);
  (void)decode_here(request);  // whatever its memory holds: the server goes on
  channel_.reset();
  EXPECT_TRUE(eventually([&] { return tenant().regions().size() == 0; }));
  (void)decode_here(decode_request(session, 0, 2, 4));
}

}  // namespace
}  // namespace kvtier::services::testing
