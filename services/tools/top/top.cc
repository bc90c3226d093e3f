#include "services/tools/top/top.h"

#include "kvtier/v1/admin.grpc.pb.h"

#include "include/types/failure.h"
#include "services/base/endpoint.h"
#include "services/console/options.h"
#include "services/metrics/http_get.h"
#include "services/metrics/metrics_reading.h"
#include "services/tools/top/terminal.h"
#include "services/tools/top/top_frame.h"
#include "services/wire/grpc_lifetime.h"
#include "services/wire/grpc_time.h"

#include <CLI/CLI.hpp>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <thread>

namespace kvtier::services {
namespace {

using Clock = std::chrono::steady_clock;

/// Reads a server's metrics, in the JSON that `MetricsReading` reads. Throws `Error` when there is
/// no answer in time.
using TopSource = std::function<std::string()>;

constexpr std::chrono::seconds kTimeout{2};
constexpr int kMaxBytes = 16 << 20;

/// From AdminService, at unix:PATH.
TopSource admin_source(const std::string& address) {
  const Endpoint endpoint = parse_endpoint(address, "server");
  if (!endpoint.is_unix) {
    throw_invalid("server", "unix:PATH", address);
  }
  keep_grpc();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxBytes);
  const auto channel = grpc::CreateCustomChannel(endpoint.grpc_target(),
                                                 grpc::InsecureChannelCredentials(), arguments);
  const std::shared_ptr<v1::AdminService::Stub> stub = v1::AdminService::NewStub(channel);
  return [address, stub] {
    grpc::ClientContext context;
    context.set_deadline(grpc_deadline(kTimeout));
    v1::GetMetricsRequest request;
    request.set_format(v1::METRICS_FORMAT_JSON);
    v1::GetMetricsResponse response;
    const grpc::Status status = stub->GetMetrics(&context, request, &response);
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      const bool is_default = address == "unix:" + default_socket_folder() + "/kvtier.sock";
      throw_invalid("server", "an admin socket",
                    join("that of clients at ", address,
                         is_default ? ": leave out --server" : ": try " + address + ".admin"));
    }
    if (!status.ok()) {
      throw_error(ErrorCode::kUnavailable, "server: expected AdminService at ", address,
                  ", found none: ", status.error_message());
    }
    return response.text();
  };
}

/// From the HTTP listener, at unix:PATH, tcp:HOST:PORT or http://HOST:PORT.
TopSource http_source(const std::string& address) {
  constexpr std::string_view kHttp = "http://";
  std::string text = address;
  if (text.starts_with(kHttp)) {
    text.replace(0, kHttp.size(), "tcp:");
    if (text.ends_with('/')) text.pop_back();
  }
  return [endpoint = parse_endpoint(text, "metrics")] {
    return http_get(endpoint, "/status.json", kTimeout);
  };
}

struct Reading {
  MetricsReading metrics;
  Clock::time_point time;
};

Reading read(const TopSource& source) {
  MetricsReading metrics = MetricsReading::parse(source());
  return {std::move(metrics), Clock::now()};
}

TopInterval between(const Reading& previous, const Reading& now) {
  return {previous.metrics, now.metrics,
          std::chrono::duration<double>(now.time - previous.time).count()};
}

void print_once(const TopSource& source, std::chrono::milliseconds interval, std::ostream& out) {
  const Reading previous = read(source);
  std::this_thread::sleep_for(interval);
  const Reading now = read(source);
  constexpr std::size_t kWide = 160;
  for (const std::string& line : top_frame(between(previous, now), {.columns = kWide})) {
    out << line << '\n';
  }
  out.flush();
}

void watch(const TopSource& source, std::chrono::milliseconds interval) {
  Reading previous = read(source);  // a server that is not there is an error, not a screen
  Reading now = previous;
  const Terminal terminal;
  for (;;) {
    std::vector<std::string> lines =
        top_frame(between(previous, now),
                  {.columns = terminal.columns(), .rows = terminal.rows(), .color = true});
    terminal.show(lines);
    const Terminal::Event event = terminal.wait(interval);
    if (event == Terminal::Event::kQuit) return;
    if (event == Terminal::Event::kResize) continue;
    previous = std::move(now);
    now = read(source);
  }
}

}  // namespace

void add_top(CLI::App& program, TopCommand& command) {
  CLI::App& app = *program.add_subcommand("top", "Watch a server in the terminal; q ends it");
  CLI::Option* server =
      app.add_option("--server", command.server,
                     "Admin socket of the server, unix:PATH (default: that of `kvtier serve`)");
  app.add_option("--metrics", command.metrics,
                 "Instead: where the server's --metrics listens, unix:PATH, tcp:HOST:PORT or "
                 "http://HOST:PORT")
      ->excludes(server);
  CLI::Option* interval =
      app.add_option("--interval", command.interval_seconds, "Seconds between two readings")
          ->check(between(0.1, 3600.0))
          ->capture_default_str();
  CLI::Option* once =
      app.add_flag("--once", command.once, "Print one frame, over one interval, and end");
  app.add_flag("--json", command.json, "Print one reading, as /status.json has it, and end")
      ->excludes(once)
      ->excludes(interval);
}

void run_top(const TopCommand& command, const Console& console) {
  const std::string server =
      command.server.empty() ? "unix:" + default_socket_folder() + "/admin.sock" : command.server;
  const TopSource source =
      command.metrics.empty() ? admin_source(server) : http_source(command.metrics);
  const std::chrono::milliseconds interval(
      static_cast<std::int64_t>(command.interval_seconds * 1000));
  if (command.json) {
    console.out << source() << std::endl;
  } else if (command.once) {
    print_once(source, interval, console.out);
  } else {
    watch(source, interval);
  }
}

}  // namespace kvtier::services
