#include "services/dataplane/connection.h"
#include "tests/services/base/certificates.h"
#include "tests/services/dataplane/killed_client.h"
#include "tests/services/dataplane/plane_fixture.h"
#include "tests/services/wire/copy_page.h"

#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <future>
#include <optional>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>

namespace kvtier::services::testing {
namespace {

using ::testing::HasSubstr;

class AttachTest : public PlaneTest {
 protected:
  std::string reason_with(const std::string& token) {
    return reason_of([&] {
      DataChannel({.endpoint = plane_->endpoints()[0].text(), .token = token, .tls = {}});
    });
  }
  v1::ListAttachmentsResponse list(std::size_t index, const std::string& page = "", int size = 0) {
    v1::ListAttachmentsRequest request;
    request.set_page_token(page);
    request.set_page_size(size);
    v1::ListAttachmentsResponse response;
    plane_->attachments().list(tenant(index), request, response);
    return response;
  }
};

/// Reads a batch of no pages over a connection: "OK", or the reason of the refusal.
std::string ask(DataChannel& channel) {
  return reason_of([&] {
    (void)channel.reply_to(
        channel.send(FrameType::kReadPages, kInline, encode(std::vector<PageDescriptor>{})));
  });
}

TEST_F(AttachTest, SharesMemoryWhoseSizeIsSealed) {
  start();
  const auto channel = attach();

  ASSERT_EQ(channel->staging().size(), std::size_t{1} << 20);
  EXPECT_EQ(list(0).attachments_size(), 1);
  EXPECT_TRUE(list(0).attachments(0).connected());
  channel->staging()[12345] = std::byte{1};
}

TEST_F(AttachTest, MemoryCannotBeTakenAway) {
  const SharedRegion region = SharedRegion::create(8192);
  EXPECT_NE(::ftruncate(region.descriptor(), 4096), 0);
  EXPECT_NE(::ftruncate(region.descriptor(), 16384), 0);
  EXPECT_NE(::fcntl(region.descriptor(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST_F(AttachTest, MapsNoFileThatMayShrink) {
  const auto error_of = [](int file) {
    return reason_of([&] { (void)SharedRegion::map(Descriptor(file), 4096, false); });
  };
  const int unsealed = ::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(unsealed, 8192), 0);
  EXPECT_THAT(error_of(unsealed), HasSubstr("sealed"));
  EXPECT_THAT(error_of(::open("/dev/zero", O_RDWR | O_CLOEXEC)), HasSubstr("expected a file"));
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  EXPECT_THAT(error_of(pipe[0]), HasSubstr("expected a file"));
  ::close(pipe[1]);
  const SharedRegion small = SharedRegion::create(4096);
  EXPECT_THAT(reason_of([&] {
                (void)SharedRegion::map(Descriptor(::dup(small.descriptor())), 8192, false);
              }),
              HasSubstr("at least 8192"));
}

TEST_F(AttachTest, TakesATokenOnce) {
  start();
  const std::string once = token();
  const DataChannel channel({.endpoint = plane_->endpoints()[0].text(), .token = once, .tls = {}});

  EXPECT_EQ(reason_with(once), "UNAUTHENTICATED");
  EXPECT_EQ(plane_->counters().refused, 1U);
  EXPECT_EQ(plane_->counters().attached, 1U);
}

TEST_F(AttachTest, RefusesForgedTokens) {
  start();
  const std::string good = token();
  std::mt19937_64 random(3);
  for (int i = 0; i < 100; ++i) {
    std::string forged = good;
    forged[random() % forged.size()] ^= static_cast<char>(1U << random() % 8);
    ASSERT_EQ(reason_with(forged), "UNAUTHENTICATED");
  }
  EXPECT_EQ(reason_with(good), "OK");
}

/// A client whose bytes arrive when the test says so.
class LateClient final : public ByteStream {
 public:
  struct Read {
    std::span<std::byte> into;
    Handler done;
  };
  explicit LateClient(std::optional<Read>& read) : read_(read) {}

  void start(std::function<void(const boost::system::error_code&)> done) override { done({}); }
  void read_some(std::span<std::byte> into, Handler done) override {
    read_ = {into, std::move(done)};
  }
  void write_some(std::span<const iovec> /*pieces*/, Handler /*done*/) override {}
  std::ptrdiff_t try_write(std::span<const iovec> /*pieces*/,
                           std::span<const int> /*descriptors*/) override {
    return -1;
  }
  void close() override {}
  [[nodiscard]] bool shares_memory() const noexcept override { return false; }

 private:
  std::optional<Read>& read_;
};

TEST_F(AttachTest, ATokenThatHasComeWhenItsConnectionEndsIsNotUsed) {
  start();
  boost::asio::io_context loop;
  DataPlaneCounters counters;
  ConnectionContext context{*core_, *pages_,  plane_->attachments(),
                            {},     counters, std::chrono::steady_clock::now};
  std::optional<LateClient::Read> read;
  auto connection = std::make_shared<DataConnection>(
      context, loop.get_executor(), std::make_unique<LateClient>(read), [](DataConnection&) {});
  connection->start();
  ASSERT_TRUE(read);
  const std::string secret = token();
  const auto control = std::as_bytes(std::span(secret));
  const HeaderBytes header = encode_header(make_header(FrameType::kAttach, 0, 1, control, 0));
  ASSERT_EQ(read->into.size(), header.size() + control.size());
  std::ranges::copy(control, std::ranges::copy(header, read->into.begin()).out);

  connection->close_now();
  loop.poll();  // before it runs what has been read
  LateClient::Read arrived = *std::exchange(read, std::nullopt);
  arrived.done({}, arrived.into.size());
  loop.restart();
  loop.poll();

  ASSERT_EQ(list(0).attachments_size(), 1);
  EXPECT_FALSE(list(0).attachments(0).connected()) << "nothing would end it";
}

/// A server whose queue of connections is full, until this ends.
class FullServer {
 public:
  explicit FullServer(const std::string& path) : server_(open()) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    const auto* const at = reinterpret_cast<const sockaddr*>(&address);
    EXPECT_EQ(::bind(server_.get(), at, sizeof(address)), 0);
    EXPECT_EQ(::listen(server_.get(), 0), 0);
    do {
      waiting_.push_back(open());
    } while (::connect(waiting_.back().get(), at, sizeof(address)) == 0);
  }
  void end() { server_.reset(); }

 private:
  static Descriptor open() { return Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0)); }

  Descriptor server_;
  std::vector<Descriptor> waiting_;
};

/// Returns how a client that waits for 50 ms fails to connect.
std::optional<ErrorCode> code_of_connect(const std::string& endpoint) {
  try {
    DataChannel({.endpoint = endpoint,
                 .token = std::string(kAttachTokenBytes, 't'),
                 .tls = {},
                 .timeout = std::chrono::milliseconds(50)});
  } catch (const ClientError& error) {
    return error.code();
  }
  return std::nullopt;
}

TEST_F(AttachTest, AServerThatAcceptsNobodyIsWaitedForAsLongAsTheTimeout) {
  FullServer server(socket().substr(5));
  auto code = std::async(std::launch::async, [&] { return code_of_connect(socket()); });

  const bool ended = code.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  server.end();  // ends it in any case
  EXPECT_TRUE(ended);
  EXPECT_EQ(code.get(), ErrorCode::kDeadlineExceeded);
}

TEST_F(AttachTest, ASignalDoesNotEndTheWaitForAServer) {
  FullServer server(socket().substr(5));
  struct sigaction handled {};
  struct sigaction before {};
  handled.sa_handler = [](int /*signal*/) {};
  handled.sa_flags = SA_RESTART;
  ASSERT_EQ(::sigaction(SIGUSR1, &handled, &before), 0);
  std::promise<std::optional<ErrorCode>> connected;
  std::future<std::optional<ErrorCode>> code = connected.get_future();
  std::thread client([&] { connected.set_value(code_of_connect(socket())); });

  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (code.wait_for(std::chrono::milliseconds(5)) != std::future_status::ready) {
    if (std::chrono::steady_clock::now() > end) server.end();
    ASSERT_EQ(::pthread_kill(client.native_handle(), SIGUSR1), 0);
  }
  client.join();
  ASSERT_EQ(::sigaction(SIGUSR1, &before, nullptr), 0);
  EXPECT_EQ(code.get(), ErrorCode::kDeadlineExceeded);
}

TEST_F(AttachTest, RefusesTheTokenOfAnotherProcess) {
  start();
  EXPECT_EQ(reason_with(token(0, ::getpid() + 1)), "UNAUTHENTICATED");
  EXPECT_EQ(reason_with(token(0, ::getpid())), "OK");
}

TEST_F(AttachTest, ForgetsTokensThatAreNotUsed) {
  TimePoint now{};
  Attachments attachments({.token_life = std::chrono::seconds(5)}, [&] { return now; });
  Tenant tenant(0, {});
  const std::string late = attachments.create(tenant, 0, 0).token;
  now += std::chrono::seconds(6);

  EXPECT_THROW((void)attachments.redeem(late, {}, {}), ServiceError);
  attachments.sweep();

  EXPECT_EQ(attachments.size(), 0U);
  EXPECT_EQ(attachments.staging_bytes(), 0);
}

TEST_F(AttachTest, BoundsAttachmentsAndTheirMemory) {
  TimePoint now{};
  Attachments attachments({.max_attachments = 3, .max_total_staging_bytes = 32 << 20},
                          [&] { return now; });
  Tenant tenant(0, {});
  const auto reason = [&](std::int64_t process, std::int64_t bytes) -> std::string {
    try {
      (void)attachments.create(tenant, process, bytes);
    } catch (const ServiceError& error) {
      return error.reason() + " " + error.field();
    }
    return "OK";
  };
  EXPECT_EQ(reason(0, -1), "INVALID_ARGUMENT staging_bytes");
  EXPECT_EQ(reason(0, (64 << 20) + 1), "INVALID_ARGUMENT staging_bytes");
  EXPECT_EQ(reason(-1, 0), "INVALID_ARGUMENT process_id");
  EXPECT_EQ(reason(0, 33 << 20), "TOO_MANY_ATTACHMENTS ");
  EXPECT_EQ(reason(0, 24 << 20), "OK");
  EXPECT_EQ(reason(0, 1), "OK");
  EXPECT_EQ(reason(0, 4096), "OK");
  EXPECT_EQ(reason(0, 1), "TOO_MANY_ATTACHMENTS ");
  EXPECT_EQ(attachments.staging_bytes(), (24 << 20) + 4096 + 4096);
}

TEST_F(AttachTest, ListsAndDeletesATenantsOwn) {
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  start(options, {});
  const auto channel = attach(0);
  for (int i = 0; i < 3; ++i) (void)token(0);
  (void)token(1);

  EXPECT_EQ(list(1).attachments_size(), 1);
  const v1::ListAttachmentsResponse first = list(0, "", 3);
  EXPECT_EQ(first.attachments_size(), 3);
  EXPECT_EQ(list(0, first.next_page_token(), 3).attachments_size(), 1);
  const v1::ListAttachmentsResponse all = list(0);
  EXPECT_THROW(plane_->attachments().remove(tenant(1), all.attachments(0).name()), ServiceError);
  EXPECT_THROW(plane_->attachments().remove(tenant(0), "attachments/none"), ServiceError);
  for (const auto& attachment : all.attachments()) {
    plane_->attachments().remove(tenant(0), attachment.name());
  }

  EXPECT_EQ(reason_of([&] { (void)channel->receive(); }), "DELETED");
  EXPECT_TRUE(channel->broken());
  EXPECT_EQ(list(0).attachments_size(), 0);
}

TEST_F(AttachTest, GivesEverythingBackWhenClientsGo) {
  start();
  (void)attach();  // the first takes what all share
  ASSERT_TRUE(all_is_free());
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 20; ++i) (void)attach();
  ASSERT_TRUE(all_is_free());
  EXPECT_TRUE(eventually([&] { return open_descriptors() == before; }));
  EXPECT_EQ(plane_->counters().attached, 21U);
}

TEST_F(AttachTest, GivesEverythingBackWhenClientsAreKilled) {
  start();
  (void)attach();  // the first takes what all share
  ASSERT_TRUE(all_is_free());
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 10; ++i) {
    // The reply is never read.
    ASSERT_NO_FATAL_FAILURE(run_and_kill_client(plane_->endpoints()[0].text(), token()));
  }
  ASSERT_TRUE(all_is_free());
  EXPECT_TRUE(eventually([&] { return open_descriptors() == before; }));
}

