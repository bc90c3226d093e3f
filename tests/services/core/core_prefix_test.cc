#include "tests/services/core/core_fixture.h"

#include <gmock/gmock.h>

#include <numeric>

/// Stored prefixes through the service: who finds which, what it costs, what goes first.
namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAre;

using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kPage = 64;
constexpr std::int64_t kTokenBytes = std::int64_t{kKvHeads} * kHeadDim * 4;  // of one layer
constexpr const char* kModel = "weights 1, rope 10000";

Ids iota(std::int64_t count, std::int32_t first = 0) {
  Ids ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

class CorePrefixTest : public CoreTest {
 protected:
  void SetUp() override {
    ServiceCoreOptions options = small_options();
    options.tenants = two_tenants();
    make_core(options);
  }
  v1::CreateSessionRequest request_with(const Ids& ids, const std::string& model = kModel) const {
    v1::CreateSessionRequest request = create_request();
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    request.set_model_fingerprint(model);
    return request;
  }
  /// Opens a session with these ids and returns what the service says.
  v1::CreateSessionResponse open_with(const Ids& ids, std::size_t tenant = 0,
                                      const std::string& model = kModel) {
    v1::CreateSessionResponse response;
    EXPECT_EQ(create(request_with(ids, model), response, tenant).reason(), "OK");
    return response;
  }
  std::int64_t attached(const Ids& ids, std::size_t tenant = 0, const std::string& model = kModel) {
    const v1::CreateSessionResponse response = open_with(ids, tenant, model);
    EXPECT_EQ(release(response.session().name(), "", tenant).reason(), "OK");
    return response.attached_tokens();
  }
  Ending publish(const std::string& name, const Ids& ids, std::size_t tenant = 0) {
    v1::PublishPrefixRequest request;
    request.set_name(name);
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    Ending ending;
    core_->run(call(tenant), request, published_, ending.listener());
    executor_.run_all();
    return ending;
  }
  void append_to_all_layers(const std::string& name, std::int64_t tokens, std::uint64_t seed,
                            std::size_t tenant = 0) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto layer_seed = seed + static_cast<std::uint64_t>(layer);
      ASSERT_EQ(append(name, append_request(layer, tokens, layer_seed), tenant).reason(), "OK");
    }
  }
  /// Opens a session with `ids`, stores as many tokens, and publishes them.
  std::string publish_new(const Ids& ids, std::size_t tenant = 0) {
    const std::string name = open_with(ids, tenant).session().name();
    append_to_all_layers(name, static_cast<std::int64_t>(ids.size()), 1, tenant);
    EXPECT_EQ(publish(name, ids, tenant).reason(), "OK");
    return name;
  }
  /// Keys and values of a session's first tokens.
  std::string rows(const std::string& name, int layer, std::int64_t tokens) {
    v1::FetchRequest request;
    request.set_session(name);
    request.set_layer(layer);
    request.mutable_tokens()->set_dtype(v1::DATA_TYPE_INT32);
    set_shape(*request.mutable_tokens(), {kKvHeads, tokens});
    const Ids ids = iota(tokens);
    for (int head = 0; head < kKvHeads; ++head) {
      request.mutable_tokens()->mutable_data()->append(reinterpret_cast<const char*>(ids.data()),
                                                       ids.size() * sizeof(std::int32_t));
    }
    v1::FetchResponse response;
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    EXPECT_EQ(ending.reason(), "OK");
    return response.key().data() + response.value().data();
  }

  v1::PublishPrefixResponse published_;
};

