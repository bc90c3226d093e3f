// Configuration of `kvtier serve`: flags and TOML, the file of tenants, endpoints. Whatever the
// text, it is refused with an error, or what it says is within the bounds of the options.

#include "kvtier/error.h"

#include "services/base/endpoint.h"
#include "services/base/tenants.h"
#include "services/serve/serve.h"
#include "tests/fuzz/fuzz.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace {

using kvtier::Error;
using kvtier::fuzz::Input;
using kvtier::fuzz::require;
using namespace kvtier::services;  // NOLINT(google-build-using-namespace): a program

/// Text as a file.
class TextFile {
 public:
  explicit TextFile(std::string_view text) : fd_(::memfd_create("config", 0)) {
    require(fd_ >= 0 && ::write(fd_, text.data(), text.size()) == static_cast<ssize_t>(text.size()),
            "a file in memory can be written");
  }
  ~TextFile() { ::close(fd_); }
  TextFile(const TextFile&) = delete;  // owns a descriptor
  TextFile& operator=(const TextFile&) = delete;
  [[nodiscard]] std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

void check_seconds(double seconds, double lowest, double highest) {
  require(std::isfinite(seconds) && lowest <= seconds && seconds <= highest, "seconds in bounds");
}

void check_count(std::int64_t count, std::int64_t lowest, std::int64_t highest) {
  require(lowest <= count && count <= highest, "counts in bounds");
}

/// The first line holds flags, between spaces; the rest is the TOML file.
void parse_serve(std::string_view text) {
  const std::size_t line = std::min(text.find('\n'), text.size());
  const TextFile file(text.substr(std::min(line + 1, text.size())));
  std::vector<std::string> arguments{"serve", "--config=" + file.path()};
  std::string_view flags = text.substr(0, line);
  while (!flags.empty()) {
    const std::size_t end = std::min(flags.find(' '), flags.size());
    std::string flag(flags.substr(0, end));
    // Another file would be one of this machine.
    if (flag.find("--c") == std::string::npos) arguments.push_back(std::move(flag));
    flags.remove_prefix(std::min(end + 1, flags.size()));
  }

  CLI::App app;
  ServeCommand command;
  add_serve(app, command);
  try {
    std::reverse(arguments.begin(), arguments.end());
    app.parse(arguments);
  } catch (const CLI::Error&) {
    return;
  }
  check_count(static_cast<std::int64_t>(command.threads), 0, 1024);
  check_count(command.max_models, 1, 1024);
  check_count(command.max_sessions, 1, 16384);
  check_count(command.memory.max_session_tokens, 64, std::int64_t{1} << 26);
  check_count(command.host_memory_mib, 1, std::int64_t{1} << 24);
  check_count(command.device_memory_mib, 1, std::int64_t{1} << 24);
  check_count(command.max_inflight_mib, 1, std::int64_t{1} << 20);
  check_count(command.session_memory_mib, 1, std::int64_t{1} << 20);
  check_seconds(command.lease_seconds, 1, 86400);
  check_seconds(command.stream_idle_seconds, 1, 86400);
  check_seconds(command.drain_seconds, 0, 3600);
}

void read_tenants(std::string_view text) {
  try {
    const std::vector<TenantConfig> configs = parse_tenants(std::string(text));
    const Tenants tenants(configs, {});
    require(tenants.all().size() == std::max<std::size_t>(configs.size(), 1),
            "tenants as configured");
    for (const TenantConfig& config : configs) {
      require(tenants.by_name(config.name).name() == config.name, "a tenant has its name");
      require(config.limits.max_sessions >= 0 && config.limits.max_kv_bytes >= 0 &&
                  config.limits.max_inflight_bytes >= 0,
              "limits are not negative");
    }
  } catch (const Error&) {
  }
}

void read_endpoint(std::string_view text) {
  try {
    const Endpoint endpoint = parse_endpoint(std::string(text));
    const Endpoint again = parse_endpoint(endpoint.text());
    require(again.text() == endpoint.text(), "an endpoint is read back");
    require(endpoint.is_unix ? endpoint.path.starts_with('/')
                             : endpoint.port >= 0 && endpoint.port < 65536,
            "an endpoint is one");
  } catch (const Error&) {
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  switch (input.number(3)) {
    case 0:
      parse_serve(input.rest());
      break;
    case 1:
      read_tenants(input.rest());
      break;
    default:
      read_endpoint(input.rest());
  }
  return 0;
}
