#include "kvtier/client.h"

#include "services/metrics/server_metrics.h"
#include "services/server/watched_sockets.h"
#include "tests/services/base/certificates.h"
#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/write.hpp>
#include <gmock/gmock.h>

namespace kvtier::services::testing {
namespace {

/// A server on TCP with two tenants, who are known by their certificates.
class TlsTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    authority_ = std::make_unique<Authority>(folder_, "ca");
    const Certificate own = authority_->issue("localhost");
    ServerOptions options = this->options();
    options.admin.clear();
    options.listen = {parse_endpoint("tcp:127.0.0.1:0")};
    options.tls = {
        .certificate = own.certificate, .key = own.key, .client_ca = authority_->certificate()};
    options.core.tenants = two_tenants();
    options.core.tenants[0].certificate = "first.example";
    options.core.tenants[1].certificate = "second.example";
    files_ = options.tls;
    start(options);
  }

  ClientOptions client_options(const Certificate& certificate) const {
    return {.server = server_->endpoints()[0].text(),
            .tls_server_ca = authority_->certificate(),
            .tls_certificate = certificate.certificate,
            .tls_key = certificate.key,
            .timeout = kvtier::testing::kPatience,
            .attempts = 1};
  }
  /// Returns "OK", or the code and the reason of the refusal.
  static std::string open(const ClientOptions& options) {
    try {
      Client client(options);
      RemoteSessionConfig config;
      config.model = {.layers = kLayers,
                      .query_heads = kQueryHeads,
                      .kv_heads = kKvHeads,
                      .head_dim = kHeadDim};
      (void)client.open(config);
      return "OK";
    } catch (const ClientError& error) {
      return std::string(error_code_name(error.code())) + " " + error.reason();
    }
  }

  TlsFiles files_;
  std::unique_ptr<Authority> authority_;
};

TEST_F(TlsTest, CertificatesNameTheirTenants) {
  EXPECT_EQ(open(client_options(authority_->issue("first.example"))), "OK");
  EXPECT_EQ(open(client_options(authority_->issue("second.example"))), "OK");
  EXPECT_EQ(open(client_options(authority_->issue("third.example"))),
            "FAILED_PRECONDITION UNAUTHENTICATED");
}

// As of HostileTest.HeadersWithoutEndAndResetsEndTheirConnection, of a tenant.
TEST_F(TlsTest, HeadersWithoutEndEndTheirConnection) {
  namespace asio = boost::asio;
  const Certificate own = authority_->issue("first.example");
  asio::ssl::context context(asio::ssl::context::tls_client);
  context.load_verify_file(authority_->certificate());
  context.use_certificate_chain_file(own.certificate);
  context.use_private_key_file(own.key, asio::ssl::context::pem);
  asio::io_context io;
  asio::ssl::stream<asio::ip::tcp::socket> stream(io, context);
  const unsigned char protocols[] = "\x02h2";
  ASSERT_EQ(SSL_set_alpn_protos(stream.native_handle(), protocols, 3), 0);
  const auto port = static_cast<std::uint16_t>(server_->endpoints()[0].port);
  stream.next_layer().connect({asio::ip::address_v4::loopback(), port});
  stream.handshake(asio::ssl::stream_base::client);
  const WatchedCounts before = watched_counts();

  const auto frame = [](char type, const std::string& payload) {
    const auto size = payload.size();
    return std::string{static_cast<char>(size >> 16),
                       static_cast<char>(size >> 8),
                       static_cast<char>(size),
                       type,
                       0,
                       0,
                       0,
                       0,
                       type == 4 ? '\0' : '\1'} +
           payload;
  };
  std::string sent = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, "") + frame(1, "\x82");
  boost::system::error_code error;
  for (int i = 0; i < 4096 && !error; ++i) {
    asio::write(stream, asio::buffer(sent), error);
    sent = frame(9, std::string(1 << 13, '\x82'));
  }

  EXPECT_TRUE(error) << "32 MiB were taken";
  EXPECT_EQ(watched_counts().headers, before.headers + 1);
  EXPECT_EQ(open(client_options(own)), "OK");
}

