#include "services/base/endpoint.h"

#include "kvtier/error.h"

#include <arpa/inet.h>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

/// Makes `folder` for this user alone, or checks that it is that already. A name in /tmp may have
/// been taken by someone else.
void make_private_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    throw Error(ErrorCode::kUnavailable, folder + ": cannot be made: " + std::strerror(errno));
  }
  struct stat info {};
  if (::lstat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() ||
      (info.st_mode & 0077U) != 0) {
    throw Error(ErrorCode::kFailedPrecondition,
                folder + ": expected a folder of this user that is closed to others (mode 0700)");
  }
}

}  // namespace

std::string Endpoint::text() const { return is_unix ? "unix:" + path : "tcp:" + grpc_target(); }

std::string Endpoint::grpc_target() const {
  if (is_unix) return "unix:" + path;
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

bool Endpoint::is_loopback() const {
  in_addr address{};
  return !is_unix &&
         (host == "localhost" || host == "::1" ||
          (host.starts_with("127.") && ::inet_pton(AF_INET, host.c_str(), &address) == 1));
}

Endpoint parse_endpoint(const std::string& text, const char* option) {
  const auto bad_endpoint = [option](const std::string& expected, const std::string& found) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string(option) + ": expected " + expected + ", found \"" + found + "\"");
  };
  constexpr std::string_view kUnix = "unix:";
  constexpr std::string_view kTcp = "tcp:";
  Endpoint endpoint;
  if (text.find('\0') != std::string::npos) bad_endpoint("text", "a zero byte");
  if (text.starts_with(kUnix)) {
    endpoint.path = text.substr(kUnix.size());
    if (!endpoint.path.starts_with('/') || endpoint.path.ends_with('/')) {
      bad_endpoint("unix:/ABSOLUTE/PATH", text);
    }
    constexpr std::size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;
    if (endpoint.path.size() > kLongest) {
      bad_endpoint("a path of at most " + std::to_string(kLongest) + " bytes", text);
    }
    return endpoint;
  }
  if (!text.starts_with(kTcp)) bad_endpoint("unix:PATH or tcp:HOST:PORT", text);
  endpoint.is_unix = false;
  const std::string rest = text.substr(kTcp.size());
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos) bad_endpoint("tcp:HOST:PORT", text);
  endpoint.host = rest.substr(0, colon);
  if (endpoint.host.starts_with('[') && endpoint.host.ends_with(']')) {
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  } else if (endpoint.host.find(':') != std::string::npos) {
    bad_endpoint("brackets around an IPv6 address", text);
  }
  const char* end = rest.data() + rest.size();
  const auto [stop, error] = std::from_chars(rest.data() + colon + 1, end, endpoint.port);
  if (endpoint.host.empty() || error != std::errc() || stop != end || endpoint.port < 0 ||
      endpoint.port > 65535) {
    bad_endpoint("tcp:HOST:PORT with a port of 0 to 65535", text);
  }
  return endpoint;
}

std::string default_socket_folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/') return std::string(runtime) + "/kvtier";
  return "/tmp/kvtier-" + std::to_string(::geteuid());
}

SocketLock::SocketLock(const std::string& path) : path_(path) {
  if (folder_of(path) == default_socket_folder()) make_private_folder(folder_of(path));
  const std::string name = path + ".lock";
  Descriptor lock(::open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock && errno == ENOENT) {
    throw Error(ErrorCode::kUnavailable,
                path + ": expected the folder " + folder_of(path) + ", found none");
  }
  if (!lock) {
    throw Error(ErrorCode::kUnavailable, name + ": cannot be written: " + std::strerror(errno));
  }
  const auto refuse = [&path](const std::string& why) {
    throw Error(ErrorCode::kFailedPrecondition, path + ": " + why);
  };
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) refuse("another server listens there");
  struct stat info {};
  const bool found = ::lstat(path.c_str(), &info) == 0;
  if (found && !S_ISSOCK(info.st_mode)) {
    refuse("expected a socket or nothing, found something else");
  }
  if (found) ::unlink(path.c_str());
  lock_ = std::move(lock);
}

SocketLock::~SocketLock() {
  if (lock_) ::unlink(path_.c_str());
}

}  // namespace kvtier::services
