#include "transfer/tiers/memcached_cluster.h"

#include "kvtier/error.h"

#include "include/types/failure.h"

#include <algorithm>
#include <cstdlib>
#include <libmemcached/memcached.h>
#include <unordered_map>
#include <utility>

namespace kvtier::tiers {
namespace {

using Clock = std::chrono::steady_clock;

struct FreeMemcached {
  void operator()(memcached_st* server) const { memcached_free(server); }
};
using Memcached = std::unique_ptr<memcached_st, FreeMemcached>;

// A server's answer names its size: what is too large is refused before it is allocated. The
// context is the limit.
void* limited_malloc(const memcached_st*, std::size_t size, void* limit) {
  return size > *static_cast<const std::size_t*>(limit) ? nullptr : std::malloc(size);
}
void* limited_realloc(const memcached_st*, void* memory, std::size_t size, void* limit) {
  return size > *static_cast<const std::size_t*>(limit) ? nullptr : std::realloc(memory, size);
}
void* limited_calloc(const memcached_st*, std::size_t count, std::size_t size, void* limit) {
  const std::size_t most = *static_cast<const std::size_t*>(limit);
  return size != 0 && count > most / size ? nullptr : std::calloc(count, size);
}
void plain_free(const memcached_st*, void* memory, void*) { std::free(memory); }

void add(memcached_st* servers, const RemoteEndpoint& endpoint) {
  const memcached_return_t result =
      endpoint.path.empty() ? memcached_server_add(servers, endpoint.host.c_str(), endpoint.port)
                            : memcached_server_add_unix_socket(servers, endpoint.path.c_str());
  if (result != MEMCACHED_SUCCESS) {
    throw_error(ErrorCode::kInvalidArgument, "memcached: expected a server to add, found ",
                memcached_strerror(servers, result));
  }
}

void set(memcached_st* servers, memcached_behavior_t behavior, std::uint64_t value) {
  (void)memcached_behavior_set(servers, behavior, value);
}

Memcached make_servers() {
  Memcached servers(memcached_create(nullptr));
  if (!servers) throw std::bad_alloc();
  return servers;
}

class MemcachedConnection final : public RemoteConnection {
 public:
  MemcachedConnection(const RemoteEndpoint& endpoint, const RemoteOptions& options)
      : options_(options),
        limit_(2 * options.value_limit + (std::size_t{1} << 20)),
        server_(make_servers()) {
    (void)memcached_set_memory_allocators(server_.get(), limited_malloc, plain_free,
                                          limited_realloc, limited_calloc, &limit_);
    const auto timeout = static_cast<std::uint64_t>(options.io_timeout.count());
    set(server_.get(), MEMCACHED_BEHAVIOR_NO_BLOCK, 1);
    set(server_.get(), MEMCACHED_BEHAVIOR_TCP_NODELAY, 1);
    set(server_.get(), MEMCACHED_BEHAVIOR_CONNECT_TIMEOUT, timeout);
    add(server_.get(), endpoint);
  }

  void run(RemoteVerb verb, std::span<RemoteOp> ops, Deadline deadline) override {
    switch (verb) {
      case RemoteVerb::kGet:
        return get(ops, deadline);
      case RemoteVerb::kSet:
        for (RemoteOp& op : ops) store(op, deadline);
        return;
      case RemoteVerb::kRemove:
        for (RemoteOp& op : ops) remove(op, deadline);
        return;
      case RemoteVerb::kProbe:
        return confirm(deadline);
    }
  }

 private:
  void get(std::span<RemoteOp> ops, Deadline deadline) {
    std::vector<const char*> names;
    std::vector<std::size_t> sizes;
    std::unordered_multimap<std::string_view, RemoteOp*> asked;
    for (RemoteOp& op : ops) {
      names.push_back(op.name.data());
      sizes.push_back(op.name.size());
      asked.emplace(op.name, &op);
      op.status = TierStatus::kMiss;
    }
    limit_time(deadline);
    check(memcached_mget(server_.get(), names.data(), sizes.data(), names.size()));

    memcached_result_st result;
    if (memcached_result_create(server_.get(), &result) == nullptr) throw std::bad_alloc();
    const std::unique_ptr<memcached_result_st, void (*)(memcached_result_st*)> guard(
        &result, memcached_result_free);
    for (;;) {
      limit_time(deadline);
      memcached_return_t code = MEMCACHED_SUCCESS;
      if (memcached_fetch_result(server_.get(), &result, &code) == nullptr) {
        if (code != MEMCACHED_END && code != MEMCACHED_NOTFOUND) fail(code);
        break;
      }
      if (code != MEMCACHED_SUCCESS) fail(code);
      take(result, asked);
    }
    // libmemcached ends a get alike when the server has nothing more and when it has fallen silent.
    // A question whose answer is known tells them apart.
    const bool all = std::all_of(ops.begin(), ops.end(),
                                 [](const RemoteOp& op) { return op.status == TierStatus::kOk; });
    if (all) return;
    const memcached_return_t error = memcached_last_error(server_.get());
    if (error != MEMCACHED_SUCCESS && error != MEMCACHED_NOTFOUND) fail(error);
    confirm(deadline);
  }

