// The page cache: messages of WritePages as bytes, and calls of two tenants in any order. A page
// that was committed has the same bytes for ever or is gone, nobody has another tenant's, and every
// byte of the arenas is free, reserved or committed.

#include "services/page_cache/page_transfer.h"
#include "services/page_cache/tenant_pages.h"
#include "tests/fuzz/fuzz.h"
#include "transfer/tiers/crc32c.h"

#include <map>
#include <string>
#include <vector>

namespace {

using kvtier::fuzz::Input;
using kvtier::fuzz::require;
using namespace kvtier::services;  // NOLINT(google-build-using-namespace): a program
namespace v1 = kvtier::v1;

constexpr std::int64_t kPageBytes = 5000;  // of two units, the last of them in part
constexpr int kCalls = 64;
constexpr std::size_t kMaxReply = 1000;

ByteRuns runs_of(std::string_view bytes, std::size_t cut) {
  const auto all = std::as_bytes(std::span(bytes));
  cut = std::min(cut, all.size());
  return {all.first(cut), all.subspan(cut)};
}

class Cache {
 public:
  Cache() : tenants_({tenant("a"), tenant("b")}, {}), store_(options()) {
    for (const auto& tenant : tenants_.all()) {
      leases_.push_back(store_.open(*tenant, {.model = "m", .page_bytes = kPageBytes}));
    }
  }

  void run(Input& input) {
    const std::size_t who = input.number(2);
    PageLease& lease = *leases_[who];
    const std::string handle = any(input);
    try {
      call(input, who, lease, handle);
    } catch (const ServiceError& error) {
      require(!error.reason().empty() && error.reason() != "FAULT", "an error has a reason");
      require(error.reason() != "CHECKSUM_FAILED", "a page has the bytes that were committed");
    }
    for (const auto& tenant : tenants_.all()) {
      const PageStats stats = store_.stats(*tenant);
      require(stats.free_bytes + stats.reserved_bytes + stats.committed_bytes == stats.total_bytes,
              "every byte is somewhere");
    }
  }

  void end() {
    for (std::size_t who = 0; who < leases_.size(); ++who) {
      store_.close(*tenants_.all()[who], leases_[who]->name);
    }
    const PageStats stats = store_.stats();
    require(stats.reserved_pages == 0 && stats.pinned_pages == 0, "a lease leaves nothing behind");
    for (const auto& [handle, page] : pages_) check(handle, page.tenant);
  }

 private:
  struct Page {
    std::size_t tenant = 0;
    std::string bytes{};  ///< Once it was read.
  };

  static TenantConfig tenant(const char* name) {
    TenantConfig config;
    config.name = name;
    config.certificate = std::string(name) + ".example";
    return config;
  }
  PageStoreOptions options() {
    PageStoreOptions options;
    options.extent_bytes = 16384;
    options.arena_bytes = 4 * options.extent_bytes;
    options.now = [this] { return now_; };
    return options;
  }

  /// A handle that was made, or none.
  std::string any(Input& input) {
    if (pages_.empty()) return "";
    return std::next(pages_.begin(), static_cast<std::ptrdiff_t>(input.number(pages_.size())))
        ->first;
  }

  void call(Input& input, std::size_t who, PageLease& lease, const std::string& handle) {
    const Tenant& tenant = *tenants_.all()[who];
    switch (input.number(10)) {
      case 0: {
        const PageInfo info = lease.pages.reserve(
            lease, {.layer = static_cast<std::uint32_t>(input.number(2)), .hash = input.take(1)});
        if (!info.existed) pages_[info.handle] = {.tenant = who};
        break;
      }
      case 1: {
        const std::size_t bytes = input.number16();
        write_message(lease, handle, input.take(bytes), input.number(256));
        break;
      }
      case 2: {
        const std::string page(kPageBytes, static_cast<char>(input.number(256)));
        static_cast<void>(lease.pages.commit(lease, handle, std::as_bytes(std::span(page))));
        break;
      }
      case 3: {
        const std::string part(input.number16(), static_cast<char>(input.number(256)));
        lease.pages.write(lease, handle, input.number16(), std::as_bytes(std::span(part)));
        break;
      }
      case 4:
        static_cast<void>(lease.pages.commit(lease, handle, std::nullopt));
        break;
      case 5:
        lease.pages.abort(lease, handle);
        break;
      case 6:
        lease.pages.remove(lease, handle);
        break;
      case 7:
        input.number(2) == 0 ? static_cast<void>(lease.pages.pin(lease, handle))
                             : lease.pages.unpin(lease, handle);
        break;
      case 8:
        read_message(tenant, who, input);
        break;
      default:
        now_ += std::chrono::seconds(input.number(40));
        store_.sweep();
        for (const auto& each : leases_) {
          static_cast<void>(store_.find(*tenants_.all()[each == leases_[1]], each->name));
        }
    }
    if (!handle.empty()) check(handle, pages_[handle].tenant);
  }

