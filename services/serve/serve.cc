#include "services/serve/serve.h"

#include "kvtier/calibration.h"

#include "include/types/failure.h"
#include "include/types/host_memory.h"
#include "services/console/enum_names.h"
#include "services/console/log.h"
#include "services/console/options.h"
#include "services/page_cache/persistent_arenas.h"
#include "services/serve/serving.h"
#include "services/serve/supervisor.h"
#include "services/serve/tier_options.h"
#include "services/server/server.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <sys/resource.h>
#include <sys/stat.h>

namespace kvtier::services {
namespace {

/// Returns the line of a TOML text on which a key stands, or 0.
int line_of(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const std::size_t begin = line.find_first_not_of(" \t\"'");
    if (begin == std::string::npos || line.compare(begin, key.size(), key) != 0) continue;
    const std::size_t after = line.find_first_not_of(" \t\"'", begin + key.size());
    if (after == std::string::npos || line[after] == '=') return number;
  }
  return 0;
}

std::string read_text(const std::string& option, const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    throw_error(ErrorCode::kNotFound, option, ": expected a file, found the folder ", path);
  }
  text << in.rdbuf();
  if (!in) throw_error(ErrorCode::kNotFound, option, ": expected a readable file, found ", path);
  return text.str();
}

/// Where `text` begins with a value that `read_config` reads as it is written: text in quotes, a
/// number, true or false. Returns what is wrong with the rest of the line; empty: nothing.
std::string value_problem(const std::string& text) {
  std::size_t end = 0;
  if (text.starts_with('"') || text.starts_with('\'')) {
    const std::size_t quote = text.find(text[0], 1);
    if (quote == std::string::npos) return "expected a quote at the end, found " + text;
    const std::string_view quoted = std::string_view(text).substr(1, quote - 1);
    if (quoted.find_first_of("#\\") != std::string_view::npos) {
      return "expected text without # and \\, found " + text;
    }
    end = quote + 1;
  } else {
    end = std::min(text.find_first_of(" \t#"), text.size());
    const std::string word = text.substr(0, end);
    double number = 0;
    if (word != "true" && word != "false" && !read_number(word, number)) {
      return "expected text in quotes, a number, true or false, found " + text;
    }
  }
  const std::size_t rest = text.find_first_not_of(" \t\r", end);
  if (rest == std::string::npos || text[rest] == '#') return {};
  return "expected one value, found " + text;
}

/// Refuses lines that CLI11 would skip or read as something else, and keys that stand twice. Lists
/// over several lines are left to it.
void check_lines(const std::string& path, const std::string& text) {
  const auto refuse = [&path](int number, const std::string& what) {
    throw CLI::ValidationError("--config", path + ":" + std::to_string(number) + ": " + what);
  };
  std::istringstream lines(text);
  std::set<std::string> keys;
  std::string list;  // The key of one that has not ended.
  int number = 0, list_begin = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    CLI::detail::trim(line);
    const bool ends_list = line.find(']') != std::string::npos;
    if (!list.empty()) {
      if (ends_list) list.clear();
      continue;
    }
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[' && ends_list) continue;  // a section, whose options are refused
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos) refuse(number, "expected KEY = VALUE, found " + line);
    const std::string key = CLI::detail::trim_copy(line.substr(0, equals));
    const std::string value = CLI::detail::trim_copy(line.substr(equals + 1));
    if (!keys.insert(key).second) refuse(number, key + ": expected it once, found it twice");
    if (value.empty() || value[0] == '#') refuse(number, key + ": expected a value, found none");
    if (value[0] != '[') {
      const std::string problem = value_problem(value);
      if (!problem.empty()) refuse(number, key + ": " + problem);
    } else if (!ends_list) {
      list = key;
      list_begin = number;
    }
  }
  if (!list.empty()) refuse(list_begin, list + ": expected ] behind a list, found none");
}