  void confirm(Deadline deadline) {
    RemoteOp nothing{.name = "kvtier:probe"};
    remove(nothing, deadline);
    if (nothing.status != TierStatus::kMiss) throw RemoteFailure("an answer to another question");
  }

  static void take(memcached_result_st& result,
                   const std::unordered_multimap<std::string_view, RemoteOp*>& asked) {
    const std::string name(memcached_result_key_value(&result),
                           memcached_result_key_length(&result));
    const std::size_t size = memcached_result_length(&result);
    char* const bytes = memcached_result_take_value(&result);
    const std::shared_ptr<const void> owner(bytes, [](void* memory) { std::free(memory); });
    const auto [begin, end] = asked.equal_range(name);
    if (begin == end) throw RemoteFailure("an answer to another question");
    for (auto it = begin; it != end; ++it) {
      it->second->found = {
          owner, {reinterpret_cast<const std::byte*>(bytes), bytes == nullptr ? 0 : size}};
      it->second->status = TierStatus::kOk;
    }
  }

  void store(RemoteOp& op, Deadline deadline) {
    limit_time(deadline);
    const memcached_return_t code =
        memcached_set(server_.get(), op.name.data(), op.name.size(),
                      reinterpret_cast<const char*>(op.value.data()), op.value.size(),
                      static_cast<time_t>(options_.ttl.count()), 0);
    const bool full = code == MEMCACHED_SERVER_MEMORY_ALLOCATION_FAILURE ||
                      code == MEMCACHED_E2BIG || code == MEMCACHED_NOTSTORED;
    if (!full) check(code);
    op.status = full ? TierStatus::kFull : TierStatus::kOk;
  }

  void remove(RemoteOp& op, Deadline deadline) {
    limit_time(deadline);
    const memcached_return_t code =
        memcached_delete(server_.get(), op.name.data(), op.name.size(), 0);
    if (code != MEMCACHED_NOTFOUND) check(code);
    op.status = code == MEMCACHED_NOTFOUND ? TierStatus::kMiss : TierStatus::kOk;
  }

  /// The next silence may last until the deadline, and no longer than `io_timeout`.
  void limit_time(Deadline deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) throw RemoteFailure("no answer before the deadline", /*silent=*/true);
    set(server_.get(), MEMCACHED_BEHAVIOR_POLL_TIMEOUT,
        static_cast<std::uint64_t>(std::min(left, options_.io_timeout).count()));
  }

  void check(memcached_return_t code) {
    if (code != MEMCACHED_SUCCESS && code != MEMCACHED_STORED && code != MEMCACHED_DELETED) {
      fail(code);
    }
  }
  [[noreturn]] void fail(memcached_return_t code) {
    const char* const detail = memcached_last_error_message(server_.get());
    throw RemoteFailure(detail != nullptr ? detail : memcached_strerror(server_.get(), code),
                        code == MEMCACHED_TIMEOUT);
  }

  const RemoteOptions options_;
  std::size_t limit_;
  Memcached server_;
};

/// The ketama ring of the servers that are alive.
class KetamaRing final : public RemoteRouter {
 public:
  explicit KetamaRing(std::vector<RemoteEndpoint> servers) : servers_(std::move(servers)) {
    build(std::vector<bool>(servers_.size(), true));
  }

  std::size_t route(std::string_view name, const std::vector<bool>& alive) override {
    const std::lock_guard lock(mutex_);
    if (alive != alive_) build(alive);
    return places_[memcached_generate_hash(ring_.get(), name.data(), name.size())];
  }

 private:
  void build(const std::vector<bool>& alive) {
    Memcached ring = make_servers();
    set(ring.get(), MEMCACHED_BEHAVIOR_KETAMA_WEIGHTED, 1);
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < servers_.size(); ++i) {
      if (!alive[i]) continue;
      add(ring.get(), servers_[i]);
      places.push_back(i);
    }
    ring_ = std::move(ring);
    places_ = std::move(places);
    alive_ = alive;
  }

  const std::vector<RemoteEndpoint> servers_;
  std::mutex mutex_;  ///< Guards what follows; libmemcached's hashing keeps state.
  Memcached ring_;
  std::vector<std::size_t> places_;  ///< In the ring to in `servers_`.
  std::vector<bool> alive_;
};

}  // namespace

std::shared_ptr<RemoteCluster> make_memcached_cluster(const MemcachedOptions& options) {
  std::vector<RemoteEndpoint> endpoints;
  std::vector<RemoteCluster::Server> servers;
  for (const std::string& text : options.servers) {
    const RemoteEndpoint endpoint = RemoteEndpoint::parse(text);
    endpoints.push_back(endpoint);
    servers.push_back({text, [endpoint, remote = options.remote](Deadline) {
                         return std::make_unique<MemcachedConnection>(endpoint, remote);
                       }});
  }
  return std::make_shared<RemoteCluster>("memcached", options.remote, std::move(servers),
                                         std::make_unique<KetamaRing>(std::move(endpoints)));
}

}  // namespace kvtier::tiers
