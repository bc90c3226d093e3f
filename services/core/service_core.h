#pragma once

#include "kvtier/v1/admin.pb.h"
#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/page.pb.h"
#include "kvtier/v1/session.pb.h"

#include "services/base/admission.h"
#include "services/base/service_core_observer.h"
#include "services/base/service_error.h"
#include "services/base/tenants.h"
#include "services/core/group_memory.h"
#include "services/core/model_pool.h"
#include "services/core/page_verbs.h"
#include "services/core/session_table.h"
#include "services/core/session_verbs.h"
#include "services/page_cache/page_store.h"
#include "services/wire/rpc.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvtier::services {

/// Most bytes of a request and of a reply, as gRPC counts them.
inline constexpr std::int64_t kMaxMessageBytes = std::int64_t{4} << 20;
inline constexpr int kMaxBatchItems = 1024;
/// Most children of one fork.
inline constexpr int kMaxForks = 64;
/// What is left of a message for the tensors of a reply.
inline constexpr std::int64_t kReplyBytes = kMaxMessageBytes - (std::int64_t{64} << 10);
/// Most bytes of a message of TransferService.
inline constexpr std::int64_t kMaxTransferBytes = std::int64_t{1} << 20;

struct ServiceCoreOptions {
  ModelPoolOptions models;
  RetrievalConfig retrieval;  ///< Defaults of sessions.
  std::vector<TenantConfig> tenants;
  /// What `tenants` have become since, as `replace_tenants` takes them; empty: they are as they
  /// were.
  std::vector<TenantConfig> replaced_tenants{};
  TenantLimits default_limits;  ///< Of the one tenant when none is configured.
  PageStoreOptions pages;       ///< Without `lease_ttl` and `now`, which are those below.
  std::size_t max_sessions = 16000;
  bool whole_sessions = false;  ///< `SessionConfig::whole` of every session that is created.
  /// Requests and replies of calls that are queued or executed.
  std::int64_t max_inflight_bytes = std::int64_t{256} << 20;
  /// What sessions hold beside the pages of their engines: tables, first and last tokens, last
  /// replies.
  std::int64_t max_session_memory = std::int64_t{4} << 30;
  int max_queued_per_session = 64;  ///< Calls; a batch is one, however many its items are.
  std::chrono::milliseconds lease_ttl{60'000};
  /// Of calls that name no deadline.
  std::chrono::milliseconds max_call_time{30'000};
  /// A device that works longer at one piece of a call is lost. Only of engines of
  /// `watched_backend`: on the CPU nothing can fail to answer.
  std::chrono::milliseconds device_timeout{60'000};
  Backend watched_backend = Backend::kCuda;
  /// Most work of a piece of a call, between which other calls have the engine: query tokens times
  /// tokens of the layer times query heads times head_dim. At least one query token. 0: 2^27 on the
  /// CPU, some 20 ms of two cores; 2^33 on a GPU.
  std::int64_t piece_work = 0;
  std::function<TimePoint()> now = [] { return std::chrono::steady_clock::now(); };
  /// The memory of control groups, in each of which sessions and pages must find room: asked for
  /// each piece of an arena, and by `sweep` for sessions; a negative answer is cached. Empty: not
  /// asked.
  MemoryRoom::Read group_memory{};
  std::vector<ServiceCoreObserver*> observers{};  ///< Must outlive the core.
};

/// Who calls, until when, and whether the caller is still there.
struct Call {
  Tenant* tenant = nullptr;
  TimePoint deadline = TimePoint::max();
  std::function<bool()> cancelled{};
  /// Of the transport, which keeps it until the client has the reply; null: the call is counted
  /// until it is done.
  std::shared_ptr<InflightReservation> reservation{};
};

/// Receives how a call ended: null when it succeeded and its reply is filled. Called exactly once,
/// on any thread, perhaps before the call returns; must not throw.
using Done = std::function<void(const ServiceError*)>;

/// How a unit of work is queued on a session or a lease.
struct QueueOptions {
  Strand::Start start = Strand::Start::kQueued;
  bool counts = true;  ///< As a call; false: of a batch that has an item there.
};

/// The service without its transport: checks, admits, queues and executes the calls of
/// kvtier.v1. Requests and replies must live until `Done` is called. Thread-safe.
///
/// Calls of one session run one after another, in the order in which they came. A call that fails
/// has changed nothing, also for want of memory. Only those that say so throw.
class ServiceCore {
 public:
  ServiceCore(ServiceCoreOptions options, Executor& executor);
  /// Ends every session. Nothing may be queued any more.
  ~ServiceCore();
  ServiceCore(const ServiceCore&) = delete;  // tasks hold its address
  ServiceCore& operator=(const ServiceCore&) = delete;

  [[nodiscard]] const Tenants& tenants() const noexcept { return tenants_; }

  /// As `Tenants::replace`.
  void replace_tenants(const std::vector<TenantConfig>& configs) { tenants_.replace(configs); }
  void revoke(std::shared_ptr<const RevocationList> revoked) {
    tenants_.revoke(std::move(revoked));
  }

  /// Executes a call with one request and one response; `SessionRpcs`, `AttentionRpcs` and
  /// `PageRpcs` list them.
  void run(const Call& call, const v1::CreateSessionRequest& request,
           v1::CreateSessionResponse& response, Done done);
  void run(const Call& call, const v1::ReleaseSessionRequest& request,
           v1::ReleaseSessionResponse& response, Done done);
  void run(const Call& call, const v1::OpenLeaseRequest& request, v1::OpenLeaseResponse& response,
           Done done);
  void run(const Call& call, const v1::CloseLeaseRequest& request, v1::CloseLeaseResponse& response,
           Done done);
  /// All other calls, which name a session, a lease, or a session for each item; and one chunk of
  /// an append, one step of a decode. What they do to a session is in session_verbs.h or `answer`,
  /// to a lease in page_verbs.h.
  template <typename Request, typename Response>
  void run(const Call& call, const Request& request, Response& response, Done done) {
    if constexpr (requires { request.items(0).session(); }) {
      batch(call, request, response, std::move(done));
    } else if constexpr (requires { request.lease(); }) {
      on_lease(call, request, response, std::move(done));
    } else if constexpr (requires { request.session(); }) {
      run_in(request.session(), call, request, response, std::move(done));
    } else {
      run_in(request.name(), call, request, response, std::move(done));
    }
  }
  /// As `run`, where `session` replaces the name in the request.
  template <typename Request, typename Response>
  void run_in(const std::string& session, const Call& call, const Request& request,
              Response& response, Done done) {
    constexpr bool kReadsOnly = std::is_same_v<Request, v1::GetSessionRequest>;
    on_session(call, rpc_name<Request>(), session, request.ByteSizeLong(),
               [this, &request, &response, reservation = call.reservation](SessionEntry& entry) {
                 if constexpr (requires { answer(entry, request, response); }) {
                   answer(entry, request, response);
                 } else {
                   ReplyBudget budget(kReplyBytes, reservation);
                   return execute(entry, request, budget, response);
                 }
               },
               std::move(done),
               {.start = kReadsOnly ? Strand::Start::kNowIfIdle : Strand::Start::kQueued});
  }
  /// Answers on the calling thread with what `act` fills, or throws: an operation of its own.
  template <typename Act>
  void answer_now(const Call& call, std::string_view method, Act act, const Done& done) {
    const CallRecord arrival = arrive(call, method);
    const std::optional<ServiceError> failure = failure_of(act);
    ++(failure ? rejected_ : admitted_);
    finish(arrival, {}, failure ? &*failure : nullptr, done);
  }
  /// Counts a call that the transport has refused.
  void refused(const Call& call, std::string_view method, const ServiceError& error) {
    answer_now(
        call, method, [&error] { throw error; }, [](const ServiceError* /*error*/) {});
  }
  /// Throws `ServiceError`.
  void list_sessions(const Call& call, const v1::ListSessionsRequest& request,
                     v1::ListSessionsResponse& response);
  /// Throws `ServiceError` for too many names.
  void keep_alive(const Call& call, const v1::KeepAliveRequest& request,
                  v1::KeepAliveResponse& response);

  /// For calls that move pages: returns the tenant's own lease, renewed. Throws `ServiceError`.
  [[nodiscard]] std::shared_ptr<PageLease> lease(const Call& call, const std::string& name);
  /// Charges a request of `bytes`, and a reply as large, until the result is destroyed. Throws
  /// `ServiceError` at a limit.
  [[nodiscard]] std::shared_ptr<InflightReservation> admit(Tenant& tenant, std::size_t bytes);
  [[nodiscard]] PageStore& pages() noexcept { return pages_; }

  void get_stats(v1::GetStatsResponse& response) const;
  void get_server_info(v1::GetServerInfoResponse& response) const;
  /// Throws `ServiceError`.
  void list_tenants(const v1::ListTenantsRequest& request, v1::ListTenantsResponse& response) const;
  /// Throws `ServiceError`.
  void set_tenant_quota(const v1::SetTenantQuotaRequest& request,
                        v1::SetTenantQuotaResponse& response);
  void evict_tenant(const v1::EvictTenantRequest& request, v1::EvictTenantResponse& response);

  /// From now on every new call is refused with UNAVAILABLE; queued ones are executed.
  void drain() noexcept { draining_ = true; }
  [[nodiscard]] bool draining() const noexcept { return draining_; }
  /// Throws UNAVAILABLE (DRAINING) once the server drains.
  void check_serving() const;
  /// Ends the sessions whose leases have run out, gives up engines that do not come to the end of a
  /// call, and looks whether there is memory for sessions. Called every second or so.
  void sweep();
  [[nodiscard]] std::size_t num_sessions() const { return sessions_.size(); }
  [[nodiscard]] std::int64_t inflight_bytes() const noexcept { return inflight_; }
  /// Of a call that names none.
  [[nodiscard]] std::chrono::milliseconds max_call_time() const noexcept {
    return options_.max_call_time;
  }
  [[nodiscard]] std::int64_t session_memory() const noexcept { return memory_.used(); }
  /// Sums over the engines.
  [[nodiscard]] Stats engine_stats() const { return models_.stats(); }
  /// Sums over the tenants.
  [[nodiscard]] PageStats page_stats() const { return pages_.stats(); }
  [[nodiscard]] const TransferCounts& transfers() const noexcept { return pages_.transfers(); }
  /// As `ModelPool::any_failed`.
  [[nodiscard]] bool degraded() const { return models_.any_failed(); }

 private:
  /// Does a call, or returns it if it is done in pieces.
  using Work = std::function<std::unique_ptr<CallInPieces>(SessionEntry&)>;

  /// An operation from its arrival to its end.
  struct CallRecord {
    std::string_view method;
    Tenant& tenant;
    TimePoint time;
  };

  [[nodiscard]] CallRecord arrive(const Call& call, std::string_view method);
  /// Notifies observers, then the client; `started` is when the work began, if it waited.
  void finish(const CallRecord& arrival, std::optional<TimePoint> started,
              const ServiceError* error, const Done& done) const;
  /// Refuses with the exception that is being handled.
  void refuse(const CallRecord& arrival, const Done& done);
  [[nodiscard]] TimePoint deadline_of(const Call& call) const;
  /// Of a session or a lease.
  template <typename Entry>
  void renew(Entry& entry) const {
    entry.lease_end = (options_.now() + options_.lease_ttl).time_since_epoch().count();
  }
  /// Counts a request of `bytes`, and a reply as large, until the call is done or, with a
  /// reservation of the transport, for as long as that lasts. Throws as `admit`.
  [[nodiscard]] std::shared_ptr<InflightReservation> admit_call(const Call& call,
                                                                std::size_t bytes);
  /// As `renew`, on behalf of the client.
  void renew_for_client(SessionEntry& entry) const;
  /// Throws when a call has waited past its deadline, or its caller has gone.
  void check_wanted(const Call& call) const;
  /// Does a step of a queued call and returns whether it was the last.
  using Step = std::function<bool(const Call& call)>;
  /// Calls `act` when a call that has succeeded may be answered, which holds no thread until then.
  using Settle = std::function<void(std::function<void()> act)>;
  /// Admits a call and queues its steps on the strand of a session or a lease. Throws with nothing
  /// queued.
  template <typename Entry>
  void queue(const CallRecord& arrival, const Call& call, std::size_t bytes,
             const std::shared_ptr<Entry>& entry, Step step, const Done& done,
             QueueOptions queueing, Settle settling = nullptr);
  /// Finds a session, admits and queues; `verb(entry)`, which may return a call in pieces, runs on
  /// the session's strand. Returns whether it is queued.
  template <typename Verb>
  bool on_session(const Call& call, std::string_view method, const std::string& name,
                  std::size_t bytes, Verb verb, const Done& done, QueueOptions queueing = {}) {
    const CallRecord arrival = arrive(call, method);
    try {
      queue_on_session(
          arrival, call, name, bytes,
          [verb = std::move(verb)](SessionEntry& entry) -> std::unique_ptr<CallInPieces> {
            if constexpr (std::is_void_v<std::invoke_result_t<const Verb&, SessionEntry&>>) {
              verb(entry);
              return nullptr;
            } else {
              return verb(entry);
            }
          },
          done, queueing);
      return true;
    } catch (...) {
      refuse(arrival, done);
      return false;
    }
  }
  void queue_on_session(const CallRecord& arrival, const Call& call, const std::string& name,
                        std::size_t bytes, Work work, const Done& done, QueueOptions queueing);
  /// Does a piece of a call and returns whether it was the last. `pieces` is what is left of the
  /// call, null at first and after the last.
  bool do_piece(const Call& call, SessionEntry& entry, const Work& work,
                std::shared_ptr<CallInPieces>& pieces) const;
  /// An engine that met a fault of its device answers nothing more.
  void note_fault(const Error& error, Model& model) const;
  /// Returns whether it was not known before.
  bool give_up(Model& model) const;
  /// A session that is being created: on the calling thread, then, while there is no engine for
  /// it, where engines are made, then on its own strand.
  struct Creation;
  /// Ends the creation with what `act` throws.
  template <typename Act>
  void proceed(Creation& creation, Act act);
  /// Reads the request, and charges the tenant for a session.
  void prepare(Creation& creation) const;
  /// Throws when the call has waited too long, or its caller has gone.
  void begin(Creation& creation) const;
  void queue_opening(const std::shared_ptr<Creation>& creation);
  void open(const Creation& creation, const std::shared_ptr<SessionEntry>& entry);
  void end(Creation& creation, const ServiceError* error);
  [[nodiscard]] ModelPoolOptions model_options() const;
  [[nodiscard]] std::int64_t piece_work_of(const Model& model) const;
  /// Throws RESOURCE_EXHAUSTED where there is no room for so many sessions more: TOO_MANY_SESSIONS,
  /// or OUT_OF_MEMORY while the control group is short of it.
  void check_room(std::size_t sessions) const;
  /// Makes a session's children; they are not in the table yet.
  [[nodiscard]] std::vector<std::shared_ptr<SessionEntry>> fork(SessionEntry& parent, int count);
  /// Charges the entry's tenant for what a session keeps beside its pages.
  void charge_base(SessionEntry& entry, std::int64_t capacity_tokens) const;
  void describe(SessionEntry& entry, v1::Session& session) const;
  /// Writes what a truncation changes of a description.
  static void describe_length(SessionEntry& entry, v1::Session& session) noexcept;

  // What requests do to a session beside those of session_verbs.h; called on its strand.
  void answer(SessionEntry& entry, const v1::GetSessionRequest& request,
              v1::GetSessionResponse& response) const;
  void answer(SessionEntry& entry, const v1::TruncateSessionRequest& request,
              v1::TruncateSessionResponse& response) const;
  void answer(SessionEntry& entry, const v1::ForkSessionRequest& request,
              v1::ForkSessionResponse& response);

  /// Queues every item on the strand of its session.
  template <typename Request, typename Response>
  void batch(const Call& call, const Request& request, Response& response, Done done);

  /// Finds, admits and queues; the request is executed on the lease's strand.
  template <typename Request, typename Response>
  void on_lease(const Call& call, const Request& request, Response& response, const Done& done) {
    const CallRecord arrival = arrive(call, rpc_name<Request>());
    try {
      const std::shared_ptr<PageLease> found = lease(call, request.lease());
      Settle settling;
      if constexpr (requires { settle(*found, response, nullptr); }) {
        settling = [&lease = *found, &response](std::function<void()> act) {
          settle(lease, response, std::move(act));
        };
      }
      queue(
          arrival, call, request.ByteSizeLong(), found,
          [this, &lease = *found, &request, &response](const Call& queued) {
            check_wanted(queued);
            execute(lease, request, response);
            return true;
          },
          done, {}, std::move(settling));
    } catch (...) {
      refuse(arrival, done);
    }
  }

  const ServiceCoreOptions options_;
  const TimePoint started_;
  Executor& executor_;
  Tenants tenants_;
  SessionMemoryBudget memory_;
  MemoryRoom room_;
  ModelPool models_;
  PageStore pages_;
  SessionTable sessions_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> short_of_memory_{false};  ///< Too short for sessions, when last looked at.
  std::atomic<std::int64_t> inflight_{0};
  std::atomic<std::uint64_t> received_{0}, admitted_{0}, rejected_{0};
  std::atomic<std::uint64_t> created_{0}, released_{0}, expired_{0};
};

}  // namespace kvtier::services