  /// What is parsed in two pieces is what protobuf finds in the whole. A handle of one character
  /// stands for one that was made.
  void write_message(PageLease& lease, const std::string& handle, std::string_view bytes,
                     std::size_t cut) {
    WriteMessage message;
    try {
      message = parse_write_message(runs_of(bytes, cut));
    } catch (const kvtier::Error&) {
      return;
    }
    v1::WritePagesRequest parsed;
    if (parsed.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      require(parsed.chunks_size() == static_cast<int>(message.chunks.size()), "as many chunks");
      for (int i = 0; i < parsed.chunks_size(); ++i) {
        const WriteChunk& chunk = message.chunks[static_cast<std::size_t>(i)];
        std::string data;
        for (const auto& run : chunk.data) {
          data.append(reinterpret_cast<const char*>(run.data()), run.size());
        }
        require(data == parsed.chunks(i).data() &&
                    chunk.fields.handle() == parsed.chunks(i).handle() &&
                    chunk.fields.offset() == parsed.chunks(i).offset(),
                "the same chunks");
      }
    }
    for (WriteChunk& chunk : message.chunks) {
      if (chunk.fields.handle().size() == 1) chunk.fields.set_handle(handle);
    }
    PageWriter writer(store_);
    const auto finish = [&] {
      const v1::WritePagesResponse response = writer.finish();
      for (const v1::PageResult& item : response.items()) {
        require(item.status().reason() != "FAULT", "a message is no fault of the server");
      }
    };
    try {
      writer.write(lease, message, 16);
    } catch (...) {
      finish();
      throw;
    }
    finish();
  }

  /// What a ReadPages sends is a message, and has the bytes that the store has.
  void read_message(const Tenant& tenant, std::size_t who, Input& input) {
    v1::ReadPagesRequest request;
    for (std::size_t i = input.number(5); i > 0; --i) request.add_handles(any(input));
    PageReader reader(store_, tenant, request);
    std::map<int, std::string> found;
    for (;;) {
      const std::vector<ReadPiece> pieces = reader.next(kMaxReply);
      if (pieces.empty()) break;
      std::string text;
      for (const ReadPiece& piece : pieces) {
        text += piece.head;
        text.append(reinterpret_cast<const char*>(piece.data.data()), piece.data.size());
      }
      v1::ReadPagesResponse response;
      require(response.ParseFromString(text), "a reply is a message");
      for (const auto& chunk : response.chunks()) {
        std::string& bytes = found[chunk.index()];
        require(chunk.offset() == static_cast<std::int64_t>(bytes.size()), "chunks follow");
        bytes += chunk.data();
      }
    }
    for (const auto& [index, bytes] : found) {
      if (!bytes.empty()) compare(request.handles(index), who, bytes);
    }
  }

  /// Reads a page as each tenant.
  void check(const std::string& handle, std::size_t owner) {
    for (std::size_t who = 0; who < leases_.size(); ++who) {
      try {
        const PinnedPage page = store_.read(*tenants_.all()[who], handle);
        require(who == owner, "a page is its tenant's");
        require(kvtier::crc32c(page.bytes()) == page.crc(), "a page has its checksum");
        compare(handle, who,
                {reinterpret_cast<const char*>(page.bytes().data()), page.bytes().size()});
      } catch (const ServiceError& error) {
        require(error.reason() == (who == owner ? "PAGE_GONE" : "NOT_FOUND") ||
                    (who == owner && error.reason() == "NOT_COMMITTED"),
                "a page is missing for a reason");
      }
    }
  }

  void compare(const std::string& handle, std::size_t who, std::string_view bytes) {
    Page& page = pages_[handle];
    require(page.tenant == who, "a page is its tenant's");
    require(bytes.size() == kPageBytes, "a page is whole");
    if (page.bytes.empty()) page.bytes = bytes;
    require(page.bytes == bytes, "a page never changes");
  }

  TimePoint now_{std::chrono::hours(1)};
  const Tenants tenants_;
  PageStore store_;
  std::vector<std::shared_ptr<PageLease>> leases_;
  std::map<std::string, Page> pages_;
};

}  // namespace

/// For each call: bytes for the tenant, the page and the kind, then what the kind takes.
int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Cache cache;
  for (int i = 0; i < kCalls && !input.empty(); ++i) cache.run(input);
  cache.end();
  return 0;
}
