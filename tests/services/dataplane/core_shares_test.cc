#include "services/dataplane/attachments.h"
#include "services/dataplane/page_jobs.h"
#include "tests/services/core/core_fixture.h"

#include <vector>

namespace kvtier::services::testing {
namespace {

/// Two tenants, of whom the second takes what it can have.
class CoreSharesTest : public CoreTest {
 protected:
  Ending open_lease(std::size_t tenant, v1::OpenLeaseResponse& response) {
    v1::OpenLeaseRequest request;
    request.set_page_bytes(4096);
    Ending ending;
    core_->run(call(tenant), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  std::string create_layers(int layers, std::size_t tenant, v1::CreateSessionResponse& response) {
    v1::CreateSessionRequest request = create_request();
    request.mutable_geometry()->set_layers(layers);
    return create(request, response, tenant).reason();
  }
};

ServiceCoreOptions shared_options() {
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  return options;
}

TEST_F(CoreSharesTest, OneTenantCannotHoldAllLeases) {
  ServiceCoreOptions options = shared_options();
  options.pages.arena_bytes = 4 * static_cast<std::int64_t>(MiB);
  options.pages.max_leases = 6;
  make_core(options);
  v1::OpenLeaseResponse response;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(open_lease(1, response).reason(), "OK");
  EXPECT_EQ(open_lease(1, response).reason(), "TOO_MANY_LEASES");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(open_lease(0, response).reason(), "OK");

  v1::CloseLeaseRequest close;
  close.set_name(response.lease().name());
  v1::CloseLeaseResponse closed;
  Ending ending;
  core_->run(call(0), close, closed, ending.listener());
  executor_.run_all();
  EXPECT_EQ(ending.reason(), "OK");
  EXPECT_EQ(open_lease(0, response).reason(), "OK");
}

TEST_F(CoreSharesTest, ATenantsOwnLimitReplacesItsShare) {
  ServiceCoreOptions options = shared_options();
  options.pages.arena_bytes = 4 * static_cast<std::int64_t>(MiB);
  options.pages.max_leases = 6;
  options.tenants[1].limits.shares[static_cast<std::size_t>(Shared::kLeases)] = 1;
  make_core(options);
  v1::OpenLeaseResponse response;
  EXPECT_EQ(open_lease(1, response).reason(), "OK");
  EXPECT_EQ(open_lease(1, response).reason(), "TOO_MANY_LEASES");
}

TEST_F(CoreSharesTest, OneTenantCannotTakeAllSessionMemory) {
  make_core(shared_options());
  (void)open();
  const std::int64_t one = core_->session_memory();
  ServiceCoreOptions options = shared_options();
  options.max_session_memory = 4 * one;
  make_core(options);
  v1::CreateSessionResponse response;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(create(create_request(), response, 1).reason(), "OK");
  }
  EXPECT_EQ(create(create_request(), response, 1).reason(), "SESSION_MEMORY_FULL");
  EXPECT_EQ(create(create_request(), response, 0).reason(), "OK");
  EXPECT_EQ(core_->session_memory(), 3 * one);
}

TEST_F(CoreSharesTest, EnginesOfOneTenantGiveWayToItsOwnAlone) {
  ServiceCoreOptions options = shared_options();
  options.models.max_models = 4;
  make_core(options);
  v1::CreateSessionResponse mine, response;
  ASSERT_EQ(create_layers(1, 0, mine), "OK");
  ASSERT_EQ(release(mine.session().name()).reason(), "OK");  // its engine is idle now
  ASSERT_EQ(create_layers(2, 0, mine), "OK");
  v1::GetStatsResponse stats;
  for (int layers = 3; layers < 10; ++layers) {  // made and left
    ASSERT_EQ(create_layers(layers, 1, response), "OK");
    ASSERT_EQ(release(response.session().name(), "", 1).reason(), "OK");
  }
  core_->get_stats(stats);
  EXPECT_EQ(stats.service().models(), 4U);
  ASSERT_EQ(create_layers(10, 1, response), "OK");
  ASSERT_EQ(create_layers(11, 1, response), "OK");
  EXPECT_EQ(create_layers(12, 1, response), "TOO_MANY_MODELS");
  EXPECT_EQ(create_layers(1, 0, mine), "OK");
}

TEST_F(CoreSharesTest, CreationThatWaitsForAnEngineKeepsNoOtherWaiting) {
  make_core(shared_options());
  const std::string there = open();
  const v1::CreateSessionRequest known = create_request();
  v1::CreateSessionRequest unknown = create_request();
  unknown.mutable_geometry()->set_layers(kLayers + 1);
  v1::CreateSessionResponse first, second;
  Ending made, opened;
  core_->run(call(1), unknown, first, made.listener());
  core_->run(call(0), known, second, opened.listener());
  EXPECT_EQ(executor_.num_waiting(), 2U);
  ASSERT_TRUE(executor_.run_last());  // the engine is not there yet
  EXPECT_EQ(opened.reason(), "OK");
  EXPECT_FALSE(made.done);
  executor_.run_all();
  EXPECT_EQ(made.reason(), "OK");
}

TEST_F(CoreSharesTest, OneTenantCannotHoldAllAttachments) {
  make_core(shared_options());
  Attachments attachments({.max_attachments = 4}, [this] { return now_; });
  const auto reason = [&](std::size_t tenant) -> std::string {
    try {
      (void)attachments.create(this->tenant(tenant), 0, 0);
    } catch (const ServiceError& error) {
      return error.reason();
    }
    return "OK";
  };
  EXPECT_EQ(reason(1), "OK");
  EXPECT_EQ(reason(1), "OK");
  EXPECT_EQ(reason(1), "TOO_MANY_ATTACHMENTS");
  EXPECT_EQ(reason(0), "OK");
  EXPECT_EQ(reason(0), "OK");
}

TEST(SharesOfTenants, AreReadFromTheirFile) {
  const std::string digest(64, '1');
  const auto parse = [&](const std::string& more) {
    return parse_tenants(R"({"tenants": [{"name": "a", "token_sha256": ")" + digest + "\", " +
                         more + "}]}");
  };
  const TenantConfig tenant = parse(R"("weight": 3, "max_leases": 4, "max_attachments": 5,
      "max_session_memory_bytes": 6, "max_models": 7)")
                                  .front();
  EXPECT_EQ(tenant.limits.weight, 3);
  EXPECT_EQ(tenant.limits.shares, (std::array<std::int64_t, kNumShared>{4, 5, 6, 7, 0}));
  for (const char* bad : {R"("weight": 0)", R"("weight": 101)", R"("max_leases": 0)",
                          R"("max_models": -1)", R"("max_attachments": "1")"}) {
    EXPECT_THROW((void)parse(bad), Error) << bad;
  }
}

TEST(PagesOfAStep, AreBoundedWhateverSizesAClientSays) {
  constexpr std::uint64_t kSource = std::uint64_t{8} << 20;
  constexpr std::uint64_t kPage = (std::uint64_t{4} << 20) - 4096;
  std::vector<PageDescriptor> pages(2000);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i].bytes = i % 2 == 0 ? kPage : 0 - kPage;
  EXPECT_EQ(pages_of_step(pages, kSource), 2U);
  EXPECT_EQ(pages_of_step({}, kSource), 0U);
  for (PageDescriptor& page : pages) page.bytes = 4096;
  EXPECT_EQ(pages_of_step(pages, kSource), 1024U);
}

}  // namespace
}  // namespace kvtier::services::testing