TEST_F(AttachTest, RegionsOutliveTheServer) {
  start();
  const auto lease = open_lease();
  const std::string handle = store_page(*lease, 1);
  const auto channel = attach();
  ASSERT_TRUE(channel->arena());
  const std::uint64_t id = channel->send(
      FrameType::kReadPages, 0, encode(std::vector<PageDescriptor>{descriptor_of(handle)}));
  const PageOutcome page = decode_outcomes(channel->reply_to(id).control()).at(0);

  plane_->stop(std::chrono::milliseconds(0));
  pages_->close(tenant(), lease->name);
  plane_.reset();
  pages_.reset();

  channel->staging()[0] = std::byte{1};  // no SIGBUS
  std::vector<std::byte> bytes(page.bytes);
  (void)copy_page(*channel->arena(), page.slot, page.generation, bytes);
  EXPECT_EQ(reason_of([&] { (void)channel->receive(); }), "DRAINING");
  EXPECT_EQ(reason_of([&] { (void)channel->send(FrameType::kReadPages, 0, Bytes(4)); }),
            "DISCONNECTED");
}

TEST_F(AttachTest, NewConnectionsSeeTheNewCertificate) {
  std::filesystem::create_directory(folder_ / "new");
  const Authority before(folder_, "ca");
  const Authority after(folder_ / "new", "ca");
  const auto identity_of = [](const Authority& authority) {
    const Certificate own = authority.issue("localhost");
    return read_tls_files({own.certificate, own.key, authority.certificate()});
  };
  start(small_options(),
        {.listen = {parse_endpoint("tcp:127.0.0.1:0")}, .attachments = {}, .limits = {}},
        identity_of(before));
  const auto connect = [&](const Authority& authority) {
    const Certificate client = authority.issue("client");
    return std::make_unique<DataChannel>(
        DataChannelOptions{.endpoint = plane_->endpoints()[0].text(),
                           .token = token(),
                           .tls = {authority.certificate(), client.certificate, client.key}});
  };
  const auto older = connect(before);
  ASSERT_EQ(ask(*older), "OK");

  TlsIdentity mixed = identity_of(after);
  mixed.key = identity_of(before).key;
  EXPECT_THROW(plane_->use_tls(mixed), Error);
  EXPECT_EQ(reason_of([&] { (void)connect(before); }), "OK") << "the former one stays";
  plane_->use_tls(identity_of(after));

  EXPECT_EQ(reason_of([&] { (void)connect(after); }), "OK");
  EXPECT_EQ(reason_of([&] { (void)connect(before); }), "DISCONNECTED");
  EXPECT_EQ(ask(*older), "OK") << "goes on";
}