TEST_F(CorePrefixTest, SessionBeginsWithTheLongestRunThatIsStored) {
  const Ids ids = iota(200);
  const std::string first = publish_new(ids);
  EXPECT_EQ(published_.stored_tokens(), 3 * kPage);

  const v1::CreateSessionResponse second = open_with(ids);

  EXPECT_EQ(second.attached_tokens(), 3 * kPage);
  EXPECT_THAT(second.session().layer_lengths(), ElementsAre(3 * kPage, 3 * kPage));
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string expected = rows(first, layer, 3 * kPage);
    EXPECT_EQ(rows(second.session().name(), layer, 3 * kPage), expected);
  }
  Ids other = ids;
  other[100] = 7777;
  EXPECT_EQ(attached(other), kPage);
  EXPECT_EQ(attached(iota(kPage - 1)), 0);
  EXPECT_EQ(attached({}), 0);
}

TEST_F(CorePrefixTest, AttachedSessionAnswersAsOneThatAppendedEverything) {
  const Ids ids = iota(2 * kPage);
  const std::string appended = publish_new(ids);
  const v1::CreateSessionResponse attached = open_with(ids);
  ASSERT_EQ(attached.attached_tokens(), 2 * kPage);
  for (int layer = 0; layer < kLayers; ++layer) {
    v1::DecodeResponse one, other;
    ASSERT_EQ(decode(decode_request(appended, layer, 1, 9), one).reason(), "OK");
    ASSERT_EQ(decode(decode_request(attached.session().name(), layer, 1, 9), other).reason(), "OK");
    EXPECT_EQ(one.SerializeAsString(), other.SerializeAsString()) << "layer " << layer;
  }
}

TEST_F(CorePrefixTest, NoneIsHitByAnotherTenantOrModel) {
  const Ids ids = iota(3 * kPage);
  publish_new(ids, 0);
  EXPECT_EQ(attached(ids, 1), 0);
  EXPECT_EQ(attached(ids, 0, "weights 2"), 0);

  // The other tenant's own does not reach the first either.
  const Ids own = iota(2 * kPage, 5000);
  publish_new(own, 1);
  EXPECT_EQ(attached(own, 0), 0);
  EXPECT_EQ(attached(own, 1), 2 * kPage);
  EXPECT_EQ(attached(ids, 0), 3 * kPage);
}

TEST_F(CorePrefixTest, OutlivesTheSessionThatPublishedIt) {
  const Ids ids = iota(2 * kPage);
  EXPECT_EQ(release(publish_new(ids)).reason(), "OK");
  EXPECT_EQ(tenant().kv_bytes(), 0);
  EXPECT_EQ(attached(ids), 2 * kPage);
  v1::GetStatsResponse stats;
  core_->get_stats(stats);
  EXPECT_EQ(stats.snapshot().prefix_tokens(), static_cast<std::uint64_t>(2 * kPage));
  EXPECT_EQ(stats.cumulative().prefix_tokens_attached(), static_cast<std::uint64_t>(2 * kPage));
  EXPECT_GE(stats.cumulative().prefix_tokens_asked(), stats.cumulative().prefix_tokens_attached());
  EXPECT_EQ(stats.cumulative().prefix_tokens_evicted(), 0U);
}

TEST_F(CorePrefixTest, AttachedTokensAreChargedAsAppendedOnes) {
  const Ids ids = iota(2 * kPage);
  const std::string first = publish_new(ids);
  const std::int64_t alone = tenant().kv_bytes();

  const v1::CreateSessionResponse second = open_with(ids);

  EXPECT_EQ(tenant().kv_bytes(), 2 * alone);
  EXPECT_EQ(second.session().kv_bytes(), kLayers * 2 * kPage * kTokenBytes);
  EXPECT_EQ(release(second.session().name()).reason(), "OK");
  EXPECT_EQ(tenant().kv_bytes(), alone);
}

TEST_F(CorePrefixTest, QuotaRefusesASessionWhoseAttachedTokensDoNotFit) {
  const Ids ids = iota(2 * kPage);
  const std::string first = publish_new(ids);
  const std::int64_t alone = tenant().kv_bytes();
  tenant().set_quota(2, 2 * alone - 1);
  v1::CreateSessionResponse response;

  EXPECT_EQ(create(request_with(ids), response).reason(), "QUOTA_EXCEEDED");

  EXPECT_EQ(tenant().kv_bytes(), alone);
  EXPECT_EQ(tenant().sessions(), 1);
  EXPECT_EQ(core_->num_sessions(), 1U);
  tenant().set_quota(2, 2 * alone);
  EXPECT_EQ(attached(ids), 2 * kPage);
}

