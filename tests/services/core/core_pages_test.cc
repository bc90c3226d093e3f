#include "services/page_cache/tenant_pages.h"
#include "tests/services/core/core_fixture.h"
#include "tests/support/gated_tier.h"

#include <future>
#include <limits>

namespace kvtier::services::testing {
namespace {

class CorePagesTest : public CoreTest {
 protected:
  static constexpr std::int64_t kPageBytes = 4096;

  static ServiceCoreOptions options() {
    ServiceCoreOptions options = small_options();
    options.pages.extent_bytes = 4 * kPageBytes;
    options.pages.arena_bytes = 16 * kPageBytes;
    return options;
  }
  void SetUp() override { make_core(options()); }
  void TearDown() override {
    CoreTest::TearDown();
    EXPECT_EQ(core_->inflight_bytes(), 0);
    v1::GetStatsResponse stats;
    core_->get_stats(stats);
    EXPECT_EQ(stats.service().received(), stats.service().admitted() + stats.service().rejected());
  }

  template <typename Request, typename Response>
  Ending run(const Request& request, Response& response, std::size_t tenant = 0) {
    Ending ending;
    core_->run(call(tenant), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  static v1::OpenLeaseRequest lease_request() {
    v1::OpenLeaseRequest request;
    request.set_model("model");
    request.set_page_bytes(kPageBytes);
    return request;
  }
  std::string reason_of(const v1::OpenLeaseRequest& request) {
    v1::OpenLeaseResponse response;
    return run(request, response).reason();
  }
  std::string open_lease(std::size_t tenant = 0) {
    v1::OpenLeaseResponse response;
    EXPECT_TRUE(run(lease_request(), response, tenant).ok());
    EXPECT_EQ(response.lease().page_bytes(), kPageBytes);
    return response.lease().name();
  }
  v1::BatchReservePagesResponse reserve(const std::string& lease,
                                        const std::vector<std::string>& hashes,
                                        const std::string& id = "") {
    v1::BatchReservePagesRequest request;
    request.set_lease(lease);
    request.set_request_id(id);
    for (const std::string& hash : hashes) request.add_keys()->set_hash(hash);
    v1::BatchReservePagesResponse response;
    EXPECT_EQ(run(request, response).reason(), "OK");
    return response;
  }
  /// Reserves, writes and commits; returns the handles.
  std::vector<std::string> put(const std::string& lease, const std::vector<std::string>& hashes) {
    std::vector<std::string> handles;
    v1::BatchCommitPagesRequest request;
    request.set_lease(lease);
    const std::vector<std::byte> bytes(static_cast<std::size_t>(kPageBytes), std::byte{5});
    const v1::BatchReservePagesResponse reserved = reserve(lease, hashes);
    for (const auto& item : reserved.items()) {
      handles.push_back(item.page().handle());
      const auto held = core_->lease(call(), lease);
      held->pages.write(*held, handles.back(), 0, bytes);
      request.add_items()->set_handle(handles.back());
    }
    v1::BatchCommitPagesResponse response;
    EXPECT_TRUE(run(request, response).ok());
    for (const auto& item : response.items()) EXPECT_EQ(item.status().code(), 0);
    return handles;
  }
  template <typename Request>
  static Request of_handles(const std::string& lease, const std::vector<std::string>& handles) {
    Request request;
    request.set_lease(lease);
    for (const std::string& handle : handles) request.add_handles(handle);
    return request;
  }
};

TEST_F(CorePagesTest, GeometryThatIsNoneIsRefused) {
  v1::OpenLeaseRequest request;
  request.set_model("model");
  EXPECT_EQ(reason_of(request), "INVALID_ARGUMENT");
  v1::PageGeometry& geometry = *request.mutable_geometry();
  geometry.set_kv_heads(2);
  geometry.set_head_dim(64);
  geometry.set_page_tokens(16);
  EXPECT_EQ(reason_of(request), "INVALID_ARGUMENT") << "no dtype";
  geometry.set_dtype(v1::DATA_TYPE_BFLOAT16);
  v1::OpenLeaseResponse response;
  EXPECT_TRUE(run(request, response).ok());
  EXPECT_EQ(response.lease().page_bytes(), 2 * 2 * 64 * 16 * 2);
  geometry.set_dtype(static_cast<v1::DataType>(9999));
  EXPECT_EQ(reason_of(request), "INVALID_ARGUMENT");
  geometry.set_dtype(v1::DATA_TYPE_FLOAT32);
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::int32_t heads : {0, -1, std::numeric_limits<std::int32_t>::min(), kMost}) {
    geometry.set_kv_heads(heads);
    EXPECT_EQ(reason_of(request), "INVALID_ARGUMENT") << heads;
  }
  geometry.set_head_dim(kMost);
  geometry.set_page_tokens(kMost);
  EXPECT_EQ(reason_of(request), "INVALID_ARGUMENT") << "the product overflows";
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-1}, 4 * kPageBytes + 1,
                                   std::numeric_limits<std::int64_t>::max()}) {
    request.set_page_bytes(bytes);
    EXPECT_EQ(reason_of(request), "INVALID_ARGUMENT") << bytes;
  }
}