TEST_F(AttachTest, OverTlsATokenIsItsCertificatesTenants) {
  const Authority authority(folder_, "ca");
  const Certificate own = authority.issue("localhost");
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  options.tenants[0].certificate = "first.example";
  options.tenants[1].certificate = "second.example";
  start(options, {.listen = {parse_endpoint("tcp:127.0.0.1:0")}, .attachments = {}, .limits = {}},
        read_tls_files({own.certificate, own.key, authority.certificate()}));
  const Certificate first = authority.issue("first.example");
  const auto reason = [&](const Certificate& certificate, const std::string& with) {
    return reason_of([&] {
      const DataChannel channel(
          {.endpoint = plane_->endpoints()[0].text(),
           .token = with,
           .tls = {authority.certificate(), certificate.certificate, certificate.key}});
      EXPECT_TRUE(channel.staging().empty());
    });
  };

  EXPECT_EQ(reason(first, token(0)), "OK");
  EXPECT_EQ(reason(first, token(1)), "UNAUTHENTICATED");
  EXPECT_EQ(reason(authority.issue("third.example"), token(0)), "UNAUTHENTICATED");
  std::filesystem::create_directory(folder_ / "other");
  const Authority other(folder_ / "other", "ca");
  EXPECT_EQ(reason(other.issue("first.example"), token(0)), "DISCONNECTED");
  EXPECT_EQ(reason_of([&] {
              DataChannel({.endpoint = plane_->endpoints()[0].text(),
                           .token = token(0),
                           .tls = {},
                           .timeout = std::chrono::seconds(5)});
            }),
            "DISCONNECTED");
}

