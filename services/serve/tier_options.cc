#include "services/serve/tier_options.h"

#include "include/types/failure.h"
#include "services/console/options.h"
#include "services/page_cache/page_store.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace kvtier::services {

void add_remote_tiers(CLI::App& app, ServeCommand& command) {
  const auto add = [&app](const char* flag, auto& to, const char* description) {
    return with_environment(app.add_option(flag, to, description));
  };
  RemoteTiersConfig& remote = command.remote;
  add("--memcached", remote.memcached,
      "HOST:PORT,... or unix:PATH of memcached servers that keep copies of the disk cache's pages")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(word());
  add("--redis", remote.redis, "HOST:PORT or unix:PATH of a Redis server that keeps such copies")
      ->check(word());
  add("--redis-sentinels", remote.redis_sentinels,
      "Instead of --redis: sentinels that know the server --redis-master")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(word());
  add("--redis-master", remote.redis_master, "Name of the master at the sentinels");
  add("--redis-user", remote.redis_user, "User at Redis (default: its default user)");
  add("--redis-password-file", remote.redis_password_file, "File with the password at Redis");
  add("--remote-key-file", remote.key_file,
      "Secret that seals the copies, 16 bytes or more (default: drawn at the start)");
  add("--remote-ttl-seconds", command.remote_ttl_seconds, "After which servers forget a copy")
      ->check(between(1, 30 * 86400))
      ->capture_default_str();
}

void add_page_tiers(CLI::App& app, ServeCommand& command) {
  const auto add = [&app](const char* flag, auto& to, const char* description) {
    return with_environment(app.add_option(flag, to, description));
  };
  add("--page-folder", command.page_folder,
      "Folder that keeps the page cache's pages over a restart, sealed (default: none)");
  add("--page-folder-mib", command.page_folder_mib, "Pages of one tenant in that folder")
      ->check(between(64, 1 << 28))
      ->capture_default_str();
  add("--page-key-file", command.page_key_file,
      "Secret that seals them there and on servers, 16 to 4096 bytes");
  with_environment(app.add_flag("--page-wait-for-disk", command.page_wait_for_disk,
                                "Answer commits of pages when the disk has them, synced"));
  with_environment(
      app.add_flag("--page-remote", command.page_remote,
                   "Share the page cache's pages over the servers of --memcached and --redis"));
}

namespace {

/// Makes tiers; what is wrong with an address names the options that have addresses.
std::vector<std::shared_ptr<PageTier>> make_tiers(const RemoteTiersConfig& config) {
  try {
    return make_remote_tiers(config);
  } catch (const Error& error) {
    constexpr std::string_view kAnyTier = "remote tier: ";
    const std::string_view text = error.what();
    if (!text.starts_with(kAnyTier)) throw;
    std::string options;
    for (const auto& [option, given] : {std::pair("memcached", !config.memcached.empty()),
                                        {"redis", !config.redis.empty()},
                                        {"redis-sentinels", !config.redis_sentinels.empty()}}) {
      if (given) options += (options.empty() ? "" : ", ") + std::string(option);
    }
    throw Error(error.code(), options + ": " + std::string(text.substr(kAnyTier.size())));
  }
}

}  // namespace

std::vector<std::shared_ptr<PageTier>> remote_tiers(const ServeCommand& command) {
  RemoteTiersConfig config = command.remote;
  config.ttl = std::chrono::seconds(command.remote_ttl_seconds);
  if (command.disk_cache.empty() && command.page_remote) return {};
  if (command.disk_cache.empty() && !config.empty()) {
    throw_invalid("memcached, redis",
                  "a disk-cache or page-remote, of whose pages they keep copies", "none");
  }
  return make_tiers(config);  // none of no servers; throws for their options without one
}

MakeBacking page_backing(const ServeCommand& command) {
  const auto expect = [](bool good, const char* option, const char* expected) {
    if (!good) throw_invalid(option, expected, "none");
  };
  const bool any = !command.page_folder.empty() || command.page_remote;
  expect(any || command.page_key_file.empty(), "page-key-file", "page-folder or page-remote");
  expect(!command.page_folder.empty() || !command.page_wait_for_disk, "page-wait-for-disk",
         "page-folder");
  if (!any) return {};
  if (command.page_arena_mib == 0) {
    throw_invalid("page-folder, page-remote", "page-arena-mib above 0", 0);
  }
  expect(!command.page_key_file.empty(), "page-folder, page-remote", "page-key-file");
  PageBackingOptions options{
      .key_file = command.page_key_file,
      .folder = command.page_folder,
      .capacity_bytes = static_cast<std::uint64_t>(command.page_folder_mib) << 20,
      .max_page_bytes = static_cast<std::size_t>(PageStoreOptions{}.extent_bytes)};
  if (command.page_remote) {
    RemoteTiersConfig config = command.remote;
    expect(!config.empty(), "page-remote", "memcached or redis servers");
    config.ttl = std::chrono::seconds(command.remote_ttl_seconds);
    config.key_file = command.page_key_file;
    options.make_remote = [config](const std::string& owner) {
      RemoteTiersConfig own = config;
      own.owner = owner;
      return make_tiers(own);
    };
    (void)options.make_remote("check");  // options that are no use, at the start
  }
  return make_backing(std::move(options));
}

}  // namespace kvtier::services