TEST_F(CorePagesTest, CallsThatWaitForTheTiersHoldNoThread) {
  using kvtier::testing::GatedTier;
  using kvtier::testing::kPatience;
  const auto servers = std::make_shared<GatedTier>();
  ServiceCoreOptions options = this->options();
  options.pages.waits_for_disk = true;
  options.pages.backing = [servers](const Tenant& /*tenant*/) {
    return PageBacking{.remote = {servers}, .write_time = std::chrono::seconds(1)};
  };
  make_core(std::move(options));
  const std::string lease = open_lease();
  const std::string handle = reserve(lease, {"a"}).items(0).page().handle();
  const auto held = core_->lease(call(), lease);
  held->pages.write(*held, handle, 0, std::vector<std::byte>(kPageBytes));
  // Runs a call whose tier is kept waiting meanwhile.
  const auto expect_waits = [&](GatedTier::Verb verb, const auto& request, auto& response) {
    servers->hold_next(verb);
    std::promise<std::string> reason;
    core_->run(call(), request, response, [&](const ServiceError* error) {
      reason.set_value(error == nullptr ? "OK" : error->reason());
    });
    executor_.run_all();  // returns at once
    std::future<std::string> ended = reason.get_future();
    EXPECT_EQ(ended.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
    EXPECT_TRUE(servers->await_held(verb));
    servers->let_go(verb);
    ASSERT_EQ(ended.wait_for(kPatience), std::future_status::ready);
    EXPECT_EQ(ended.get(), "OK");
  };

  v1::BatchCommitPagesRequest commit;
  commit.set_lease(lease);
  commit.add_items()->set_handle(handle);
  v1::BatchCommitPagesResponse committed;
  expect_waits(GatedTier::Verb::kPut, commit, committed);
  EXPECT_EQ(servers->size(), 1U);

  const auto remove = of_handles<v1::BatchDeletePagesRequest>(lease, {handle});
  v1::BatchDeletePagesResponse removed;
  expect_waits(GatedTier::Verb::kRemove, remove, removed);
  EXPECT_EQ(servers->size(), 0U);
}

TEST_F(CorePagesTest, TheFirstLeaseOfATenantReadsItsFolderWhereSessionsWork) {
  ServiceCoreOptions options = this->options();
  int made = 0;
  options.pages.backing = [&made](const Tenant& /*tenant*/) {
    ++made;
    return PageBacking{};
  };
  make_core(std::move(options));
  const v1::OpenLeaseRequest request = lease_request();
  v1::OpenLeaseResponse response;
  Ending first;
  core_->run(call(), request, response, first.listener());
  EXPECT_EQ(first.reason(), "NOT DONE") << "on the thread of the transport";
  EXPECT_EQ(made, 0);
  EXPECT_EQ(executor_.last_lane.engine, &core_->pages()) << "those that wait hold no thread";
  executor_.run_all();
  EXPECT_EQ(first.reason(), "OK");

  Ending late;
  make_core(this->options());
  Call call = this->call();
  call.cancelled = [] { return true; };
  core_->run(call, request, response, late.listener());
  executor_.run_all();
  EXPECT_EQ(late.reason(), "CANCELLED");
  Ending next;
  EXPECT_FALSE(open_lease().empty());
  core_->run(this->call(), request, response, next.listener());
  EXPECT_EQ(next.reason(), "OK") << "nothing is to be read";
}

TEST_F(CorePagesTest, FirstLeasesThatWaitAreBounded) {
  constexpr std::size_t kMost = 1024;
  make_core(options());
  const v1::OpenLeaseRequest request = lease_request();
  struct Opening {
    v1::OpenLeaseResponse response;
    Ending ending;
  };
  std::vector<Opening> openings(kMost + 1);
  for (Opening& one : openings) core_->run(call(), request, one.response, one.ending.listener());
  const auto is_waiting = [](const Opening& one) { return one.ending.reason() == "NOT DONE"; };
  const auto waiting = std::ranges::count_if(openings, is_waiting);
  EXPECT_GT(waiting, 0);
  EXPECT_EQ(openings[kMost].ending.reason(), "QUEUE_FULL");

  executor_.run_all();

  EXPECT_EQ(openings[0].ending.reason(), "OK");
  EXPECT_EQ(std::ranges::count_if(openings, is_waiting), 0);
  EXPECT_TRUE(tenant().take(Shared::kCreations, waiting, kMost)) << "all are given back";
}

TEST_F(CorePagesTest, RepeatedRequestsAreAnsweredNotExecuted) {
  v1::OpenLeaseRequest request = lease_request();
  request.set_request_id(kUuid);
  v1::OpenLeaseResponse first;
  v1::OpenLeaseResponse again;
  EXPECT_TRUE(run(request, first).ok());
  EXPECT_TRUE(run(request, again).ok());
  EXPECT_EQ(first.lease().name(), again.lease().name());
  request.set_model("other");
  EXPECT_EQ(reason_of(request), "REQUEST_ID_CONFLICT");

  const std::string lease = first.lease().name();
  const auto reserved = reserve(lease, {"a", "b"}, kOtherUuid);
  EXPECT_EQ(reserve(lease, {"a", "b"}, kOtherUuid).SerializeAsString(),
            reserved.SerializeAsString());
  EXPECT_EQ(core_->pages().stats().reserved_pages, 2U) << "charged once";
  EXPECT_EQ(tenant().kv_bytes(), 2 * kPageBytes);
}

TEST_F(CorePagesTest, PrefixIsFoundPinnedAndGivenBack) {
  const std::string lease = open_lease();
  const std::vector<std::string> handles = put(lease, {"a", "b", "c"});
  v1::LookupPrefixRequest request;
  request.set_lease(lease);
  for (const char* hash : {"a", "b", "x", "c"}) request.add_hashes(hash);
  request.add_layers(0);
  request.set_pin(true);
  request.set_request_id(kUuid);
  for (int i = 0; i < 2; ++i) {
    v1::LookupPrefixResponse response;
    ASSERT_TRUE(run(request, response).ok());
    EXPECT_EQ(response.hits(), 2);
    ASSERT_EQ(response.pages_size(), 2);
    EXPECT_EQ(response.pages(1).handle(), handles[1]);
  }
  EXPECT_EQ(core_->pages().stats().pinned_pages, 2U);
  auto unpin = of_handles<v1::BatchUnpinPagesRequest>(lease, handles);
  v1::BatchUnpinPagesResponse unpinned;
  ASSERT_TRUE(run(unpin, unpinned).ok());
  EXPECT_EQ(unpinned.statuses(0).code(), 0);
  EXPECT_EQ(unpinned.statuses(1).code(), 0);
  EXPECT_EQ(unpinned.statuses(2).reason(), "NOT_PINNED");
  EXPECT_EQ(core_->pages().stats().pinned_pages, 0U);
}

TEST_F(CorePagesTest, HashesAreFoundEachForItself) {
  const std::string lease = open_lease();
  const std::vector<std::string> handles = put(lease, {"a", "b", "c"});
  v1::BatchLookupPagesRequest request;
  request.set_lease(lease);
  for (const char* hash : {"x", "b", "x", "c"}) request.add_hashes(hash);
  request.add_layers(0);
  request.set_hits_only(true);
  v1::BatchLookupPagesResponse response;
  ASSERT_TRUE(run(request, response).ok());
  EXPECT_EQ(std::vector<bool>(response.hits().begin(), response.hits().end()),
            (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(response.pages_size(), 0);

  request.set_pin(true);
  request.set_request_id(kUuid);
  EXPECT_EQ(run(request, response).reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(core_->pages().stats().pinned_pages, 0U);
  request.set_hits_only(false);
  for (int i = 0; i < 2; ++i) {
    response.Clear();
    ASSERT_TRUE(run(request, response).ok());
    ASSERT_EQ(response.pages_size(), 2);
    EXPECT_EQ(response.pages(0).handle(), handles[1]);
    EXPECT_EQ(response.pages(1).handle(), handles[2]);
  }
  auto unpin = of_handles<v1::BatchUnpinPagesRequest>(lease, {handles[1], handles[1]});
  v1::BatchUnpinPagesResponse unpinned;
  ASSERT_TRUE(run(unpin, unpinned).ok());
  EXPECT_EQ(unpinned.statuses(0).code(), 0);
  EXPECT_EQ(unpinned.statuses(1).reason(), "NOT_PINNED") << "pinned once by one request";

  v1::BatchLookupPagesRequest many;
  many.set_lease(lease);
  many.add_layers(0);
  for (int i = 0; i <= kMaxBatchPages; ++i) many.add_hashes("x");
  EXPECT_EQ(run(many, response).reason(), "INVALID_ARGUMENT");
}

TEST_F(CorePagesTest, BatchesAnswerItemByItem) {
  const std::string lease = open_lease();
  std::vector<std::string> handles = put(lease, {"a", "b"});
  handles.push_back("forged");
  handles.push_back(reserve(lease, {"r"}).items(0).page().handle());
  v1::BatchPinPagesResponse pinned;
  ASSERT_TRUE(run(of_handles<v1::BatchPinPagesRequest>(lease, handles), pinned).ok());
  EXPECT_EQ(pinned.items(0).page().handle(), handles[0]);
  EXPECT_EQ(pinned.items(2).status().reason(), "NOT_FOUND");
  EXPECT_EQ(pinned.items(3).status().reason(), "NOT_COMMITTED");
  v1::BatchAbortPagesResponse aborted;
  ASSERT_TRUE(run(of_handles<v1::BatchAbortPagesRequest>(lease, handles), aborted).ok());
  EXPECT_EQ(aborted.statuses(0).reason(), "NOT_RESERVED");
  EXPECT_EQ(aborted.statuses(3).code(), 0);
  v1::BatchDeletePagesResponse deleted;
  ASSERT_TRUE(run(of_handles<v1::BatchDeletePagesRequest>(lease, handles), deleted).ok());
  EXPECT_EQ(deleted.statuses(0).code(), 0);
  EXPECT_EQ(deleted.statuses(3).reason(), "PAGE_GONE");
}

TEST_F(CorePagesTest, BatchesAreBoundedAndEmptyOnesFine) {
  const std::string lease = open_lease();
  v1::BatchPinPagesResponse response;
  EXPECT_TRUE(run(of_handles<v1::BatchPinPagesRequest>(lease, {}), response).ok());
  const std::vector<std::string> many(kMaxBatchPages + 1, "x");
  EXPECT_EQ(run(of_handles<v1::BatchPinPagesRequest>(lease, many), response).reason(),
            "INVALID_ARGUMENT");
  v1::LookupPrefixRequest lookup;
  lookup.set_lease(lease);
  for (int i = 0; i < 65; ++i) lookup.add_hashes("h");
  for (int i = 0; i < 64; ++i) lookup.add_layers(i);
  v1::LookupPrefixResponse found;
  EXPECT_EQ(run(lookup, found).reason(), "INVALID_ARGUMENT");
  lookup.mutable_layers()->Clear();
  lookup.add_layers(-1);
  EXPECT_EQ(run(lookup, found).reason(), "INVALID_ARGUMENT");
}

TEST_F(CorePagesTest, ReservationsNameEachKeyOnce) {
  v1::BatchReservePagesRequest request;
  request.set_lease(open_lease());
  request.add_keys()->set_hash("a");
  request.add_keys()->set_hash("a");
  v1::BatchReservePagesResponse response;
  EXPECT_EQ(run(request, response).reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(core_->pages().stats().reserved_pages, 0U);
  request.mutable_keys(1)->set_layer(1);
  EXPECT_TRUE(run(request, response).ok());
  EXPECT_EQ(core_->pages().stats().reserved_pages, 2U);
}

TEST_F(CorePagesTest, OverQuotaItemsFailAndNothingElse) {
  tenant().set_quota(10, 2 * kPageBytes);
  const auto response = reserve(open_lease(), {"a", "b", "c"});
  EXPECT_EQ(response.items(1).status().code(), 0);
  EXPECT_EQ(response.items(2).status().reason(), "QUOTA_EXCEEDED");
  EXPECT_EQ(tenant().kv_bytes(), 2 * kPageBytes);
}

TEST_F(CorePagesTest, LeasesOfOthersAreAsGoodAsUnknown) {
  ServiceCoreOptions two = options();
  two.tenants = two_tenants();
  make_core(two);
  const std::string lease = open_lease(0);
  put(lease, {"a"});
  v1::LookupPrefixRequest request;
  request.set_lease(lease);
  request.add_hashes("a");
  request.add_layers(0);
  v1::LookupPrefixResponse response;
  const Ending foreign = run(request, response, 1);
  request.set_lease("leases/unknown");
  const Ending unknown = run(request, response, 1);
  EXPECT_EQ(foreign.reason(), "NOT_FOUND");
  EXPECT_STREQ(foreign.error->what(), unknown.error->what());
  request.set_lease(open_lease(1));
  ASSERT_TRUE(run(request, response, 1).ok());
  EXPECT_EQ(response.hits(), 0);
}

TEST_F(CorePagesTest, CallsOfALeaseTakeTheTimeOfItsTenant) {
  ServiceCoreOptions two = options();
  two.tenants = two_tenants();
  two.tenants[1].limits.weight = 7;
  make_core(two);
  (void)open_lease(1);
  EXPECT_EQ(executor_.last_lane.tenant, 1U);
  EXPECT_EQ(executor_.last_lane.weight, 7);
}

TEST_F(CorePagesTest, LeaseLivesAsLongAsItIsNamed) {
  const std::string lease = open_lease();
  const std::string idle = open_lease();
  put(idle, {"kept"});
  reserve(idle, {"half"});
  now_ += std::chrono::seconds(50);
  v1::KeepAliveRequest request;
  request.add_names(lease);
  v1::KeepAliveResponse response;
  core_->keep_alive(call(), request, response);
  EXPECT_EQ(response.statuses(0).code(), 0);
  now_ += std::chrono::seconds(20);
  core_->sweep();
  EXPECT_EQ(core_->pages().num_leases(), 1U);
  EXPECT_EQ(core_->pages().stats().reserved_bytes, 0U);
  EXPECT_EQ(tenant().kv_bytes(), kPageBytes) << "what was committed";
  core_->keep_alive(call(), request, response);
  EXPECT_EQ(response.statuses(1).code(), 0);

  v1::CloseLeaseRequest close;
  close.set_name(lease);
  close.set_request_id(kUuid);
  for (int i = 0; i < 2; ++i) {
    Ending ending;
    v1::CloseLeaseResponse closed;
    core_->run(call(), close, closed, ending.listener());
    EXPECT_TRUE(ending.ok());
  }
  EXPECT_EQ(core_->pages().num_leases(), 0U);
}

TEST_F(CorePagesTest, DrainRefusesNewCalls) {
  const std::string lease = open_lease();
  core_->drain();
  EXPECT_EQ(reason_of(lease_request()), "DRAINING");
  v1::LookupPrefixRequest request;
  request.set_lease(lease);
  v1::LookupPrefixResponse response;
  EXPECT_EQ(run(request, response).reason(), "DRAINING");
}

}  // namespace
}  // namespace kvtier::services::testing