TEST_F(AttachTest, ConnectionsOfRevokedCertificatesEnd) {
  const Authority authority(folder_, "ca");
  const Certificate own = authority.issue("localhost");
  ServiceCoreOptions options = small_options();
  options.tenants = two_tenants();
  options.tenants[0].certificate = "first.example";
  options.tenants[1].certificate = "second.example";
  TlsIdentity identity = read_tls_files({own.certificate, own.key, authority.certificate()});
  start(options, {.listen = {parse_endpoint("tcp:127.0.0.1:0")}, .attachments = {}, .limits = {}},
        identity);
  const Certificate first = authority.issue("first.example");
  const Certificate second = authority.issue("second.example");
  const auto connect = [&](const Certificate& certificate, std::size_t tenant) {
    return std::make_unique<DataChannel>(DataChannelOptions{
        .endpoint = plane_->endpoints()[0].text(),
        .token = token(tenant),
        .tls = {authority.certificate(), certificate.certificate, certificate.key}});
  };
  const auto of_first = connect(first, 0);
  const auto of_second = connect(second, 1);
  ASSERT_EQ(ask(*of_first), "OK");

  core_->revoke(std::make_shared<const RevocationList>(read_pem(authority.revoke({first})),
                                                       identity.client_ca));

  EXPECT_EQ(ask(*of_first), "UNAUTHENTICATED");
  EXPECT_EQ(ask(*of_first), "DISCONNECTED");
  EXPECT_EQ(ask(*of_second), "OK");
  EXPECT_EQ(reason_of([&] { (void)connect(first, 0); }), "UNAUTHENTICATED");
}

}  // namespace
}  // namespace kvtier::services::testing