TEST_F(TlsTest, StoredPrefixesStayWithTheirTenant) {
  Client first(client_options(authority_->issue("first.example")));
  Client second(client_options(authority_->issue("second.example")));
  const std::vector<std::int32_t> ids(64, 5);
  RemoteSessionConfig config;
  config.model = {
      .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
  config.token_ids = ids;
  config.model_fingerprint = "m";
  RemoteSession session = first.open(config);
  const std::vector<float> rows(ids.size() * kKvHeads * kHeadDim, 0.5F);
  const TensorView tokens{rows.data(), DType::kFloat32, {64, kKvHeads, kHeadDim}};
  for (int layer = 0; layer < kLayers; ++layer) session.append(layer, tokens, tokens);
  session.publish(ids);

  EXPECT_EQ(first.open(config).length(), 64);
  EXPECT_EQ(second.open(config).length(), 0);
}

TEST_F(TlsTest, CertificatesOfAnotherAuthorityAreRefused) {
  const Authority other(folder_, "other");
  EXPECT_EQ(open(client_options(other.issue("first.example"))), "UNAVAILABLE ");
}

TEST_F(TlsTest, ServersOfAnotherAuthorityAreRefused) {
  const Authority other(folder_, "other");
  ClientOptions options = client_options(authority_->issue("first.example"));
  options.tls_server_ca = other.certificate();
  EXPECT_EQ(open(options), "UNAVAILABLE ");
}

TEST_F(TlsTest, PlaintextIsRefused) {
  ClientOptions options = client_options({});
  options.tls_server_ca.clear();
  options.insecure_tcp = true;
  EXPECT_EQ(open(options), "UNAVAILABLE ");
  const auto channel = raw_channel("127.0.0.1:" + std::to_string(server_->endpoints()[0].port));
  EXPECT_FALSE(raw_call(channel, "/kvtier.v1.SessionService/ListSessions", "").status.ok());
}

TEST_F(TlsTest, NewConnectionsSeeFilesThatWereReplaced) {
  const ClientOptions before = client_options(authority_->issue("first.example"));
  Client older(before);
  RemoteSessionConfig config;
  config.model = {
      .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
  RemoteSession session = older.open(config);
  std::filesystem::create_directory(folder_ / "new");
  const Authority authority(folder_ / "new", "ca");
  const Certificate own = authority.issue("localhost");
  ClientOptions after = client_options(authority.issue("first.example"));
  after.tls_server_ca = authority.certificate();
  const auto replace = [](const std::string& from, const std::string& to) {
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
  };
  ASSERT_EQ(open(after), "UNAVAILABLE ");

  replace(own.certificate, files_.certificate);
  replace(authority.certificate(), files_.client_ca);
  EXPECT_THROW(server_->reload_tls(), Error) << "with the key of the former certificate";
  EXPECT_EQ(open(after), "UNAVAILABLE ");
  std::filesystem::remove(files_.key);
  EXPECT_THROW(server_->reload_tls(), Error);
  replace(own.key, files_.key);
  server_->reload_tls();

  EXPECT_EQ(open(after), "OK");
  session.refresh();  // over the connection of before
  ClientOptions again = before;
  again.tls_server_ca = authority.certificate();
  EXPECT_EQ(open(again), "UNAVAILABLE ") << "a certificate of the former authority";
  EXPECT_THAT(
      server_->metrics().text(),
      ::testing::AllOf(::testing::HasSubstr("kvtier_tls_reloads_total{result=\"ok\"} 1"),
                       ::testing::HasSubstr("kvtier_tls_reloads_total{result=\"refused\"} 2")));
}

TEST_F(TlsTest, RevokedCertificatesAreNoCredentials) {
  const Certificate lost = authority_->issue("first.example");
  std::filesystem::create_directory(folder_ / "kept");
  const auto keep = [&](const Certificate& from) {
    Certificate kept{(folder_ / "kept/c.pem").string(), (folder_ / "kept/c.key").string()};
    std::filesystem::rename(from.certificate, kept.certificate);
    std::filesystem::rename(from.key, kept.key);
    return kept;
  };
  const ClientOptions of_lost = client_options(keep(lost));
  const ClientOptions of_good = client_options(authority_->issue("first.example"));
  ServerOptions options = this->options();
  options.admin.clear();
  options.listen = {parse_endpoint("tcp:127.0.0.1:0")};
  options.tls = files_;
  options.tls.client_crl = authority_->revoke({});
  options.core.tenants = two_tenants();
  options.core.tenants[0].certificate = "first.example";
  start(options);
  const auto at_server = [this](ClientOptions client) {
    client.server = server_->endpoints()[0].text();
    return client;
  };
  Client client(at_server(of_lost));
  RemoteSessionConfig config;
  config.model = {
      .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
  RemoteSession session = client.open(config);
  session.refresh();

  (void)authority_->revoke({Certificate{of_lost.tls_certificate, of_lost.tls_key}}, -60);
  EXPECT_THROW(server_->reload_tls(), Error) << "a list that has ended";
  session.refresh();
  (void)authority_->revoke({Certificate{of_lost.tls_certificate, of_lost.tls_key}});
  server_->reload_tls();

  EXPECT_THROW(session.refresh(), ClientError) << "over the connection of before";
  EXPECT_EQ(open(at_server(of_lost)), "FAILED_PRECONDITION UNAUTHENTICATED");
  EXPECT_EQ(open(at_server(of_good)), "OK");
  (void)authority_->revoke({});
  server_->reload_tls();
  session.refresh();
}

TEST_F(TlsTest, ReloadNeedsTls) {
  ServerOptions options = this->options();
  start(options);
  EXPECT_THROW(server_->reload_tls(), Error);
}

TEST_F(TlsTest, CertificatesThatHaveExpiredAreRefused) {
  const Authority authority(folder_, "late");
  const Certificate late = authority.issue("late", -60);
  ServerOptions options = this->options();
  options.listen = {parse_endpoint("tcp:127.0.0.1:0")};
  options.tls = {
      .certificate = late.certificate, .key = late.key, .client_ca = authority.certificate()};
  try {
    const Server server(options);
    FAIL() << "started";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("has expired"));
  }
}

TEST_F(TlsTest, ServerNeedsFilesThatAreThere) {
  ServerOptions options = this->options();
  options.listen = {parse_endpoint("tcp:127.0.0.1:0")};
  options.tls = {.certificate = "/no/such", .key = "/no/such", .client_ca = "/no/such"};
  try {
    const Server server(options);
    FAIL() << "started";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  }
}

}  // namespace
}  // namespace kvtier::services::testing
