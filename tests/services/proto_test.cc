#include "kvtier/v1/admin.pb.h"
#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/page.pb.h"
#include "kvtier/v1/session.pb.h"
#include "kvtier/v1/shared_memory.pb.h"
#include "kvtier/v1/transfer.pb.h"

#include "tests/services/descriptor_rules.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace kvtier::v1 {
namespace {

using google::protobuf::DescriptorProto;
using google::protobuf::FileDescriptorProto;
using google::protobuf::FileDescriptorSet;
using google::protobuf::util::MessageDifferencer;
using kvtier::testing::breaking_changes;
using kvtier::testing::naming_problems;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

/// The API of this build: every file of the package.
FileDescriptorSet linked() {
  FileDescriptorSet set;
  for (const auto* file :
       {GetStatsRequest::descriptor()->file(), AttendRequest::descriptor()->file(),
        AttendOptions::descriptor()->file(), CreateSessionRequest::descriptor()->file(),
        PageLease::descriptor()->file(), ReadPagesRequest::descriptor()->file(),
        CreateAttachmentRequest::descriptor()->file(), ItemStatus::descriptor()->file(),
        Tensor::descriptor()->file()}) {
    file->CopyTo(set.add_file());
  }
  return set;
}

TEST(Proto, SurvivesTheWire) {
  const DecodeRequest request = make_request();
  DecodeRequest parsed;

  ASSERT_TRUE(parsed.ParseFromString(request.SerializeAsString()));
  EXPECT_TRUE(MessageDifferencer::Equals(request, parsed));
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

TEST(Proto, FollowsTheNamingRules) { EXPECT_THAT(naming_problems(linked()), IsEmpty()); }

TEST(Proto, FindsPlantedNamingMistakes) {
  FileDescriptorSet set;
  FileDescriptorProto* file = set.add_file();
  file->set_name("kvtier/v1/x.proto");
  file->set_package("kvtier.v2");
  auto* mode = file->add_enum_type();
  mode->set_name("LayerMode");
  mode->add_value()->set_name("SPARSE");
  auto* method = file->add_service()->add_method();
  method->set_name("Get");
  method->set_input_type(".kvtier.v2.GetRequest");
  method->set_output_type(".kvtier.v2.Thing");

  EXPECT_THAT(naming_problems(set),
              ElementsAre(HasSubstr("package of its folder"), HasSubstr("prefix LAYER_MODE_"),
                          HasSubstr("LAYER_MODE_UNSPECIFIED"), HasSubstr("ends in Service"),
                          HasSubstr("named after the method")));
}

TEST(Proto, StreamsBulkAndStepsAlone) {
  std::vector<std::string> streams;
  const FileDescriptorSet api = linked();
  for (const auto& file : api.file()) {
    for (const auto& service : file.service()) {
      for (const auto& method : service.method()) {
        if (method.client_streaming()) streams.push_back(method.name());
        const bool bulk = method.name() == "ReadPages";
        EXPECT_TRUE(method.client_streaming() || bulk == method.server_streaming());
      }
    }
  }
  EXPECT_THAT(streams,
              ::testing::UnorderedElementsAre("Append", "Decode", "KeepAlive", "WritePages"));
}

class DescriptorSetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::filesystem::path path = KVTIER_DESCRIPTOR_SET;
    if (!std::filesystem::exists(path)) GTEST_SKIP() << "no source tree on this machine";
    std::ifstream in(path, std::ios::binary);
    ASSERT_TRUE(recorded_.ParseFromIstream(&in));
  }

  FileDescriptorSet recorded_;
};

TEST_F(DescriptorSetTest, NothingBreaksClientsOfTheRecordedApi) {
  EXPECT_THAT(breaking_changes(recorded_, linked()), IsEmpty());
}

TEST_F(DescriptorSetTest, RecordsTheWholeApi) {
  EXPECT_THAT(breaking_changes(linked(), recorded_), IsEmpty())
      << "after an addition: cmake --build build/release --target update_descriptor_set";
}

/// Each case changes a copy of the API in one way.
struct Break {
  const char* name;
  void (*plant)(FileDescriptorSet&);
  const char* problem;
};

DescriptorProto& message(FileDescriptorSet& set, const std::string& name) {
  for (auto& file : *set.mutable_file()) {
    for (auto& entry : *file.mutable_message_type()) {
      if (entry.name() == name) return entry;
    }
  }
  throw std::runtime_error("no message " + name);
}

class BreakTest : public ::testing::TestWithParam<Break> {};

TEST_P(BreakTest, IsFound) {
  FileDescriptorSet changed = linked();

  GetParam().plant(changed);

  EXPECT_THAT(breaking_changes(linked(), changed), ElementsAre(HasSubstr(GetParam().problem)));
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, BreakTest,
    ::testing::Values(
        Break{"FieldGone",
              [](FileDescriptorSet& s) { message(s, "Tensor").mutable_field()->RemoveLast(); },
              "Tensor.memory: field 4 is gone"},
        Break{"FieldRenamed",
              [](FileDescriptorSet& s) { message(s, "Tensor").mutable_field(2)->set_name("raw"); },
              "renamed to raw"},
        Break{"FieldRetyped",
              [](FileDescriptorSet& s) {
                message(s, "Tensor")
                    .mutable_field(2)
                    ->set_type(google::protobuf::FieldDescriptorProto::TYPE_STRING);
              },
              "another type"},
        Break{"FieldSingular",
              [](FileDescriptorSet& s) {
                message(s, "Tensor")
                    .mutable_field(1)
                    ->set_label(google::protobuf::FieldDescriptorProto::LABEL_OPTIONAL);
              },
              "another cardinality"},
        Break{"OneofLeft",
              [](FileDescriptorSet& s) {
                message(s, "SelectionSize").mutable_field(0)->clear_oneof_index();
              },
              "another oneof"},
        Break{"NestedGone",
              [](FileDescriptorSet& s) { message(s, "BatchDecodeResponse").clear_nested_type(); },
              "BatchDecodeResponse.Item: the message is gone"},
        Break{"ValueRenumbered",
              [](FileDescriptorSet& s) {
                for (auto& file : *s.mutable_file()) {
                  for (auto& type : *file.mutable_enum_type()) {
                    if (type.name() == "DataType") type.mutable_value(2)->set_number(9);
                  }
                }
              },
              "DATA_TYPE_FLOAT16: another number"},
        Break{"MethodUnary",
              [](FileDescriptorSet& s) {
                for (auto& file : *s.mutable_file()) {
                  for (auto& service : *file.mutable_service()) {
                    for (auto& method : *service.mutable_method()) {
                      if (method.name() == "Append") method.set_client_streaming(false);
                    }
                  }
                }
              },
              "Append: streams differently"},
        Break{"FileGone", [](FileDescriptorSet& s) { s.mutable_file()->RemoveLast(); },
              "tensor.proto: the file is gone"}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace kvtier::v1
