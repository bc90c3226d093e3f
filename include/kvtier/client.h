#pragma once

#include "kvtier/device_memory.h"
#include "kvtier/engine.h"
#include "kvtier/memory.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// Sessions in another process: a client of `kvtier serve`. Its calls are those of `Session`,
/// without streams; device tensors lie in memory of `Client::share`.
namespace kvtier {

struct ClientOptions {
  /// "unix:PATH" or "tcp:HOST:PORT".
  std::string server;
  /// Names the tenant, where the server knows tenants by token.
  std::string token{};
  /// Files in PEM, all three for TCP: the CA of the server, and the client's certificate and key.
  std::string tls_server_ca{}, tls_certificate{}, tls_key{};
  bool insecure_tcp = false;  ///< TCP without TLS; the server must allow it.
  /// Of every call, above 0 and at most a year: none waits for ever.
  std::chrono::milliseconds timeout{30'000};
  /// Attempts at a call that the server cannot take now; 1: no retry.
  int attempts = 4;
  /// Send tensors over the server's data plane where it has one: shared memory on the same machine,
  /// its TCP port otherwise. Calls that it cannot take go over gRPC.
  bool data_plane = true;
  /// Connections over which a large read of pages goes at a time, where it goes over gRPC, up to
  /// 16. The thread that calls receives them all; 1: that of the other calls alone; 0: two, on a
  /// machine with more than one core.
  int page_streams = 0;
};

/// A call that the server, or the way to it, has refused. Credentials that are wrong are
/// `kFailedPrecondition`.
class ClientError : public Error {
 public:
  ClientError(ErrorCode code, const std::string& message, std::string reason)
      : Error(code, message), reason_(std::move(reason)) {}

  /// The server's reason, such as "QUOTA_EXCEEDED" or "LEASE_EXPIRED"; empty when there was no
  /// answer.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }

 private:
  std::string reason_;
};

struct RemoteSessionConfig {
  ModelConfig model;
  /// Defaults of the session's calls.
  RetrievalConfig retrieval;
  /// Sketches that calls with other retrieval options need.
  std::vector<SketchConfig> extra_sketches;
  /// 0: the server's limit.
  std::int64_t capacity_tokens = 0;
  /// As in `SessionConfig`; sessions share prefixes with those of their tenant alone. Ids need a
  /// fingerprint, of up to 128 bytes.
  std::span<const std::int32_t> token_ids{};
  std::string model_fingerprint{};
};

struct RemotePagesConfig {
  /// Names the model, the layout of its pages and whatever else must agree between those who
  /// exchange pages; up to 128 bytes.
  std::string model;
  /// Of every page, at most the server's limit (4 MiB).
  std::int64_t page_bytes = 0;
};

/// Memory of a GPU that the program has allocated, in which tensors of calls may lie.
struct ClientDeviceMemory {
  void* data = nullptr;  ///< The beginning of an allocation of `cudaMalloc`.
  std::size_t bytes = 0;
  DeviceMemoryHandle handle{};  ///< Of the allocation.
  /// Copies bytes between this memory and the host's, in either direction, which are there when it
  /// returns: `cudaMemcpy` with `cudaMemcpyDefault`. For tensors that the server cannot reach.
  std::function<void(void* to, const void* from, std::size_t bytes)> copy{};
};

/// A session as the server has it.
struct RemoteSessionInfo {
  std::string name;
  std::vector<std::int64_t> layer_lengths;  ///< Tokens stored per layer.
  std::int64_t capacity_tokens = 0;
  std::int64_t kv_bytes = 0;           ///< Of keys and values, charged to the tenant.
  SessionMemory memory{};              ///< Of `capacity_tokens`, on the server.
  std::chrono::milliseconds lease{0};  ///< Without a call for so long, it ends.
};

class RemoteSession;
class RemotePages;
class SharedDeviceMemory;

/// Items of the batch calls of `Client`: a session of that client, and the arguments of its call.
struct SelectItem {
  RemoteSession* session = nullptr;
  int layer = 0;
  TensorView query{};
  SelectOutputs outputs{};
  AttendOptions options{};
};
struct AttendItem {
  RemoteSession* session = nullptr;
  int layer = 0;
  AttendInputs inputs{};
  AttendOutputs outputs{};
  AttendOptions options{};
};
struct DecodeItem {
  RemoteSession* session = nullptr;
  int layer = 0;
  DecodeInputs inputs{};
  AttendOutputs outputs{};
  AttendOptions options{};
};
struct FetchItem {
  RemoteSession* session = nullptr;
  int layer = 0;
  TensorView tokens{};
  FetchOutputs outputs{};
};

/// What became of one item of a batch.
struct ItemResult {
  std::optional<ClientError> error{};
  [[nodiscard]] bool ok() const noexcept { return !error; }
};

/// A connection to a server. Thread-safe. A thread of it renews the leases of its sessions, so that
/// they live as long as this process; sessions keep the connection alive.
/// In a fork of the process that made it every call throws `kFailedPrecondition`, and what is
/// destroyed there lives on in that process.
///
/// ```cpp
/// kvtier::Client client({.server = "unix:/run/kvtier/kvtier.sock"});
/// kvtier::RemoteSessionConfig config;
/// config.model = {.layers = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
/// kvtier::RemoteSession session = client.open(config);
/// session.append(0, keys, values);
/// session.decode(0, {.query = query, .key = key, .value = value}, {.out = out});
/// ```
class Client {
 public:
  /// Throws `kInvalidArgument` for options that do not go together. Connects with the first call.
  explicit Client(const ClientOptions& options);
  ~Client();
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;

