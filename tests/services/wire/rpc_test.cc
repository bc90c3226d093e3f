#include "services/wire/rpc.h"

#include "services/wire/each_tensor.h"
#include "services/wire/message_pieces.h"

#include <gtest/gtest.h>

#include <set>
#include <span>
#include <string>
#include <vector>

namespace kvtier::services::testing {
namespace {

using google::protobuf::MethodDescriptor;
using google::protobuf::ServiceDescriptor;

template <typename Request>
const ServiceDescriptor& service_of() {
  return *Request::descriptor()->file()->service(0);
}

/// Names of the calls with one request and one response.
std::set<std::string> unary_methods(const ServiceDescriptor& service) {
  std::set<std::string> names;
  for (int i = 0; i < service.method_count(); ++i) {
    const MethodDescriptor& method = *service.method(i);
    if (!method.client_streaming() && !method.server_streaming()) names.insert(method.name());
  }
  return names;
}

/// Names of the calls of a list, whose types are those of the service's method.
template <typename Rpcs>
std::set<std::string> listed_methods(const ServiceDescriptor& service) {
  std::set<std::string> names;
  each_rpc<Rpcs>([&](auto rpc) {
    using Call = decltype(rpc);
    const std::string name(rpc_name<typename Call::Request>());
    const MethodDescriptor* method =
        service.FindMethodByName(name.substr(service.name().size() + 1));
    ASSERT_NE(method, nullptr) << name;
    EXPECT_EQ(method->input_type(), Call::Request::descriptor());
    EXPECT_EQ(method->output_type(), Call::Response::descriptor());
    names.insert(method->name());
  });
  return names;
}

/// Fills every tensor of a message, items of a batch too, and returns them in the order of their
/// fields.
std::vector<const google::protobuf::Message*> fill_tensors(google::protobuf::Message& message) {
  std::vector<const google::protobuf::Message*> tensors;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = message.GetDescriptor()->field(i);
    if (field->message_type() == nullptr) continue;
    const google::protobuf::Reflection& access = *message.GetReflection();
    if (field->message_type() == v1::Tensor::descriptor()) {
      tensors.push_back(access.MutableMessage(&message, field));
    } else if (field->name() == "items" || field->name() == "response") {
      auto* inner = field->is_repeated() ? access.AddMessage(&message, field)
                                         : access.MutableMessage(&message, field);
      const auto more = fill_tensors(*inner);
      tensors.insert(tensors.end(), more.begin(), more.end());
    }
  }
  return tensors;
}

template <typename Message>
void expect_every_tensor() {
  Message message;
  const auto expected = fill_tensors(message);
  std::vector<const google::protobuf::Message*> found;
  each_tensor(message, [&](v1::Tensor& tensor) { found.push_back(&tensor); });
  EXPECT_EQ(found, expected) << message.GetTypeName();
}

TEST(EachTensor, VisitsAllInTheOrderOfTheirFields) {
  each_rpc<PlaneRpcs>([](auto rpc) {
    expect_every_tensor<typename decltype(rpc)::Request>();
    expect_every_tensor<typename decltype(rpc)::Response>();
  });
}

TEST(Rpc, NamesFollowFromRequests) {
  EXPECT_EQ(rpc_path<v1::GetSessionRequest>(), "/kvtier.v1.SessionService/GetSession");
  EXPECT_EQ(rpc_name<v1::BatchLookupPagesRequest>(), "PageService/BatchLookupPages");
}

TEST(Rpc, ListsHaveEveryCallWithOneRequestAndOneResponse) {
  const ServiceDescriptor& attention = service_of<v1::SelectRequest>();
  EXPECT_EQ(listed_methods<AttentionRpcs>(attention), unary_methods(attention));
  const ServiceDescriptor& pages = service_of<v1::OpenLeaseRequest>();
  EXPECT_EQ(listed_methods<PageRpcs>(pages), unary_methods(pages));
  const ServiceDescriptor& sessions = service_of<v1::GetSessionRequest>();
  std::set<std::string> listed = listed_methods<SessionRpcs>(sessions);
  listed.insert("ListSessions");  // answered on the calling thread
  EXPECT_EQ(listed, unary_methods(sessions));
}

TEST(Rpc, MethodsOfFramesAreThoseOfTheFormat) {
  EXPECT_EQ(method_of<v1::AppendRequest>(), Method::kAppend);
  EXPECT_EQ(method_of<v1::SelectRequest>(), Method::kSelect);
  EXPECT_EQ(method_of<v1::AttendRequest>(), Method::kAttend);
  EXPECT_EQ(method_of<v1::DecodeRequest>(), Method::kDecode);
  EXPECT_EQ(method_of<v1::BatchDecodeRequest>(), Method::kBatchDecode);
  EXPECT_EQ(method_of<v1::BatchAttendRequest>(), Method::kBatchAttend);
  EXPECT_EQ(method_of<v1::FetchRequest>(), Method::kFetch);
  EXPECT_EQ(method_of<v1::BatchSelectRequest>(), Method::kBatchSelect);
  EXPECT_EQ(method_of<v1::BatchFetchRequest>(), Method::kBatchFetch);
  EXPECT_EQ(method_of<v1::BatchLookupPagesRequest>(), Method::kBatchLookupPages);
}

bool has_few(const google::protobuf::Message& message) {
  const std::string text = message.SerializeAsString();
  const auto bytes = std::as_bytes(std::span(text));
  const std::size_t half = bytes.size() / 2;
  return has_few_fields({bytes.first(half), bytes.subspan(half)}, *message.GetDescriptor());
}

TEST(MessageFields, AreCountedInAllPartsOfAMessage) {
  v1::BatchDecodeRequest batch;
  for (int i = 0; i < kMaxFields / 4; ++i) {
    *batch.add_items()->mutable_query()->mutable_data() = "x";
    batch.mutable_items(i)->set_step(i + 1);  // a number, which is not counted
    batch.mutable_items(i)->set_session("s");
  }
  EXPECT_TRUE(has_few(batch)) << "four each";
  batch.add_items();
  EXPECT_FALSE(has_few(batch));
}

TEST(MessageFields, NumbersOfAFieldAreNotCounted) {
  std::string text;
  for (int i = 0; i <= kMaxFields; ++i) text += "\x38\x01";
  const v1::GetSessionRequest none;
  const ByteRuns unknown{std::as_bytes(std::span(text))};
  EXPECT_FALSE(has_few_fields(unknown, *none.GetDescriptor())) << "no field of the type";
  const auto* step = v1::DecodeRequest::descriptor()->FindFieldByName("step");
  for (std::size_t i = 0; i < text.size(); i += 2) text[i] = static_cast<char>(step->number() << 3);
  const ByteRuns known{std::as_bytes(std::span(text))};
  EXPECT_TRUE(has_few_fields(known, *v1::DecodeRequest::descriptor()));
}

TEST(MessageFields, BytesThatAreNoMessageHaveFew) {
  for (const std::string text : {"\x0A", "\x0A\xFF\xFF\xFF\xFF\x0F", "\x07", "\x0B\x0C\x0C"}) {
    EXPECT_TRUE(
        has_few_fields({std::as_bytes(std::span(text))}, *v1::BatchDecodeRequest::descriptor()));
  }
}

}  // namespace
}  // namespace kvtier::services::testing
