#include "services/client/data_call.h"
#include "tests/services/dataplane/plane_fixture.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <future>
#include <optional>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

/// A data plane that maps memory of this process in place of a GPU's.
class PlaneDeviceMemory : public PlaneTest {
 protected:
  static constexpr std::size_t kBytes = 256 << 10;

  void start_sharing(const std::string& endpoint, std::size_t max_regions = 4) {
    ServiceCoreOptions core = small_options();
    core.tenants = two_tenants();
    DataPlaneOptions options;
    options.listen = {parse_endpoint(endpoint)};
    options.attachments.max_regions = max_regions;
    options.open_device_memory = [this](const DeviceMemoryHandle& handle, std::size_t bytes) {
      if (failure_) throw Error(*failure_, "expected nothing of it");
      EXPECT_EQ(handle.ipc[63], std::byte{'i'});
      EXPECT_EQ(handle.device[15], std::byte{'d'});
      std::shared_ptr<std::byte> memory(new std::byte[bytes](), std::default_delete<std::byte[]>());
      opened_ = memory;
      return memory;
    };
    start(std::move(core), std::move(options));
  }
  [[nodiscard]] v1::ShareDeviceMemoryRequest request_for(const std::string& attachment) const {
    v1::ShareDeviceMemoryRequest request;
    request.set_attachment(attachment);
    request.set_cuda_ipc_handle(std::string(64, 'i'));
    request.set_device_uuid(std::string(16, 'd'));
    request.set_bytes(kBytes);
    return request;
  }
  std::string share(const v1::ShareDeviceMemoryRequest& request, std::size_t index = 0) {
    v1::ShareDeviceMemoryResponse response;
    plane_->share_device_memory(tenant(index), request, response);
    return response.region();
  }
  std::string refusal(const v1::ShareDeviceMemoryRequest& request, std::size_t index = 0) {
    try {
      return share(request, index);
    } catch (const ServiceError& error) {
      return error.reason() + ": " + error.what();
    }
  }
  /// A connected attachment.
  struct Attached {
    std::string name;
    std::unique_ptr<DataChannel> channel;
  };
  Attached attach_named(std::size_t index = 0) {
    const Attachments::Created created = plane_->attachments().create(tenant(index), 0, 1 << 20);
    return {created.name,
            std::make_unique<DataChannel>(DataChannelOptions{
                .endpoint = plane_->endpoints()[0].text(), .token = created.token, .tls = {}})};
  }

  std::optional<ErrorCode> failure_;
  std::weak_ptr<std::byte> opened_;
};

TEST_F(PlaneDeviceMemory, CarriesCallsWhoseTensorsLieThere) {
  start_sharing(socket());
  const Attached ours = attach_named();
  const std::string region = share(request_for(ours.name));
  std::byte* const memory = opened_.lock().get();
  const std::string session = open_session();
  v1::AppendRequest chunk = append_request(0, 64, 3);
  chunk.set_session(session);
  std::int64_t offset = 0;
  for (v1::Tensor* tensor : {chunk.mutable_key(), chunk.mutable_value()}) {
    std::ranges::copy(std::as_bytes(std::span(tensor->data())), memory + offset);
    tensor->clear_data();
    tensor->mutable_memory()->set_region(region);
    tensor->mutable_memory()->set_offset(offset);
    offset += 64 << 10;
  }
  DataCall append(*ours.channel, Method::kAppend);
  v1::AppendResponse appended;
  ASSERT_TRUE(append.run(chunk, appended));
  EXPECT_EQ(appended.layer_lengths(0), 64);

  // The query lies there, its outputs do not: there must be room for them in staging.
  v1::AttendRequest attend;
  attend.set_session(session);
  const v1::Tensor query = random_tensor(1, kQueryHeads, 4);
  std::ranges::copy(std::as_bytes(std::span(query.data())), memory);
  *attend.mutable_query() = query;
  attend.mutable_query()->clear_data();
  attend.mutable_query()->mutable_memory()->set_region(region);
  v1::AttendResponse attended;
  DataCall cramped(*ours.channel, Method::kAttend);
  EXPECT_THAT(reason_of([&] { (void)cramped.run(attend, attended); }),
              HasSubstr("INVALID_ARGUMENT"));
  DataCall roomy(*ours.channel, Method::kAttend);
  ASSERT_TRUE(roomy.reserve_output(output_bytes_for(query.data().size())));
  ASSERT_TRUE(roomy.run(attend, attended));
  EXPECT_EQ(roomy.next_tensor().size(), query.data().size());
}