/// Takes from the file what neither a flag nor the environment gives. Unknown keys are errors.
void read_config(CLI::App& app, const std::string& path) {
  std::string text;
  try {
    text = read_text("--config", path);
  } catch (const Error& error) {
    throw CLI::ValidationError(error.what());
  }
  check_lines(path, text);
  std::istringstream in(text);
  for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(in)) {
    if (item.name == "++" || item.name == "--") continue;  // where a section begins and ends
    const auto refuse = [&](const std::string& what) {
      throw CLI::ValidationError(
          "--config", path + ":" + std::to_string(line_of(text, item.name)) + ": " + what);
    };
    CLI::Option* option =
        item.parents.empty() ? app.get_option_no_throw("--" + item.name) : nullptr;
    if (option == nullptr || item.name == "config" || item.name == "help") {
      refuse("expected options of serve, found " + item.fullname());
    }
    if (item.inputs.empty() && option->get_expected_max() <= 1) {
      refuse(item.name + ": expected a value, found none");
    }
    if (option->get_items_expected_max() == 0 && item.inputs[0] != "true" &&
        item.inputs[0] != "false") {
      refuse(item.name + ": expected true or false, found " + item.inputs[0]);
    }
    if (option->count() > 0) continue;
    try {
      option->add_result(item.inputs);
      option->run_callback();
    } catch (const CLI::Error& error) {
      refuse(error.what());
    }
  }
}

bool has_no_data_plane(const ServeCommand& command) {
  return command.data_listen.size() == 1 && command.data_listen[0] == "none";
}

/// Whether the data plane has a Unix socket; the default address is one.
bool has_unix_data_plane(const ServeCommand& command) {
  const auto& places = command.data_listen.empty() ? command.listen : command.data_listen;
  return places.empty() || std::ranges::any_of(places, [](const std::string& text) {
           return text.starts_with("unix:");
         });
}

