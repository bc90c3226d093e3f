#include "services/page_cache/page_backing.h"

#include "kvtier/error.h"

#include "services/wire/page_layout.h"
#include "transfer/tiers/hmac_sha256.h"
#include "transfer/tiers/key_file.h"
#include "transfer/tiers/sealed_file_tier.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <span>
#include <string_view>
#include <sys/stat.h>
#include <utility>

namespace kvtier::services {
namespace {

constexpr std::string_view kSaltPrefix = "kvtier page cache 1";

[[noreturn]] void fail(ErrorCode code, const std::string& what) {
  throw Error(code, "page cache: " + what);
}

void make_folder(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
      fail(ErrorCode::kUnavailable, "folder: expected one that can be made, found " + path);
    }
  }
  if (!std::filesystem::is_directory(path, error)) {
    fail(ErrorCode::kFailedPrecondition, "folder: expected a folder, found " + path);
  }
}

/// Small enough that what goes at once is a small part.
std::uint64_t segment_bytes(std::uint64_t capacity) {
  constexpr std::uint64_t kLeast = std::uint64_t{16} << 20;
  constexpr std::uint64_t kMost = std::uint64_t{256} << 20;
  return std::clamp(capacity / 16, kLeast, kMost) / kUnitBytes * kUnitBytes;
}

PageBacking make(const PageBackingOptions& options, std::span<const std::byte> secret,
                 const Tenant& tenant) {
  const auto raw = [](auto bytes) {
    return std::span(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  };
  PageBacking backing{.read_time = options.read_time, .write_time = options.write_time};
  tiers::HmacSha256 hmac;
  if (!hmac.set_key(raw(secret)) ||
      !hmac.compute(raw(kSaltPrefix), raw(std::string_view(tenant.name())), backing.salt)) {
    fail(ErrorCode::kUnavailable, "expected HMAC-SHA256 from OpenSSL, found none");
  }
  const std::string owner = "pages/" + tenant.name();
  if (!options.folder.empty()) {
    backing.disk = std::make_shared<tiers::SealedFileTier>(
        tiers::FileTierOptions{.folder = options.folder + "/tenant-" + tenant.name(),
                               .capacity_bytes = options.capacity_bytes,
                               .segment_bytes = segment_bytes(options.capacity_bytes),
                               .max_page_bytes = options.max_page_bytes},
        tiers::SealedFileTier::Owner{owner, secret});
  }
  if (options.make_remote) backing.remote = options.make_remote(owner);
  return backing;
}

}  // namespace

kvtier::PageKey PageBacking::key_of(const PageDigest& digest) noexcept {
  kvtier::PageKey key{};
  std::ranges::copy(digest, key.begin());
  return key;
}

MakeBacking make_backing(PageBackingOptions options) {
  std::vector<std::byte> secret = tiers::read_key_file("page cache: key file", options.key_file);
  if (!options.folder.empty()) {
    if (options.capacity_bytes < PageBackingOptions::kLeastCapacity) {
      fail(ErrorCode::kInvalidArgument, "capacity: expected at least 64 MiB, found " +
                                            std::to_string(options.capacity_bytes) + " bytes");
    }
    make_folder(options.folder);
  }
  return [options = std::move(options), secret = std::move(secret)](const Tenant& tenant) {
    return make(options, secret, tenant);
  };
}

}  // namespace kvtier::services
