#include "kvtier/v1/shared_memory.pb.h"
#include "kvtier/v1/transfer.pb.h"

#include "services/server/watched_sockets.h"
#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"
#include "tests/support/eventually.h"
#include "tests/support/unix_socket.h"

#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <random>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace kvtier::services::testing {
namespace {

using kvtier::testing::read_to_end;
using ::testing::HasSubstr;

/// Paths of all methods on the listener of clients.
std::vector<std::string> client_methods() {
  std::vector<std::string> methods;
  for (const auto* file :
       {v1::CreateSessionRequest::descriptor()->file(), v1::AttendRequest::descriptor()->file(),
        v1::OpenLeaseRequest::descriptor()->file(), v1::ReadPagesRequest::descriptor()->file(),
        v1::CreateAttachmentRequest::descriptor()->file()}) {
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
  [[nodiscard]] ServerOptions options() const {
    ServerOptions options = ServerTest::options();
    options.data.listen = {parse_endpoint(socket() + ".data")};
    return options;
  }
  void start(ServerOptions options) { ServerTest::start(std::move(options)); }
  void start() { start(options()); }
  /// A connection that speaks for itself.
  [[nodiscard]] int connect() const {
    return kvtier::testing::connect_unix((folder_ / "kvtier.sock").string());
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

TEST_F(HostileTest, TwoAuthorizationHeadersAreNone) {
  ServerOptions options = this->options();
  options.core.tenants = two_tenants();
  options.core.tenants[0].token_sha256 =  // of "secret"
      "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
  start(options);
  const std::string method = "/kvtier.v1.SessionService/ListSessions";
  EXPECT_TRUE(call(method, "", {{"authorization", "Bearer secret"}}).status.ok());
  for (const std::string other : {"Bearer wrong", "Bearer secret", "Basic x"}) {
    EXPECT_EQ(call(method, "", {{"authorization", other}, {"authorization", "Bearer secret"}})
                  .status.error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
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
      EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
          << method << ", seed " << seed;
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

/// Fields of two bytes each, up to the limit of a message, of which protobuf would make hundreds of
/// MB: before anyone has looked who calls.
TEST_F(HostileTest, ManyFieldsAreRefusedBeforeMemoryIsTakenForThem) {
  ServerOptions options = this->options();
  options.core.tenants = two_tenants();
  start(options);
  const auto many = [](const std::string& field) {
    std::string bytes;
    while (bytes.size() + field.size() <= (std::size_t{1} << 20)) bytes += field;
    return bytes;
  };
  const std::string items = many(std::string("\x0A\0", 2));    // field 1, of no bytes
  const std::string unknown = many(std::string("\x7A\0", 2));  // field 15
  const std::string groups = many("\x7B\x7C");                 // field 15, begun and ended
  const std::string nested = std::string("\x0A\x80\x80\x40", 4) + unknown;
  const std::vector<std::pair<std::string, std::string>> messages{
      {"/kvtier.v1.AttentionService/BatchDecode", items},
      {"/kvtier.v1.AttentionService/BatchDecode", nested},
      {"/kvtier.v1.SessionService/KeepAlive", items},
      {"/kvtier.v1.AttentionService/Decode", unknown},
      {"/kvtier.v1.AttentionService/Append", groups},
      {"/kvtier.v1.SessionService/GetSession", unknown}};
  const std::pair<std::string, std::string> token{"authorization", "Bearer wrong"};
  for (const auto& [method, bytes] : messages) {
    const bool is_stream = method.ends_with("/KeepAlive") || method.ends_with("/Decode") ||
                           method.ends_with("/Append");
    const RawReply reply = call(method, bytes, {token});
    if (is_stream) {
      EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
    } else {
      EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
      EXPECT_THAT(reply.status.error_message(), HasSubstr("at most 131072 fields")) << method;
    }
  }
  server_.reset();
  start();
  channel_ = raw_channel(socket());
  for (const auto& [method, bytes] : messages) {
    const RawReply reply = call(method, bytes);
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_THAT(reply.status.error_message(), HasSubstr("at most 131072 fields")) << method;
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
  const std::vector<std::string> greetings{
      "", "GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string(100, '\xFF')};
  for (std::size_t i = 0; i < 2000; ++i) {
    const int fd = connect();
    const std::string& greeting = greetings[i % greetings.size()];
    (void)::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL);
    ::close(fd);
  }
  // Until the server has seen the ends of those, it may refuse more.
  ASSERT_TRUE(
      channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60)));
  expect_alive();
}

std::string frame(char type, char flags, std::uint32_t stream, const std::string& payload) {
  std::string bytes;
  for (int shift = 16; shift >= 0; shift -= 8) bytes += static_cast<char>(payload.size() >> shift);
  bytes += {type, flags};
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(stream >> shift);
  return bytes + payload;
}

std::string repeated(const std::string& text, int times) {
  std::string bytes;
  for (int i = 0; i < times; ++i) bytes += text;
  return bytes;
}

/// What a client of HTTP/2 says first, with empty SETTINGS.
std::string http2_greeting() { return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, ""); }

// RFC 9113, sections 5 and 6.
TEST_F(HostileTest, FramesThatBreakHttp2EndNothing) {
  start();
  const std::string greeting = http2_greeting();
  const std::string get = "\x82\x86\x84\x41\x01x";  // indexed fields, and an authority
  std::string resets;
  for (std::uint32_t stream = 1; stream < 1000; stream += 2) {
    resets += frame(1, 4, stream, get) + frame(3, 0, stream, std::string(4, '\x08'));
  }
  std::vector<std::string> attacks{
      repeated(frame(4, 0, 0, ""), 2000),
      repeated(frame(6, 0, 0, std::string(8, 'p')), 2000),
      resets,
      frame(1, 0, 1, get) + repeated(frame(9, 0, 1, std::string(8192, '\0')), 64),  // never ends
      frame(1, 4, 1, "\x00\x7F\xFF\xFF\xFF\x7F" + std::string(100, 'x')),           // a long name
      frame(1, 4, 1, std::string(9, '\xFF')),  // an index without end
      frame(1, 12, 1, "\xFF" + get),           // padding beyond the frame
      frame(1, 4, 0, get) + frame(0, 0, 0, "data of no stream"),
      frame(0, 0, 7, "data of a stream that is not open"),
      frame(8, 0, 0, "\x7F\xFF\xFF\xFF") + frame(8, 0, 0, "\x7F\xFF\xFF\xFF"),
      frame(4, 0, 0, std::string(5, '\x03')) + frame(4, 1, 0, std::string(6, '\x03')),
      "\xFF\xFF\xFF" + frame(0, 0, 1, std::string(1000, 'x')).substr(3),  // a length above all
      frame(5, 4, 1, get) + frame(2, 0, 1, "12345")};
  const auto seed = std::random_device{}();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    std::string frames;
    for (int j = 0; j < 20; ++j) {
      std::string payload(random() % 64, '\0');
      for (char& byte : payload) byte = static_cast<char>(random());
      frames += frame(static_cast<char>(random() % 11), static_cast<char>(random()),
                      static_cast<std::uint32_t>(random() % 8), payload);
    }
    attacks.push_back(std::move(frames));
  }
  for (const std::string& attack : attacks) {
    const int fd = connect();
    const std::string bytes = greeting + attack;
    (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)::shutdown(fd, SHUT_WR);
    (void)read_to_end(fd);
    ::close(fd);
  }
  SCOPED_TRACE(seed);
  expect_alive();
}

// gRPC would keep memory for all of it, before there is a call.
TEST_F(HostileTest, HeadersWithoutEndAndResetsEndTheirConnection) {
  start();
  const WatchedCounts before = watched_counts();
  const int headers = connect();
  std::string bytes = http2_greeting() + frame(1, 0, 1, "\x82");
  int sent = 0;  // pieces of 16 KiB
  while (sent < 2048 && ::send(headers, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    bytes = frame(9, 0, 1, std::string(1 << 14, '\x82'));
    ++sent;
  }
  ::close(headers);
  EXPECT_LT(sent, 2048);
  EXPECT_EQ(watched_counts().headers, before.headers + 1);

  const int resets = connect();
  bytes = http2_greeting();
  for (std::uint32_t stream = 1; stream < 4000; stream += 2) {
    bytes += frame(1, 5, stream, "\x83\x86\x84\x41\x01x") + frame(3, 0, stream, "\x08\x08\x08\x08");
  }
  (void)::send(resets, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  (void)read_to_end(resets);
  ::close(resets);
  EXPECT_EQ(watched_counts().resets, before.resets + 1);
  expect_alive();
}

/// Fields of HPACK (RFC 7541), neither indexed nor Huffman-coded.
std::string header(const std::string& name, const std::string& value) {
  return std::string("\0", 1) + static_cast<char>(name.size()) + name +
         static_cast<char>(value.size()) + value;
}

/// A call of a method that is none, as the stream 1.
std::string http2_call() {
  return frame(1, 5, 1,
               header(":method", "POST") + header(":scheme", "http") + header(":path", "/x") +
                   header(":authority", "x") + header("content-type", "application/grpc") +
                   header("te", "trailers"));
}

TEST_F(HostileTest, DescriptorsDoNotReachGrpc) {
  start();
  const int client = connect();
  const int descriptor = client;
  int passes = 0;
  socklen_t size = sizeof passes;
  constexpr int kPassRights = 83;
  if (::getsockopt(client, SOL_SOCKET, kPassRights, &passes, &size) != 0) {
    ::close(client);
    GTEST_SKIP() << "this kernel has no SO_PASSRIGHTS (Linux 6.16)";
  }
  std::array<char, CMSG_SPACE(sizeof descriptor)> control{};
  char byte = 'P';
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);

  EXPECT_EQ(::sendmsg(client, &message, MSG_NOSIGNAL), -1);
  EXPECT_EQ(errno, EPERM);
  message.msg_control = nullptr;
  message.msg_controllen = 0;
  EXPECT_EQ(::sendmsg(client, &message, MSG_NOSIGNAL), 1) << "bytes alone pass";
  ::close(client);
}

TEST_F(HostileTest, ConnectionWhoseClientIsSilentIsClosed) {
  ServerOptions options = this->options();
  options.keepalive = std::chrono::milliseconds(1);
  options.keepalive_timeout = std::chrono::milliseconds(1);
  start(options);
  const int fd = connect();
  const std::string bytes = http2_greeting() + http2_call();  // and never an answer to a PING
  ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  (void)read_to_end(fd);
  ::close(fd);
}

TEST_F(HostileTest, ClientThatPingsTooOftenIsSentAway) {
  start();
  const int fd = connect();
  const std::string bytes = http2_greeting() + repeated(frame(6, 0, 0, "8 bytes!"), 10);
  ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  const std::string replies = read_to_end(fd);
  ::close(fd);
  EXPECT_THAT(replies, HasSubstr("too_many_pings"));
  expect_alive();
}

/// Holds the answers to GetSession back.
class HeldAnswers final : public ServiceCoreObserver {
 public:
  void finished(const Operation& operation) noexcept override {
    if (operation.method != "SessionService/GetSession") return;
    reached_.set_value();
    kvtier::testing::await(released_);
  }
  void lease_renewed(std::chrono::nanoseconds /*remaining*/) noexcept override {}
  void device_failed() noexcept override {}
  void await() { kvtier::testing::await(reached_); }
  void release() { released_.set_value(); }

 private:
  std::promise<void> reached_, released_;
};

// gRPC's own shutdown would wait 20 s for the one, and the hour for the other.
TEST_F(HostileTest, DrainEndsWithTheLastCallAndWaitsForNoIdleClient) {
  HeldAnswers answers;
  ServerOptions options = this->options();
  options.core.observers.push_back(&answers);
  start(options);
  v1::CreateSessionRequest create;
  *create.mutable_geometry() = small_geometry();
  v1::CreateSessionResponse created;
  ASSERT_TRUE(created.ParseFromString(
      call("/kvtier.v1.SessionService/CreateSession", create.SerializeAsString()).bytes));
  const int idle = connect();
  const std::string greeting = http2_greeting();
  ASSERT_EQ(::send(idle, greeting.data(), greeting.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(greeting.size()));
  char byte = 0;
  ASSERT_EQ(::recv(idle, &byte, 1, 0), 1);  // the server's SETTINGS: it knows this client
  grpc::ClientContext watching;
  const grpc::Slice no_bytes;
  const grpc::ByteBuffer all_services(&no_bytes, 1);
  const std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> watch(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(
          channel_.get(),
          grpc::internal::RpcMethod("/grpc.health.v1.Health/Watch",
                                    grpc::internal::RpcMethod::SERVER_STREAMING, channel_),
          &watching, all_services));
  grpc::ByteBuffer health;
  ASSERT_TRUE(watch->Read(&health));
  std::future<RawReply> last = std::async(std::launch::async, [&] {
    v1::GetSessionRequest get;
    get.set_name(created.session().name());
    return call("/kvtier.v1.SessionService/GetSession", get.SerializeAsString());
  });
  answers.await();

  std::thread drain([this] { server_->drain(std::chrono::hours(1)); });
  EXPECT_TRUE(kvtier::testing::eventually([this] { return server_->core().draining(); }));
  answers.release();
  drain.join();

  EXPECT_TRUE(last.get().status.ok());
  EXPECT_TRUE(watch->Read(&health));   // that it serves no more
  EXPECT_FALSE(watch->Read(&health));  // cut off
  EXPECT_FALSE(watch->Finish().ok());
  (void)read_to_end(idle);
  ::close(idle);
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
