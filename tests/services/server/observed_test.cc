#include "kvtier/client.h"
#include "kvtier/v1/admin.pb.h"

#include "services/metrics/server_metrics.h"
#include "tests/services/metrics/exposition.h"
#include "tests/services/metrics/http_client.h"
#include "tests/services/server/raw_call.h"
#include "tests/services/server/server_fixture.h"

#include <grpcpp/grpcpp.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <cstdlib>

namespace kvtier::services::testing {
namespace {

/// A server whose operators listen.
class ObservedTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    ServerOptions options = this->options();
    options.metrics = parse_endpoint("tcp:127.0.0.1:0");
    start(std::move(options));
  }
  [[nodiscard]] MetricsReading read() const { return read_exposition(server_->metrics().text()); }
  [[nodiscard]] HttpClient http() const { return HttpClient(*server_->metrics_endpoint()); }

  /// A client does something of everything; its streams have ended when this returns.
  void work() {
    Client client({.server = socket(), .attempts = 1});
    RemoteSessionConfig config;
    config.model = {
        .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    RemoteSession session = client.open(config);
    const std::vector<float> keys(100UL * kKvHeads * kHeadDim, 0.5F);
    const TensorView view{keys.data(), DType::kFloat32, {100, kKvHeads, kHeadDim}};
    session.append(0, view, view);
    session.refresh();
  }
};

TEST_F(ObservedTest, CallsAreCountedByMethodAndCodeWithTheirBytes) {
  const MetricsReading before = read();
  work();
  const RawReply none =
      raw_call(raw_channel(socket()), "/kvtier.v1.SessionService/GetSession", "\x0a\x03no!");
  EXPECT_EQ(none.status.error_code(), grpc::StatusCode::NOT_FOUND);

  const MetricsReading after = read();

  const std::string total = "kvtier_rpc_requests_total";
  const auto ended = [&](const char* method, const char* code) {
    return after.sum(total, {{"method", method}, {"code", code}}) -
           before.sum(total, {{"method", method}, {"code", code}});
  };
  EXPECT_EQ(ended("SessionService/CreateSession", "OK"), 1);
  EXPECT_EQ(ended("AttentionService/Append", "OK"), 1);
  EXPECT_EQ(ended("SessionService/GetSession", "OK"), 1);
  EXPECT_EQ(ended("SessionService/GetSession", "NOT_FOUND"), 1);
  const MetricsReading::LabelSet appended{{"method", "AttentionService/Append"},
                                          {"direction", "received"}};
  EXPECT_EQ(after.sum("kvtier_rpc_message_bytes_count", appended), 1);
  const double tensors = 2 * 100 * kKvHeads * kHeadDim * 4;
  EXPECT_GT(after.sum("kvtier_rpc_message_bytes_sum", appended), tensors);
  EXPECT_LT(after.sum("kvtier_rpc_message_bytes_sum", appended), tensors + 500);
  EXPECT_EQ(after.sum("kvtier_rpc_message_bytes_count",
                      {{"method", "SessionService/GetSession"}, {"direction", "received"}}),
            2);
  EXPECT_GT(after.sum("kvtier_rpc_message_bytes_sum",
                      {{"method", "SessionService/CreateSession"}, {"direction", "sent"}}),
            0);
  for (const std::string& method : after.values(total, "method")) {
    const MetricsReading::LabelSet labels{{"method", method}};
    EXPECT_EQ(after.sum("kvtier_rpc_started_total", labels),
              after.sum(total, labels) + after.sum("kvtier_rpc_inflight", labels))
        << method;
    EXPECT_EQ(after.sum("kvtier_rpc_duration_seconds_count", labels), after.sum(total, labels))
        << method;
  }
}

TEST_F(ObservedTest, RefusalsAreCountedOfWhateverCall) {
  ServerOptions options = this->options();
  options.core.pages.max_leases = 1;
  options.core.max_inflight_bytes = 1 << 20;
  options.data.attachments.max_attachments = 1;
  options.data.listen = {parse_endpoint("unix:" + (folder_ / "x.data").string())};
  server_.reset();
  start(std::move(options));
  Client client({.server = socket(), .attempts = 1, .data_plane = false});
  const auto refuses = [&](const std::string& reason, const auto& call) {
    const double before = read().sum("kvtier_admission_rejected_total", {{"reason", reason}});
    try {
      call();
    } catch (const ClientError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted) << error.what();
    }
    const MetricsReading after = read();
    EXPECT_EQ(after.sum("kvtier_admission_rejected_total", {{"reason", reason}}) - before, 1);
    EXPECT_EQ(after.sum("kvtier_tenant_rejected_total"),
              after.sum("kvtier_admission_rejected_total"));
  };
  const RemotePagesConfig config{.model = "m", .page_bytes = 4096};
  RemotePages pages = client.open_pages(config);
  refuses("limit", [&] { (void)client.open_pages(config); });
  const auto attach = [&] {
    return raw_call(raw_channel(socket()), "/kvtier.v1.SharedMemoryService/CreateAttachment", "");
  };
  EXPECT_TRUE(attach().status.ok());
  refuses("limit", [&] { EXPECT_FALSE(attach().status.ok()); });
  const std::vector<std::byte> page(4096);
  const std::string handle = pages.put(std::vector<RemotePages::Put>{{"h", 0, page}})[0].handle;
  std::vector<std::byte> read_page(4096);
  refuses("overload", [&] {  // a reply of pages has a megabyte of its own
    (void)pages.get(std::vector<RemotePages::Get>{{handle, read_page}});
  });
}