/// Refuses what does nothing without another option. CLI11's `needs` would look before the file is
/// read.
void check_needs(const CLI::App& app, const ServeCommand& command) {
  const auto need = [&app](const char* option, bool found, const char* other) {
    if (app.count(option) > 0 && !found) throw CLI::RequiresError(option, other);
  };
  need("--disk-capacity-mib", !command.disk_cache.empty(), "--disk-cache");
  need("--page-folder-mib", !command.page_folder.empty(), "--page-folder");
  need("--remote-ttl-seconds", !command.remote.empty(), "--memcached or --redis");
  need("--row-cache-rows", command.row_cache_mib != 0 || command.memory.row_cache_rows <= 0,
       "--row-cache-mib above 0");
  need("--row-cache-policy", command.row_cache_mib != 0 && command.memory.row_cache_rows != 0,
       "--row-cache-mib and --row-cache-rows above 0");
  need("--page-memory-mib", command.page_arena_mib != 0 || command.page_memory_mib == 0,
       "--page-arena-mib above 0");
  need("--remote-key-file", !command.page_remote || !command.disk_cache.empty(), "--disk-cache");
  need("--max-device-regions", command.max_device_regions == 0 || has_unix_data_plane(command),
       "unix:PATH in --data-listen");
  if (command.insecure_tcp && !command.tls_certificate.empty()) {
    throw CLI::ExcludesError("--insecure-tcp", "--tls-cert");
  }
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

/// Whether the build can use a GPU.
#if defined(KVTIER_WITH_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

bool wants_worker(const ServeCommand& command) {
  return command.worker.value_or(kHasCuda && command.backend != Backend::kCpu);
}

/// Every connection is a descriptor, and the usual limit is low.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

/// Beside every Unix socket one of the data plane, unless others are asked for.
std::vector<Endpoint> data_endpoints(const ServeCommand& command,
                                     const std::vector<Endpoint>& listen) {
  std::vector<Endpoint> endpoints;
  if (has_no_data_plane(command)) return endpoints;
  for (const std::string& text : command.data_listen)
    endpoints.push_back(parse_endpoint(text, "data-listen"));
  if (!endpoints.empty()) return endpoints;
  for (const Endpoint& endpoint : listen) {
    if (endpoint.is_unix) endpoints.push_back(parse_endpoint(endpoint.text() + ".data"));
  }
  return endpoints;
}

/// Throws for options that are fine each and would do nothing, or fail at the first session.
void check_together(const ServeCommand& command) {
  if (!kHasCuda && command.backend == Backend::kCuda) {
    throw Error(ErrorCode::kFailedPrecondition,
                "backend: expected a build with CUDA for cuda, found one without");
  }
  if (command.memory.prefetch_rows &&
      (command.row_cache_mib == 0 || command.memory.row_cache_rows == 0)) {
    throw_invalid("prefetch-rows", "row-cache-mib and row-cache-rows above 0", 0);
  }
  // An engine reads it when it is made, with the first session, and on a GPU only.
  if (const std::string& file = command.memory.calibration_file; !file.empty()) {
    (void)read_calibration(file);
    if (!kHasCuda || command.backend == Backend::kCpu) {
      throw_invalid("calibration",
                    kHasCuda ? "none with backend cpu" : "none in a build without CUDA", file);
    }
  }
  if (command.page_arena_mib % 4 != 0) {
    throw_invalid("page-arena-mib", "a multiple of 4", command.page_arena_mib);
  }
  if (command.page_memory_mib < command.page_arena_mib) {
    throw_invalid("page-memory-mib", join("at least page-arena-mib, ", command.page_arena_mib),
                  command.page_memory_mib);
  }
}

/// Warns of memory that the machine does not have: an engine takes it with its first session.
void warn_of_host_memory(std::size_t wanted, Log& log) {
  const std::optional<std::size_t> available = available_host_bytes();
  if (!available || wanted <= *available) return;
  log.write({.level = LogLevel::kWarning,
             .event = "host_memory",
             .message = "host-memory-mib: expected at most the " +
                        std::to_string(*available / MiB) + " available, found " +
                        std::to_string(wanted / MiB) + "; sessions may be refused"});
}

/// Warns of more pages on a disk than it has room for.
void warn_of_disk_space(const ServeCommand& command, Log& log) {
  if (command.disk_cache.empty()) return;
  std::error_code error;
  std::filesystem::path folder = std::filesystem::absolute(command.disk_cache, error);
  while (folder.has_relative_path() && !std::filesystem::exists(folder, error)) {
    folder = folder.parent_path();
  }
  const std::uintmax_t available = std::filesystem::space(folder, error).available / MiB;
  if (error || static_cast<std::uintmax_t>(command.disk_capacity_mib) <= available) return;
  log.write({.level = LogLevel::kWarning,
             .event = "disk_space",
             .message = "disk-capacity-mib: expected at most the " + std::to_string(available) +
                        " available in " + folder.string() + ", found " +
                        std::to_string(command.disk_capacity_mib) + "; sessions may be refused"});
}

/// Warns of files {option, path} with a key or a password that others than their owner and its
/// group may read or write. An empty path is none.
void warn_of_open_secrets(const std::vector<std::pair<std::string, std::string>>& files, Log& log) {
  for (const auto& [option, path] : files) {
    struct stat status {};
    if (path.empty() || ::stat(path.c_str(), &status) != 0) continue;  // what reads it will say
    if ((status.st_mode & (S_IROTH | S_IWOTH)) == 0) continue;
    log.write({.level = LogLevel::kWarning,
               .event = "open_secret",
               .message = option + ": expected a file that others cannot read or write, found " +
                          "one that they can; chmod o-rw"});
  }
}

/// Errors of what is in the file name it.
std::vector<TenantConfig> read_tenants(const std::string& path) {
  const std::string text = read_text("tenants", path);
  try {
    return parse_tenants(text);
  } catch (const Error& error) {
    throw Error(error.code(), path + ": " + error.what());
  }
}

ServerOptions server_options(const ServeCommand& command) {
  check_together(command);
  ServerOptions options;
  const std::string folder = default_socket_folder();
  for (const std::string& text : command.listen) options.listen.push_back(parse_endpoint(text));
  if (options.listen.empty()) {
    options.listen.push_back(parse_endpoint("unix:" + folder + "/kvtier.sock"));
  }
  for (const std::string& text : command.admin_listen) {
    options.admin.push_back(parse_endpoint(text, "admin-listen"));
  }
  if (options.admin.empty()) {
    if (command.listen.empty()) {
      options.admin.push_back(parse_endpoint("unix:" + folder + "/admin.sock"));
    } else if (const auto own = std::ranges::find_if(options.listen, &Endpoint::is_unix);
               own != options.listen.end()) {
      options.admin.push_back(parse_endpoint(own->text() + ".admin"));
    }
  }
  if (!command.metrics.empty()) options.metrics = parse_endpoint(command.metrics, "metrics");
  options.data.listen = data_endpoints(command, options.listen);
  options.insecure_tcp = command.insecure_tcp;
  options.tls = {.certificate = command.tls_certificate,
                 .key = command.tls_key,
                 .client_ca = command.tls_client_ca,
                 .client_crl = command.tls_client_crl};
  if ((options.insecure_tcp || !options.tls.empty()) &&
      std::ranges::all_of(options.listen, &Endpoint::is_unix) &&
      std::ranges::all_of(options.data.listen, &Endpoint::is_unix)) {
    throw_invalid(options.insecure_tcp ? "insecure-tcp" : "tls-cert, tls-key, tls-client-ca",
                  "tcp:HOST:PORT in listen or data-listen", "none");
  }
  options.threads = command.threads;
  options.stream_idle = milliseconds(command.stream_idle_seconds);

  ServiceCoreOptions& core = options.core;
  if (!command.tenants_file.empty()) {
    core.tenants = read_tenants(command.tenants_file);
  }
  core.max_sessions = static_cast<std::size_t>(command.max_sessions);
  core.default_limits.max_sessions = command.max_sessions;
  core.whole_sessions = command.whole_sessions;
  core.max_inflight_bytes = command.max_inflight_mib << 20;
  core.max_session_memory = command.session_memory_mib << 20;
  core.pages.arena_bytes = command.page_arena_mib << 20;
  core.pages.max_bytes = command.page_memory_mib << 20;
  core.pages.waits_for_disk = command.page_wait_for_disk;
  options.data.attachments.max_regions = static_cast<std::size_t>(command.max_device_regions);
  core.lease_ttl = milliseconds(command.lease_seconds);
  core.device_timeout = milliseconds(command.device_timeout_seconds);
  core.models.backend = command.backend;
  core.models.max_models = static_cast<std::size_t>(command.max_models);
  core.models.memory = command.memory;
  core.models.memory.host_bytes = static_cast<std::size_t>(command.host_memory_mib) * MiB;
  core.models.disk_cache = command.disk_cache;
  if (!command.disk_cache.empty()) {
    core.models.memory.disk_cache_bytes = static_cast<std::size_t>(command.disk_capacity_mib) * MiB;
  }
  core.models.memory.device_bytes = static_cast<std::size_t>(command.device_memory_mib) * MiB;
  if (command.row_cache_mib) {
    core.models.memory.row_cache_bytes = static_cast<std::size_t>(*command.row_cache_mib) * MiB;
  }
  return options;
}

/// Listens wherever a server with these options would, in their order, and sets ports.
void bind_all(ServerOptions& options, BoundSockets& bound) {
  if (options.metrics) bound.add(*options.metrics);
  for (auto* endpoints : {&options.data.listen, &options.listen, &options.admin}) {
    for (Endpoint& endpoint : *endpoints) bound.add(endpoint);
  }
}

/// Memory for as many arenas of pages as there may be.
std::shared_ptr<const PersistentArenas> persistent_arenas(const ServiceCoreOptions& core) {
  const PageStoreOptions& pages = core.pages;
  if (pages.arena_bytes == 0) return nullptr;
  const auto arenas = static_cast<std::size_t>(pages.max_bytes / pages.arena_bytes);
  const std::size_t tenants = std::max<std::size_t>(core.tenants.size(), 1);
  return std::make_shared<PersistentArenas>(std::min(arenas, tenants),
                                            static_cast<std::uint64_t>(pages.arena_bytes));
}

}  // namespace