  /// Opens a session, empty but for a stored prefix of `config.token_ids`, as `length` says.
  /// Throws `ClientError`, as all calls do.
  [[nodiscard]] RemoteSession open(const RemoteSessionConfig& config);
  /// Returns the names of all sessions of the caller's tenant, in no order, whichever client has
  /// opened them.
  [[nodiscard]] std::vector<std::string> list_sessions();
  /// Asks for a session of the caller's tenant by its name, which renews its lease.
  [[nodiscard]] RemoteSessionInfo session_info(const std::string& name);
  /// Releases a session of the caller's tenant by its name, such as one that a process which has
  /// died left behind. Its name is never valid again.
  void release(const std::string& name);
  /// Opens a lease on the server's page cache.
  [[nodiscard]] RemotePages open_pages(const RemotePagesConfig& config);
  /// Lets tensors of calls lie in device memory (`MemorySpace::kDevice`), until what is returned is
  /// gone, which must be before the memory is freed. A server of this machine whose engines use the
  /// same GPU reads keys, values and queries there, and writes `out` and `lse`, where they
  /// are dense and begin at multiples of 16 bytes of the allocation; what was written to them must
  /// have arrived when a call is made (`cudaStreamSynchronize`). All else goes through host memory
  /// by `memory.copy`, as everything does with a server that refuses the memory. Throws
  /// `kInvalidArgument` without memory, or `copy`.
  [[nodiscard]] SharedDeviceMemory share(ClientDeviceMemory memory);

  /// The calls of `RemoteSession`, those of many sessions in one exchange with the server: up to
  /// 1,024 items, whose tensors are 4 MiB at most in either direction. Each has
  /// a result, and one that fails leaves the others alone. An item that cannot be sent is thrown
  /// (`kInvalidArgument`, `kUnimplemented`) before any is; what befalls the whole batch is thrown
  /// as `ClientError`. Sessions are used by the calling thread.
  std::vector<ItemResult> batch_select(std::span<const SelectItem> items);
  std::vector<ItemResult> batch_attend(std::span<const AttendItem> items);
  /// Items of one session are executed in their order; behind one that failed, those of its layer
  /// store nothing (`kAborted`). When the reply was lost and the batch is asked for again, a
  /// session with several items answers the last alone, the others are `kAborted`: `refresh` tells
  /// what was stored.
  std::vector<ItemResult> batch_decode(std::span<const DecodeItem> items);
  std::vector<ItemResult> batch_fetch(std::span<const FetchItem> items);

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

/// Device memory that a client shares. Destruction waits a second at most for the server to let it
/// go.
class SharedDeviceMemory {
 public:
  ~SharedDeviceMemory();
  SharedDeviceMemory(SharedDeviceMemory&&) noexcept;
  SharedDeviceMemory& operator=(SharedDeviceMemory&&) noexcept;

  /// Why tensors go through host memory; nothing when the server reaches this memory itself.
  [[nodiscard]] const std::optional<ClientError>& refusal() const noexcept;

  class Impl;

