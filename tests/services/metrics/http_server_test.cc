#include "services/metrics/http_server.h"

#include "kvtier/error.h"

#include "tests/services/metrics/http_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>
#include <stdlib.h>
#include <sys/stat.h>
#include <vector>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;
using testing::HttpClient;
using testing::Reply;

class HttpServerTest : public ::testing::Test {
 protected:
  static HttpOptions options() {
    HttpOptions options;
    options.endpoint = parse_endpoint("tcp:127.0.0.1:0");
    options.routes["/"] = [] { return HttpResponse{.type = "text/html", .body = "<p>page"}; };
    options.routes["/bad"] = []() -> HttpResponse { throw std::runtime_error("secret"); };
    options.routes["/down"] = [] { return HttpResponse{.status = 503, .body = "no\n"}; };
    return options;
  }
  void start(HttpOptions options) { server_ = std::make_unique<HttpServer>(std::move(options)); }
  [[nodiscard]] HttpClient client() const { return HttpClient(server_->endpoint()); }

  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersGetsOfItsPagesOverOneConnection) {
  start(options());
  HttpClient client = this->client();

  const Reply page = client.get("/?x=1");
  EXPECT_EQ(page.status, 200);
  EXPECT_EQ(page.body, "<p>page");
  EXPECT_EQ(page.field("Content-Type"), "text/html");
  EXPECT_EQ(page.field("X-Content-Type-Options"), "nosniff");
  EXPECT_THAT(page.field("Content-Security-Policy"), HasSubstr("default-src 'none'"));
  EXPECT_EQ(client.get("/down").status, 503);
  EXPECT_EQ(client.get("/absent").status, 404);
  EXPECT_EQ(client.get("//").status, 404);
  EXPECT_EQ(client.get("/").status, 200);
}

TEST_F(HttpServerTest, TakesNoOtherMethodAndNoBody) {
  start(options());
  for (const char* method : {"HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PURGE"}) {
    const Reply reply =
        client().send(std::string(method) + " / HTTP/1.1\r\nHost: localhost\r\n\r\n", method);
    EXPECT_EQ(reply.status, 405) << method;
    EXPECT_EQ(reply.field("Allow"), "GET") << method;
  }
  const Reply body =
      client().send("GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello");
  EXPECT_EQ(body.status, 413);
}

TEST_F(HttpServerTest, RefusesWhatIsNoRequestOrTooLarge) {
  start(options());
  EXPECT_EQ(client().send("nonsense\r\n\r\n").status, 400);
  EXPECT_EQ(client().send("GET / HTTP/9.9\r\n\r\n").status, 400);
  const Reply large = client().send("GET /" + std::string(9000, 'a') + " HTTP/1.1\r\n\r\n");
  EXPECT_EQ(large.status, 431);
  EXPECT_EQ(client().get("/").status, 200);
}

TEST_F(HttpServerTest, RefusesNamesThatAreNotOfThisMachine) {
  start(options());
  EXPECT_EQ(client().get("/", "rebound.example:80").status, 403);
  EXPECT_EQ(client().get("/", "").status, 403);
  EXPECT_EQ(client().get("/", "127.0.0.1.example").status, 403);
  for (const char* host : {"localhost", "localhost:9464", "127.0.0.1:1", "[::1]:80"}) {
    EXPECT_EQ(client().get("/", host).status, 200) << host;
  }
}

TEST_F(HttpServerTest, TellsNothingOfAFailure) {
  start(options());
  const Reply reply = client().get("/bad");
  EXPECT_EQ(reply.status, 500);
  EXPECT_THAT(reply.body, ::testing::Not(HasSubstr("secret")));
}

TEST_F(HttpServerTest, ClosesAClientThatSaysNothing) {
  HttpOptions options = this->options();
  options.timeout = std::chrono::milliseconds(20);
  start(options);
  HttpClient silent = client();
  EXPECT_TRUE(silent.closed_by_peer());
  HttpClient slow = client();
  slow.write("GET / HT");
  EXPECT_TRUE(slow.closed_by_peer());
}

TEST_F(HttpServerTest, ClosesConnectionsThatAreTooMany) {
  HttpOptions options = this->options();
  options.max_connections = 2;
  start(options);
  HttpClient first = client();
  EXPECT_EQ(first.get("/").status, 200);
  {
    HttpClient second = client();
    EXPECT_EQ(second.get("/").status, 200);
    HttpClient third = client();
    EXPECT_TRUE(third.closed_by_peer());
    EXPECT_EQ(second.send("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").status,
              200);
    EXPECT_TRUE(second.closed_by_peer());
  }
  EXPECT_EQ(first.get("/").status, 200);
}

TEST_F(HttpServerTest, SilentConnectionsMakeRoomForThoseThatAsk) {
  HttpOptions options = this->options();
  options.max_connections = 2;
  start(options);
  HttpClient first = client();
  EXPECT_EQ(first.get("/").status, 200);
  HttpClient silent = client();
  HttpClient third = client();
  EXPECT_EQ(third.get("/").status, 200);
  EXPECT_TRUE(silent.closed_by_peer());
  EXPECT_EQ(first.get("/").status, 200);
}

TEST_F(HttpServerTest, HostsThatAreNoneAreRefused) {
  start(options());
  for (const std::string hosts :
       {"Host: [::1]evil.com\r\n", "Host: 127.0.0.1:80@evil.com\r\n", "Host: localhost:x\r\n",
        "Host: localhost\r\nHost: evil.com\r\n", "Host: localhost\r\nHost: localhost\r\n"}) {
    EXPECT_EQ(client().send("GET / HTTP/1.1\r\n" + hosts + "\r\n").status, 403) << hosts;
  }
}

TEST_F(HttpServerTest, ListensOnThisMachineOnly) {
  for (const char* text : {"tcp:0.0.0.0:0", "tcp:192.0.2.1:0", "tcp:[::]:0"}) {
    HttpOptions options = this->options();
    options.endpoint = parse_endpoint(text);
    try {
      start(options);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("expected a loopback address"));
    }
  }
}

TEST_F(HttpServerTest, UnixSocketIsForThisUserAndAnyHost) {
  std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
  const std::filesystem::path folder = ::mkdtemp(pattern.data());
  HttpOptions options = this->options();
  options.endpoint = parse_endpoint("unix:" + (folder / "http.sock").string());
  start(options);
  struct stat info {};
  ASSERT_EQ(::stat(options.endpoint.path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0600U);
  EXPECT_EQ(client().get("/", "anything").status, 200);
  EXPECT_THROW(HttpServer second(options), Error);
  server_.reset();
  EXPECT_FALSE(std::filesystem::exists(options.endpoint.path));
  std::filesystem::remove_all(folder);
}

TEST_F(HttpServerTest, EndsWithClientsConnected) {
  start(options());
  HttpClient idle = client();
  EXPECT_EQ(idle.get("/").status, 200);
  HttpClient waiting = client();
  waiting.write("GET");
  server_.reset();
  EXPECT_TRUE(idle.closed_by_peer());
}

}  // namespace
}  // namespace kvtier::services