TEST_F(CorePrefixTest, CreationRepeatedTellsTheSameAttachedTokens) {
  const Ids ids = iota(kPage);
  publish_new(ids);
  v1::CreateSessionRequest request = request_with(ids);
  request.set_request_id(kUuid);
  v1::CreateSessionResponse one, other;
  ASSERT_EQ(create(request, one).reason(), "OK");
  ASSERT_EQ(create(request, other).reason(), "OK");
  EXPECT_EQ(one.attached_tokens(), kPage);
  EXPECT_EQ(one.SerializeAsString(), other.SerializeAsString());
}

TEST_F(CorePrefixTest, WhatCannotBePublishedIsRefusedAndStoresNothing) {
  const Ids ids = iota(2 * kPage);
  const std::string name = open_with(ids).session().name();
  append_to_all_layers(name, kPage, 1);
  const Ending too_many = publish(name, ids);
  EXPECT_EQ(too_many.reason(), "INVALID_ARGUMENT");
  EXPECT_EQ(too_many.error->field(), "token_ids");
  EXPECT_EQ(publish(name, iota(kPage), 1).reason(), "NOT_FOUND");
  EXPECT_EQ(publish("sessions/none", {}).reason(), "NOT_FOUND");

  const std::string of_no_model = open();
  append_to_all_layers(of_no_model, kPage, 1);
  const Ending nameless = publish(of_no_model, iota(kPage));
  EXPECT_EQ(nameless.reason(), "NO_FINGERPRINT");
  EXPECT_EQ(nameless.error->code(), Code::kFailedPrecondition);

  EXPECT_EQ(core_->engine_stats().snapshot.prefix_tokens, 0U);
  ASSERT_EQ(publish(name, iota(kPage)).reason(), "OK");
  EXPECT_EQ(publish(name, iota(kPage, 1)).reason(), "INVALID_ARGUMENT") << "other ids";
  EXPECT_EQ(attached(iota(kPage, 1)), 0);
  EXPECT_EQ(attached(iota(kPage)), kPage);
}

TEST_F(CorePrefixTest, ForksPublishAsTheirParent) {
  const Ids ids = iota(kPage);
  const std::string parent = open_with(ids).session().name();
  append_to_all_layers(parent, kPage, 1);
  v1::ForkSessionRequest request;
  request.set_name(parent);
  request.set_count(1);
  v1::ForkSessionResponse response;
  Ending ending;
  core_->run(call(), request, response, ending.listener());
  executor_.run_all();
  ASSERT_EQ(ending.reason(), "OK");

  EXPECT_EQ(publish(response.sessions(0).name(), ids).reason(), "OK");

  EXPECT_EQ(attached(ids), kPage);
}

// 8 MiB are 256 pages of 32 KiB; a prefix of one page takes one in each of the two layers.
TEST_F(CorePrefixTest, PrefixesGiveWayToSessions) {
  for (std::int32_t i = 0; i < 32; ++i) {
    ASSERT_EQ(release(publish_new(iota(4 * kPage, i * 1000))).reason(), "OK");
  }
  const std::string session = open();
  append_to_all_layers(session, kMaxTokens, 1);  // 128 pages
  EXPECT_EQ(attached(iota(4 * kPage)), 0) << "the one used the longest ago";
  EXPECT_EQ(attached(iota(4 * kPage, 31'000)), 4 * kPage);
  EXPECT_GT(core_->engine_stats().cumulative.prefix_tokens_evicted, 0U);
}

}  // namespace
}  // namespace kvtier::services::testing