 private:
  friend class Client;
  explicit SharedDeviceMemory(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// As `Session`, in the server. Used by one thread at a time. Destruction releases it, waiting a
/// second at most. `ClientError` with `kUnavailable` or `kDeadlineExceeded` leaves open whether an
/// append was stored: `refresh` tells.
class RemoteSession {
 public:
  ~RemoteSession();
  RemoteSession(RemoteSession&&) noexcept;
  RemoteSession& operator=(RemoteSession&&) noexcept;

  [[nodiscard]] const std::string& name() const noexcept;

  /// As `Session::append`, in chunks; those before one that fails stay.
  void append(int layer, const TensorView& keys, const TensorView& values);
  void select(int layer, const TensorView& query, const SelectOutputs& outputs,
              const AttendOptions& options = {});
  /// `outputs.out` has the dtype of the query; `outputs.selected` is not to be had
  /// (`kUnimplemented`).
  void attend(int layer, const AttendInputs& inputs, const AttendOutputs& outputs,
              const AttendOptions& options = {});
  /// The same. A step whose reply was lost is asked for again, never stored twice.
  void decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
              const AttendOptions& options = {});
  /// As `Session::fetch`, in pieces; those before one that fails have been written.
  void fetch(int layer, const TensorView& tokens, const FetchOutputs& outputs);
  void truncate(std::int64_t tokens);
  /// Opens `count` sessions (1 to 64) that start as this one is and share its pages.
  [[nodiscard]] std::vector<RemoteSession> fork(int count);
  /// As `Session::publish`, for sessions of the same tenant. Needs a session that was opened with a
  /// fingerprint (`kFailedPrecondition`).
  void publish(std::span<const std::int32_t> token_ids);

  /// Returns the tokens of one layer, or those that every layer has, by what the server has said.
  [[nodiscard]] std::int64_t length(int layer) const;
  [[nodiscard]] std::int64_t length() const;
  /// Asks the server for the lengths.
  void refresh();

  class Impl;

 private:
  friend class Client;
  explicit RemoteSession(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// Pages that an engine leaves with the server and gets back, perhaps in another process.
/// Thread-safe. Destruction gives back what was pinned, waiting a second at most; pages that were
/// put stay until the server needs their room. A page that fails leaves the others alone: results
/// are per page.
class RemotePages {
 public:
  /// A page to store. `hash`, of the page's tokens and all before them, up to 64 bytes, finds it
  /// together with `layer`; `bytes` has the page size.
  struct Put {
    std::string hash;
    int layer = 0;
    std::span<const std::byte> bytes;
  };
  /// A page to read, to memory of the page size.
  struct Get {
    std::string handle;
    std::span<std::byte> to;
  };
  struct Found {
    std::string handle;
    std::int64_t bytes = 0;
    std::uint32_t crc32c = 0;
  };
  struct Result {
    ErrorCode code{};      ///< Only with a reason.
    std::string reason{};  ///< Empty: success. "PAGE_GONE": a miss.
    std::string handle{};
    std::uint32_t crc32c = 0;
    bool existed = false;  ///< Of `put`: was there before, and not written again.
    /// Of `put` and `pin`: the server's disk has the page, synced, so that it is found after a
    /// restart, until it makes room for others.
    bool durable = false;

    [[nodiscard]] bool ok() const noexcept { return reason.empty(); }
  };

  ~RemotePages();
  RemotePages(RemotePages&&) noexcept;
  RemotePages& operator=(RemotePages&&) noexcept;

  [[nodiscard]] const std::string& name() const noexcept;

  /// Returns the pages of the leading hashes for which all `layers` are stored, by hash, then
  /// layer. With `pin` they stay until `unpin`.
  [[nodiscard]] std::vector<Found> lookup(std::span<const std::string> hashes,
                                          std::span<const int> layers, bool pin = false);
  /// As `lookup`, of each hash for itself: returns its pages by layer, none unless all `layers` are
  /// stored. Takes `layers`, at least one and at most a batch. Hashes of more than a batch go in
  /// parts, of which a call that throws may have pinned some.
  [[nodiscard]] std::vector<std::vector<Found>> find(std::span<const std::string> hashes,
                                                     std::span<const int> layers, bool pin = false);
  /// Returns of each hash whether all `layers`, as of `find`, are stored. They may go before they
  /// are read.
  [[nodiscard]] std::vector<bool> contains(std::span<const std::string> hashes,
                                           std::span<const int> layers);
  /// Stores pages, each hash and layer once.
  std::vector<Result> put(std::span<const Put> pages);
  /// Reads pages. Those that fail may have written to their memory.
  std::vector<Result> get(std::span<const Get> pages);
  /// Keeps pages from eviction until as many `unpin`, or the end of the lease. Of more than 4,096
  /// pages, which go in parts, a call that throws may have pinned some.
  std::vector<Result> pin(std::span<const std::string> handles);
  std::vector<Result> unpin(std::span<const std::string> handles);
  std::vector<Result> remove(std::span<const std::string> handles);

  class Impl;

 private:
  friend class Client;
  explicit RemotePages(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier
