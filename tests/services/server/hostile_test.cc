#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"

#include <gmock/gmock.h>

#include <cstring>
#include <random>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

/// Paths of all methods on the listener of clients.
std::vector<std::string> client_methods() {
  std::vector<std::string> methods;
  for (const auto* file :
       {v1::CreateSessionRequest::descriptor()->file(), v1::AttendRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        methods.push_back("/" + file->service(s)->full_name() + "/" +
                          file->service(s)->method(m)->name());
      }
    }
  }
  return methods;
}

class HostileTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    channel_ = raw_channel(socket());
  }
  RawReply call(const std::string& method, const std::string& bytes,
                const std::vector<std::pair<std::string, std::string>>& metadata = {}) {
    return raw_call(channel_, method, bytes, metadata);
  }
  /// An ordinary call succeeds: the server lives, and so does the connection.
  void expect_alive() {
    v1::CreateSessionRequest request;
    *request.mutable_geometry() = small_geometry();
    const RawReply reply =
        call("/kvtier.v1.SessionService/CreateSession", request.SerializeAsString());
    ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
    v1::CreateSessionResponse response;
    ASSERT_TRUE(response.ParseFromString(reply.bytes));
    v1::ReleaseSessionRequest release;
    release.set_name(response.session().name());
    EXPECT_TRUE(
        call("/kvtier.v1.SessionService/ReleaseSession", release.SerializeAsString()).status.ok());
    EXPECT_EQ(server_->core().num_sessions(), 0U);
  }

  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(HostileTest, EveryMethodNeedsCredentialsWhereTenantsAreConfigured) {
  ServerOptions options = this->options();
  options.core.tenants = two_tenants();
  start(options);
  ASSERT_GT(client_methods().size(), 10U);
  for (const std::string& method : client_methods()) {
    for (const std::string header : {"", "Bearer ", "Bearer wrong", "Basic wrong", "bearer x"}) {
      std::vector<std::pair<std::string, std::string>> metadata;
      if (!header.empty()) metadata.emplace_back("authorization", header);
      const RawReply reply = call(method, "", metadata);
      EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNAUTHENTICATED)
          << method << " with " << header << ": " << reply.status.error_message();
      EXPECT_EQ(reason_of(reply.status), "UNAUTHENTICATED") << method;
    }
  }
}

