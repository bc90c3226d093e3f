#pragma once

#include "services/client/data_channel.h"
#include "services/dataplane/data_plane.h"
#include "services/page_cache/page_store.h"
#include "services/page_cache/tenant_pages.h"
#include "tests/services/core/core_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/random_bytes.h"

#include <array>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <random>
#include <stdlib.h>
#include <string>
#include <unistd.h>
#include <vector>

namespace kvtier::services::testing {

using kvtier::testing::await;
using kvtier::testing::eventually;
using kvtier::testing::kPatience;
using kvtier::testing::random_bytes;

inline constexpr std::int64_t kPageBytes = 64 << 10;

/// Descriptors that the process has open.
inline std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

/// A data plane over a core and a page store in this process, without gRPC.
class PlaneTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    executor_ = make_thread_pool(2);
  }
  void TearDown() override {
    if (plane_) plane_->stop(std::chrono::milliseconds(0));
    executor_->finish();
    if (pages_) pages_->finish(PageTier::Deadline::max());
    plane_.reset();
    pages_.reset();
    core_.reset();
    std::filesystem::remove_all(folder_);
  }

  void start(ServiceCoreOptions core, DataPlaneOptions options, const TlsIdentity& tls = {}) {
    options.attachments.token_life = kPatience;
    options.limits.attach_time = attach_time_;
    core_ = std::make_unique<ServiceCore>(std::move(core), *executor_);
    page_options_.arena_bytes = 32 * std::int64_t{1 << 20};
    pages_ = std::make_unique<PageStore>(page_options_);
    if (options.listen.empty()) options.listen = {parse_endpoint(socket())};
    plane_ = std::make_unique<DataPlane>(std::move(options), tls, *core_, *pages_);
    plane_->start();
  }
  void start() { start(small_options(), {}); }

  [[nodiscard]] std::string socket() const { return "unix:" + (folder_ / "data.sock").string(); }
  [[nodiscard]] Tenant& tenant(std::size_t index = 0) { return *core_->tenants().all()[index]; }
  [[nodiscard]] std::string token(std::size_t index = 0, std::int64_t process = 0) {
    return plane_->attachments().create(tenant(index), process, 1 << 20).token;
  }
  [[nodiscard]] std::unique_ptr<DataChannel> attach(std::size_t index = 0) {
    return std::make_unique<DataChannel>(DataChannelOptions{
        .endpoint = plane_->endpoints()[0].text(),
        .token = token(index),
        .tls = {},
        .timeout = std::chrono::minutes(5)});  // of all replies to the last request
  }
  /// Waits for a state that another thread brings about.
  [[nodiscard]] bool all_is_free() {
    return eventually([&] {
      return plane_->counters().connections == 0 && plane_->counters().queued_bytes == 0 &&
             plane_->attachments().size() == 0 && plane_->attachments().staging_bytes() == 0 &&
             core_->inflight_bytes() == 0 && pages_->stats().pinned_pages == 0;
    });
  }

  /// Returns the name of a new session.
  std::string open_session(std::size_t index = 0,
                           v1::Estimator estimator = v1::ESTIMATOR_UNSPECIFIED) {
    v1::CreateSessionRequest request;
    *request.mutable_geometry() = small_geometry();
    request.mutable_retrieval()->set_estimator(estimator);
    v1::CreateSessionResponse response;
    std::promise<std::string> reason;
    core_->run({.tenant = &tenant(index)}, request, response, [&](const ServiceError* error) {
      reason.set_value(error == nullptr ? "OK" : error->reason());
    });
    EXPECT_EQ(await(reason), "OK");
    return response.session().name();
  }

  std::shared_ptr<PageLease> open_lease(std::size_t index = 0) {
    return pages_->open(tenant(index), {.model = "m", .page_bytes = kPageBytes});
  }
  /// Stores a page of `random_bytes(kPageBytes, seed)` and returns its handle.
  std::string store_page(PageLease& lease, std::uint64_t seed) {
    const PageInfo info = lease.pages.reserve(lease, {});
    return lease.pages.commit(lease, info.handle, random_bytes(kPageBytes, seed)).handle;
  }

  std::filesystem::path folder_;
  std::chrono::milliseconds attach_time_ = kPatience;  ///< Of a plane that starts.
  PageStoreOptions page_options_;                      ///< As `attach_time_`, but the arena's size.
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<ServiceCore> core_;
  std::unique_ptr<PageStore> pages_;
  std::unique_ptr<DataPlane> plane_;
};

inline PageDescriptor descriptor_of(const std::string& handle, std::uint64_t bytes = kPageBytes) {
  PageDescriptor descriptor;
  descriptor.bytes = bytes;
  handle.copy(descriptor.handle.data(), descriptor.handle.size());
  return descriptor;
}

/// The reason with which a call is refused.
template <typename Work>
std::string reason_of(Work work) {
  try {
    work();
  } catch (const ClientError& error) {
    return error.reason();
  } catch (const Error& error) {
    return error.what();
  }
  return "OK";
}

}  // namespace kvtier::services::testing