void add_serve(CLI::App& program, ServeCommand& command) {
  CLI::App* app = program.add_subcommand("serve", "Serve sessions to other processes over gRPC");
  const auto add = [app](const char* flag, auto& to, const char* description) {
    return with_environment(app->add_option(flag, to, description));
  };
  const auto add_flag = [app](const char* flag, bool& to, const char* description) {
    with_environment(app->add_flag(flag, to, description));
  };
  const auto add_name = [app](const char* flag, const auto& names, auto& to,
                              const char* description) {
    with_environment(add_named(*app, flag, names, to, description));
  };
  const auto add_number = [&add](const char* flag, auto& to, auto lowest, auto highest,
                                 const char* description) {
    add(flag, to, description)->check(between(lowest, highest))->capture_default_str();
  };
  add("--config", command.config_file, "TOML file of these options, without the dashes");
  add("--listen", command.listen,
      "unix:PATH or tcp:HOST:PORT (default unix:$XDG_RUNTIME_DIR/kvtier/kvtier.sock, or "
      "/tmp/kvtier-UID/kvtier.sock)")
      ->delimiter(',')
      ->allow_extra_args(false);
  add("--admin-listen", command.admin_listen,
      "unix:PATH for operators (default: admin.sock beside the default socket; with --listen, the "
      "first Unix socket's path with .admin behind it)")
      ->delimiter(',')
      ->allow_extra_args(false);
  add("--metrics", command.metrics,
      "unix:PATH or tcp:HOST:PORT on loopback, where HTTP has a status page, /metrics for "
      "Prometheus, /status.json and /healthz (default: nowhere)");
  add("--data-listen", command.data_listen,
      "unix:PATH or tcp:HOST:PORT of the data plane, or none (default: beside each Unix socket, "
      "with .data behind its name)")
      ->delimiter(',')
      ->allow_extra_args(false);
  add_flag("--insecure-tcp", command.insecure_tcp, "Allow TCP without TLS, on loopback only");
  add("--tls-cert", command.tls_certificate, "Certificate of the server, PEM");
  add("--tls-key", command.tls_key, "Key of the server, PEM");
  add("--tls-client-ca", command.tls_client_ca, "CA of the clients' certificates, PEM");
  add("--tls-client-crl", command.tls_client_crl,
      "Revocation lists of that CA, PEM; read again by SIGHUP (default: none is revoked)");
  add("--tenants", command.tenants_file, "JSON file of tenants (default: one tenant for all)");
  add_name("--backend", kBackendNames, command.backend,
           "Where kernels run: auto, cpu, cuda (default auto)");
  add_name("--kv-dtype", kPageFormatNames, command.memory.page_format,
           "Rows in pages: model, or int8 for models in bf16 (default model)");
  add_flag("--verify-rows", command.memory.verify_rows,
           "Compare rows in host memory with checksums as they are read");
  with_environment(
      app->add_option_function<std::string>(
             "--worker",
             [&command](const std::string& text) {
               if (text != "auto") command.worker = text == "on";
             },
             "Serve from a process that is replaced after a fault: on, off, or auto, where a GPU "
             "may be used (default auto)")
          ->check(one_of({"auto", "on", "off"})));
  add("--threads", command.threads, "Threads that sessions work on; 0: one per core")
      ->check(between(0, 1024));
  add_number("--max-models", command.max_models, 1, 1024,
             "Engines, one per geometry and set of sketches");
  add_number("--max-sessions", command.max_sessions, 1, 16384, "Sessions in all");
  add_number("--max-session-tokens", command.memory.max_session_tokens, 64, 1 << 26,
             "Tokens of one session");
  add_flag("--whole-sessions", command.whole_sessions,
           "Create a session only where all tokens of its capacity find room, which it then has");
  add_number("--host-memory-mib", command.host_memory_mib, 1, 1 << 24,
             "Pages of keys and values, of each engine");
  add("--disk-cache", command.disk_cache,
      "Folder for pages that find no room in host memory; made where it is missing, with those "
      "above it, and emptied at the start (default: none)");
  add_number("--disk-capacity-mib", command.disk_capacity_mib, 64, 1 << 28,
             "Pages in that folder, of each engine");
  add_remote_tiers(*app, command);
  add("--calibration", command.memory.calibration_file,
      "File of kvtier calibrate that says how to allocate host memory for a GPU (default: none)")
      ->check([](const std::string& text) {
        return std::filesystem::is_regular_file(text) ? "" : "expected a file, found " + text;
      });
  add_number("--device-memory-mib", command.device_memory_mib, 1, 1 << 24,
             "Sketches and workspaces, of each engine");
  add_flag("--prefetch-rows", command.memory.prefetch_rows,
           "After each step cache rows that the next may choose");
  add("--row-cache-mib", command.row_cache_mib,
      "Fetched rows that stay on the GPU, of each engine, beside --device-memory-mib; 0: none "
      "(default: what sketches and workspaces leave of --device-memory-mib)")
      ->check(between(0, 1 << 24));
  add_number(
      "--row-cache-rows", command.memory.row_cache_rows, -1, 1 << 20,
      "Of these, rows per KV head of a session's layer; -1: by the rows that a step selects; 0: "
      "none");
  add_name("--row-cache-policy", kRowCachePolicyNames, command.memory.row_cache_policy,
           "Which of them goes for a new one: clock, lru, score (default score)");
  add_number("--max-inflight-mib", command.max_inflight_mib, 1, 1 << 20,
             "Requests and replies in flight");
  add_number("--session-memory-mib", command.session_memory_mib, 1, 1 << 20,
             "What sessions hold beside their pages: tables, first and last tokens, last replies");
  add_number("--page-arena-mib", command.page_arena_mib, 0, 1 << 22,
             "Page cache of one tenant in MiB, a multiple of 4; 0: none");
  add_number("--page-memory-mib", command.page_memory_mib, 0, 1 << 22,
             "Page caches of all tenants in MiB");
  add_page_tiers(*app, command);
  add_number("--max-device-regions", command.max_device_regions, 0, 256,
             "Allocations of CUDA memory that a client on a Unix socket may share; 0: none");
  add_number("--lease-seconds", command.lease_seconds, 1.0, 86400.0,
             "How long a session lives without a call");
  add_number("--stream-idle-seconds", command.stream_idle_seconds, 1.0, 86400.0,
             "How long a stream may stand still");
  add_number("--device-timeout-seconds", command.device_timeout_seconds, 1.0, 86400.0,
             "How long an engine may work at one call before its device is taken for lost");
  add_number("--drain-seconds", command.drain_seconds, 0.0, 3600.0,
             "How long calls may take to finish at the end");
  app->parse_complete_callback([app, &command] {
    if (!command.config_file.empty()) read_config(*app, command.config_file);
    check_needs(*app, command);
  });
}