TEST_F(HostileTest, GarbageEndsNothing) {
  start();
  const auto seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (const std::string& method : client_methods()) {
    for (const std::size_t size : {1U, 7U, 100U, 10'000U}) {
      std::string bytes(size, '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      bytes.replace(0, 5, std::string("\x0A\xFF\xFF\xFF\x7F").substr(0, size));  // longer than all
      const RawReply reply = call(method, bytes);
      // gRPC tells a stream of a message that is none as of its end.
      const bool stream = method.ends_with("/Append") || method.ends_with("/Decode") ||
                          method.ends_with("/KeepAlive");
      EXPECT_TRUE(stream || !reply.status.ok()) << method << ", seed " << seed;
    }
  }
  expect_alive();
}

TEST_F(HostileTest, MutatedRequestsEndNothing) {
  start();
  const auto seed = std::random_device{}();
  std::mt19937_64 random(seed);
  v1::BatchDecodeRequest request;
  *request.add_items() = decode_request("sessions/none", 0, 1, 1);
  request.mutable_items(0)->mutable_options()->mutable_retrieval()->set_tau(0.5F);
  const std::string valid = request.SerializeAsString();
  for (int i = 0; i < 500; ++i) {
    std::string bytes = valid;
    for (int flips = 0; flips < 3; ++flips) {
      bytes[random() % 64] = static_cast<char>(random());
    }
    if (i % 5 == 0) bytes.resize(random() % bytes.size());
    (void)call("/kvtier.v1.AttentionService/BatchDecode", bytes);
  }
  expect_alive();
}

TEST_F(HostileTest, DeepNestingEndsNothing) {
  start();
  std::string bytes;
  for (int i = 0; i < 200'000; ++i) bytes += "\x0B";  // groups within groups
  for (const std::string& method : client_methods()) (void)call(method, bytes);
  EXPECT_FALSE(call("/kvtier.v1.SessionService/GetSession", bytes).status.ok());
  expect_alive();
}

TEST_F(HostileTest, MessagesUpToTheLimitAreRead) {
  start();
  v1::AttendRequest request;
  request.set_session("sessions/none");
  const auto padded = [&request](std::size_t size) {
    request.mutable_query()->mutable_data()->assign(size, 'x');
    const std::size_t excess = request.ByteSizeLong() - size;
    request.mutable_query()->mutable_data()->resize(size - excess);
    return request.SerializeAsString();
  };
  const std::string largest = padded(kMaxMessageBytes);
  ASSERT_EQ(largest.size(), static_cast<std::size_t>(kMaxMessageBytes));
  const std::string method = "/kvtier.v1.AttentionService/Attend";

  EXPECT_EQ(call(method, largest).status.error_code(), grpc::StatusCode::NOT_FOUND);
  const std::string larger = padded(kMaxMessageBytes + 1);
  EXPECT_EQ(call(method, larger).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(call(method, largest).status.error_code(), grpc::StatusCode::NOT_FOUND);
  expect_alive();
}

TEST_F(HostileTest, MetadataBeyondTheLimitIsRefused) {
  start();
  const RawReply reply = call("/kvtier.v1.SessionService/ListSessions", "",
                              {{"authorization", "Bearer " + std::string(16 << 10, 'x')}});
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  channel_ = raw_channel(socket());  // gRPC may close the connection that sent them
  expect_alive();
}

TEST_F(HostileTest, UnknownFieldsAreIgnored) {
  start();
  v1::CreateSessionRequest request;
  *request.mutable_geometry() = small_geometry();
  const std::string unknown = "\xFA\x3F\x05hello";  // field 1023

  const RawReply reply =
      call("/kvtier.v1.SessionService/CreateSession", request.SerializeAsString() + unknown);

  ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
  EXPECT_THAT(reply.bytes, ::testing::Not(HasSubstr("hello")));
}

TEST_F(HostileTest, OperatorsMethodsAreNotOnTheListenerOfClients) {
  start();
  for (const char* method : {"/kvtier.v1.AdminService/GetStats", "/kvtier.v1.AdminService/Drain",
                             "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}) {
    EXPECT_EQ(call(method, "").status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << method;
  }
  const auto admin = raw_channel(admin_socket());
  EXPECT_TRUE(raw_call(admin, "/kvtier.v1.AdminService/GetStats", "").status.ok());
  const std::string list_services = "\x3A\x01*";
  const RawReply reflected = raw_call(
      admin, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", list_services);
  EXPECT_THAT(reflected.bytes, HasSubstr("kvtier.v1.AdminService"));
  EXPECT_EQ(raw_call(admin, "/kvtier.v1.SessionService/ListSessions", "").status.error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(HostileTest, ConnectionsThatComeAndGoEndNothing) {
  start();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = (folder_ / "kvtier.sock").string();
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const std::vector<std::string> greetings{
      "", "GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string(100, '\xFF')};
  for (std::size_t i = 0; i < 2000; ++i) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0) << i;
    const std::string& greeting = greetings[i % greetings.size()];
    (void)::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL);
    ::close(fd);
  }
  // Until the server has seen the ends of those, it may refuse more.
  ASSERT_TRUE(
      channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60)));
  expect_alive();
}

TEST_F(HostileTest, ErrorsNameNothingOfTheServer) {
  start();
  v1::GetSessionRequest request;
  request.set_name("../../etc/passwd\n\x1b[31m");
  const RawReply reply = call("/kvtier.v1.SessionService/GetSession", request.SerializeAsString());
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(reply.status.error_message(), "nothing has this name");
  EXPECT_EQ(reply.status.error_details().find(folder_.string()), std::string::npos);
}

}  // namespace
}  // namespace kvtier::services::testing