TEST_F(PlaneDeviceMemory, EndsWithTheAttachment) {
  start_sharing(socket());
  for (const bool removed : {false, true}) {
    Attached ours = attach_named();
    const std::string region = share(request_for(ours.name));
    v1::ListAttachmentsResponse listed;
    plane_->attachments().list(tenant(), {}, listed);
    EXPECT_EQ(listed.attachments(0).device_bytes(), static_cast<std::int64_t>(kBytes));
    if (removed) {
      plane_->attachments().remove(tenant(), ours.name);
      EXPECT_TRUE(opened_.expired()) << "open when the client is told that it is not";
    }
    ours.channel.reset();
    EXPECT_TRUE(eventually([&] { return opened_.expired(); }));
    EXPECT_THROW((void)tenant().regions().find(region), ServiceError);
  }
  EXPECT_TRUE(all_is_free());
  EXPECT_EQ(tenant().regions().size(), 0U);
}

TEST_F(PlaneDeviceMemory, RefusesWithReasonsThatClientsCanActOn) {
  start_sharing(socket());
  const Attached ours = attach_named();
  const v1::ShareDeviceMemoryRequest good = request_for(ours.name);
  for (const auto& [code, reason] : {std::pair(ErrorCode::kUnimplemented, "NO_DEVICE"),
                                     std::pair(ErrorCode::kNotFound, "OTHER_DEVICE"),
                                     std::pair(ErrorCode::kFailedPrecondition, "HANDLE_REFUSED"),
                                     std::pair(ErrorCode::kInvalidArgument, "INVALID_ARGUMENT"),
                                     std::pair(ErrorCode::kInternal, "DEVICE_LOST")}) {
    failure_ = code;
    EXPECT_THAT(refusal(good), ::testing::StartsWith(reason));
  }
  failure_.reset();
  v1::ShareDeviceMemoryRequest bad = good;
  for (const std::size_t size : {0U, 63U, 65U, 4096U}) {
    bad.set_cuda_ipc_handle(std::string(size, 'i'));
    EXPECT_THAT(refusal(bad), HasSubstr("cuda_ipc_handle: expected 64 bytes"));
  }
  bad = good;
  bad.set_device_uuid("short");
  EXPECT_THAT(refusal(bad), HasSubstr("device_uuid: expected 16 bytes"));
  bad = good;
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-1}, -kMax - 1}) {
    bad.set_bytes(bytes);
    EXPECT_THAT(refusal(bad), HasSubstr("bytes: expected at least 1"));
  }
  bad = good;
  bad.set_attachment("attachments/none");
  EXPECT_THAT(refusal(bad), HasSubstr("NOT_FOUND"));
  EXPECT_THAT(refusal(good, 1), HasSubstr("NOT_FOUND")) << "another tenant's attachment";
  bad.set_attachment(plane_->attachments().create(tenant(), 0, 4096).name);
  EXPECT_THAT(refusal(bad), HasSubstr("NOT_LOCAL")) << "nobody is connected";
  EXPECT_EQ(tenant().regions().size(), 0U);

  for (int i = 0; i < 4; ++i) EXPECT_THAT(refusal(good), HasSubstr("regions/"));
  EXPECT_THAT(refusal(good), HasSubstr("TOO_MANY_REGIONS"));
}

TEST_F(PlaneDeviceMemory, IsForClientsOnThisMachine) {
  start_sharing("tcp:127.0.0.1:0");
  const Attached ours = attach_named();
  EXPECT_THAT(refusal(request_for(ours.name)), HasSubstr("NOT_LOCAL"));
}

TEST_F(PlaneDeviceMemory, CanBeForbidden) {
  start_sharing(socket(), 0);
  const Attached ours = attach_named();
  EXPECT_THAT(refusal(request_for(ours.name)), HasSubstr("NOT_SHARED"));
}

TEST_F(PlaneDeviceMemory, ClosesWhatWasOpenedForAnAttachmentThatEndedMeanwhile) {
  start_sharing(socket());
  Attached ours = attach_named();
  std::shared_ptr<std::byte> memory(new std::byte[16], std::default_delete<std::byte[]>());
  const std::weak_ptr<std::byte> watched = memory;
  EXPECT_THROW((void)plane_->attachments().share(tenant(), ours.name,
                                                 [&] {
                                                   plane_->attachments().remove(tenant(),
                                                                                ours.name);
                                                   return DeviceRegion{std::move(memory), 16};
                                                 }),
               ServiceError);
  EXPECT_TRUE(watched.expired());
  EXPECT_EQ(tenant().regions().size(), 0U);
}

}  // namespace
}  // namespace kvtier::services::testing
