#include "services/tools/top/top.h"

#include "services/base/endpoint.h"
#include "services/console/number_option.h"
#include "services/metrics/metrics_reading.h"
#include "services/tools/top/terminal.h"
#include "services/tools/top/top_frame.h"
#include "services/tools/top/top_source.h"

#include <CLI/CLI.hpp>

#include <chrono>
#include <ostream>
#include <thread>

namespace kvtier::services {
namespace {

using Clock = std::chrono::steady_clock;

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
  app.add_option("--interval", command.interval_seconds, "Seconds between two readings")
      ->check(between(0.1, 3600.0))
      ->capture_default_str();
  CLI::Option* once =
      app.add_flag("--once", command.once, "Print one frame, over one interval, and end");
  app.add_flag("--json", command.json, "Print one reading, as /status.json has it, and end")
      ->excludes(once);
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
