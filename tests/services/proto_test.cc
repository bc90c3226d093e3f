#include "kvtier/v1/admin.grpc.pb.h"
#include "kvtier/v1/attention.grpc.pb.h"
#include "kvtier/v1/session.grpc.pb.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>

namespace kvtier::v1 {
namespace {

DecodeRequest make_request() {
  DecodeRequest request;
  request.set_session("sessions/7");
  request.set_layer(3);
  request.set_step(std::int64_t{1} << 40);
  Tensor* query = request.mutable_query();
  query->set_dtype(DATA_TYPE_BFLOAT16);
  for (const int extent : {1, 8, 128}) query->add_shape(extent);
  query->set_data(std::string(2048, '\0'));
  request.mutable_options()->set_mode(LAYER_MODE_SPARSE);
  request.mutable_options()->set_dense_from(0);
  request.mutable_options()->mutable_retrieval()->set_estimator(ESTIMATOR_NORM_AWARE);
  request.mutable_options()->mutable_retrieval()->mutable_size()->set_sparsity(33.0);
  return request;
}

TEST(Proto, SurvivesTheWire) {
  const DecodeRequest request = make_request();
  DecodeRequest parsed;

  ASSERT_TRUE(parsed.ParseFromString(request.SerializeAsString()));
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(request, parsed));
}

TEST(Proto, TellsAZeroOptionFromOneLeftOut) {
  DecodeRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(make_request().SerializeAsString()));

  EXPECT_TRUE(parsed.options().has_dense_from());
  EXPECT_EQ(parsed.options().dense_from(), 0);
  EXPECT_FALSE(parsed.options().has_softmax_scale());
  EXPECT_EQ(parsed.options().retrieval().size().size_case(), SelectionSize::kSparsity);
}

TEST(Proto, RejectsTruncatedBytes) {
  const std::string bytes = make_request().SerializeAsString();
  DecodeRequest parsed;

  EXPECT_FALSE(parsed.ParseFromString(bytes.substr(0, bytes.size() / 2)));
}

TEST(Proto, NamesRequestsAndResponsesAfterTheirMethods) {
  for (const auto* file :
       {OpenSessionRequest::descriptor()->file(), AttendRequest::descriptor()->file(),
        GetStatsRequest::descriptor()->file()}) {
    ASSERT_EQ(file->service_count(), 1) << file->name();
    const auto* service = file->service(0);
    EXPECT_GT(service->method_count(), 0);
    for (int i = 0; i < service->method_count(); ++i) {
      const auto* method = service->method(i);
      EXPECT_EQ(method->input_type()->name(), method->name() + "Request");
      EXPECT_EQ(method->output_type()->name(), method->name() + "Response");
    }
  }
}

TEST(Proto, StreamsChunksOfAnAppend) {
  const auto* append = AttendRequest::descriptor()->file()->service(0)->FindMethodByName("Append");
  ASSERT_NE(append, nullptr);
  EXPECT_TRUE(append->client_streaming());
  EXPECT_FALSE(append->server_streaming());
}

}  // namespace
}  // namespace kvtier::v1