TEST_F(ObservedTest, UnknownMethodsShareSeriesAndOtherServicesHaveNone) {
  const auto channel = raw_channel(socket());
  EXPECT_FALSE(
      raw_call(channel, "/kvtier.v1.SessionService/CreateSession", "\xff\xff").status.ok());
  EXPECT_FALSE(raw_call(channel, "/kvtier.v1.SessionService/Forged", "").status.ok());
  EXPECT_TRUE(raw_call(channel, "/grpc.health.v1.Health/Check", "").status.ok());

  const MetricsReading seen = read();

  EXPECT_EQ(seen.sum("kvtier_rpc_started_total", {{"method", "SessionService/CreateSession"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_rpc_started_total", {{"method", "other"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_rpc_started_total"), 2);
  EXPECT_EQ(seen.sum("kvtier_rpc_requests_total") + seen.sum("kvtier_rpc_inflight"), 2);
  EXPECT_EQ(seen.sum("kvtier_rpc_requests_total", {{"code", "OK"}}), 0);
}

TEST_F(ObservedTest, OperatorsReadTheSameOverGrpcAndHttp) {
  work();
  const RawReply reply =
      raw_call(raw_channel(admin_socket()), "/kvtier.v1.AdminService/GetMetrics", "");
  ASSERT_TRUE(reply.status.ok()) << reply.status.error_message();
  EXPECT_NE(reply.bytes.find("# TYPE kvtier_sessions gauge"), std::string::npos);

  const Reply text = http().get("/metrics");
  EXPECT_EQ(text.status, 200);
  EXPECT_EQ(text.field("Content-Type"), "text/plain; version=0.0.4; charset=utf-8");
  const MetricsReading seen = read_exposition(text.body);
  EXPECT_EQ(seen.sum("kvtier_session_created_total"), 1);
  EXPECT_EQ(seen.sum("kvtier_server_state", {{"state", "serving"}}), 1);
  EXPECT_EQ(seen.sum("kvtier_server_state"), 1);
  EXPECT_EQ(seen.sum("kvtier_build_info"), 1);
  EXPECT_EQ(seen.sum("kvtier_rpc_requests_total", {{"method", "AdminService/GetMetrics"}}), 1);
  EXPECT_GT(seen.sum("kvtier_memory_budget_bytes"), 8 * MiB);

  v1::GetMetricsRequest request;
  request.set_format(v1::METRICS_FORMAT_JSON);
  const RawReply as_json =
      raw_call(raw_channel(admin_socket()), "/kvtier.v1.AdminService/GetMetrics",
               request.SerializeAsString());
  v1::GetMetricsResponse response;
  ASSERT_TRUE(response.ParseFromString(as_json.bytes)) << as_json.status.error_message();
  EXPECT_EQ(MetricsReading::parse(response.text()).sum("kvtier_session_created_total"), 1);
  request.set_format(static_cast<v1::MetricsFormat>(7));
  EXPECT_EQ(raw_call(raw_channel(admin_socket()), "/kvtier.v1.AdminService/GetMetrics",
                     request.SerializeAsString())
                .status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);

  const Reply json = http().get("/status.json");
  EXPECT_EQ(json.field("Content-Type"), "application/json");
  const auto status = nlohmann::json::parse(json.body);
  EXPECT_EQ(status["metrics"]["kvtier_session_created_total"][0]["value"], 1);
  for (const auto& [name, series] : status["metrics"].items()) {
    EXPECT_FALSE(series.empty()) << name;
    EXPECT_TRUE(seen.has(name) || seen.has(name + "_count")) << name;
  }
  for (const auto& series : status["metrics"]["kvtier_operation_seconds"]) {
    EXPECT_EQ(series.contains("buckets"), series["count"] > 0);
  }
}

TEST_F(ObservedTest, MetricsAreForOperatorsAlone) {
  const RawReply reply = raw_call(raw_channel(socket()), "/kvtier.v1.AdminService/GetMetrics", "");
  EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(ObservedTest, HealthFollowsTheServerThroughItsDrain) {
  const Reply up = http().get("/healthz");
  EXPECT_EQ(up.status, 200);
  EXPECT_EQ(up.body, "serving\n");

  server_->drain(std::chrono::milliseconds(0));

  const Reply down = http().get("/healthz");
  EXPECT_EQ(down.status, 503);
  EXPECT_EQ(down.body, "draining\n");
  const MetricsReading seen = read_exposition(http().get("/metrics").body);
  EXPECT_EQ(seen.sum("kvtier_server_state", {{"state", "draining"}}), 1);
}

TEST_F(ObservedTest, ListenerThatCannotBeHadFailsTheStart) {
  ServerOptions options = this->options();
  options.listen = {parse_endpoint("unix:" + (folder_ / "other.sock").string())};
  options.admin.clear();
  options.metrics = server_->metrics_endpoint();
  try {
    const Server second(std::move(options));
    ADD_FAILURE() << "two servers on one port";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  }
}

/// Returns what a browser makes of the status page, or nothing when there is none.
std::string render(const Endpoint& endpoint, const std::string& folder) {
  if (std::system("command -v chromium >/dev/null") != 0) return "";
  const std::string command =
      "timeout 300 chromium --headless=new --no-sandbox --disable-gpu --user-data-dir=" + folder +
      "/profile --virtual-time-budget=5000 --dump-dom http://" + endpoint.grpc_target() +
      "/ 2>/dev/null";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  std::string page;
  char buffer[4096];
  while (const std::size_t size = std::fread(buffer, 1, sizeof(buffer), pipe)) {
    page.append(buffer, size);
  }
  EXPECT_EQ(::pclose(pipe), 0);
  return page;
}

TEST_F(ObservedTest, BrowserShowsTheStatusPage) {
  work();
  const std::string page = render(*server_->metrics_endpoint(), folder_.string());
  if (page.empty()) GTEST_SKIP() << "chromium is not installed: the status page is not rendered";

  for (const char* part : {"class=\"state serving\"", "<span>sessions</span><b>0</b>",
                           "<span>received</span><b>", "<td>engine_host</td>", "<td>default</td>",
                           "<td>Append</td>", "<td>slow_consumer</td>", "<polyline"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part << " in " << page.size() << " bytes";
  }
}

TEST_F(ObservedTest, StatusPageNeedsNothingFromElsewhere) {
  const std::string page = http().get("/").body;
  EXPECT_NE(page.find("prefers-color-scheme: dark"), std::string::npos);
  EXPECT_NE(page.find("name=\"viewport\""), std::string::npos);
  for (const char* outside : {"src=", "@import", "url(", "https:", "innerHTML", "eval("}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
}

}  // namespace
}  // namespace kvtier::services::testing