int run_serve(const ServeCommand& command, const Console& console, Log& log) {
  raise_descriptor_limit();
  std::signal(SIGPIPE, SIG_IGN);
  ServerOptions options = server_options(command);
  warn_of_open_secrets({{"tls-key", command.tls_key},
                        {"redis-password-file", command.remote.redis_password_file},
                        {"remote-key-file", command.remote.key_file},
                        {"page-key-file", command.page_key_file}},
                       log);
  warn_of_host_memory(options.core.models.memory.host_bytes, log);
  warn_of_disk_space(command, log);
  ServingOptions serving{.drain = milliseconds(command.drain_seconds),
                         .has_tls = !command.tls_certificate.empty()};
  if (!command.tenants_file.empty()) {
    serving.read_tenants = [path = command.tenants_file] { return read_tenants(path); };
  }
  if (wants_worker(command)) {
    check_addresses(options);
    const auto bound = std::make_shared<BoundSockets>();
    bind_all(options, *bound);
    options.bound = bound;
    options.core.pages.kept = persistent_arenas(options.core);
    serving.worker = supervise({.on_end = [&bound] { bound->stop_listening(); }}, log);
    if (serving.worker.exit_code) return *serving.worker.exit_code;
    bound->leave_locks();
    serving.bound = bound;
    // The worker before may have read them again: tokens of then may be no credentials any more.
    if (serving.worker.restarts > 0 && serving.read_tenants) {
      options.core.replaced_tenants = serving.read_tenants();
    }
  }
  options.core.models.memory.tiers = remote_tiers(command);
  options.core.pages.backing = page_backing(command);
  if (command.adjust) command.adjust(options);
  Serving(std::move(options), serving, console, log).run();
  return 0;
}

}  // namespace kvtier::services
