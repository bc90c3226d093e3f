#include "services/core/service_core.h"

#include "kvtier/error.h"
#include "kvtier/version.h"

#include "services/base/from_message.h"
#include "services/base/replay_cache.h"
#include "services/core/stats_message.h"
#include "services/wire/durations.h"
#include "services/wire/to_message.h"

#include <new>
#include <unordered_set>

namespace kvtier::services {
namespace {

constexpr int kMaxQueuedCreations = 1024;

/// Bytes that a session keeps beside keys and values: its tables, and its first and last tokens.
std::int64_t base_bytes_of(const Config& config, std::int64_t capacity_tokens) {
  const ModelConfig& model = config.model;
  const std::int64_t resident = std::int64_t{config.retrieval.sink_tokens} +
                                config.retrieval.recent_tokens + config.memory.max_batch_rows;
  const std::int64_t pages = capacity_tokens / config.memory.page_tokens + 1;
  return model.layers * (pages * 16 + resident * model.kv_heads * model.head_dim * 4);
}

void check_prefix(const v1::CreateSessionRequest& request, std::int64_t capacity) {
  constexpr std::size_t kMaxFingerprint = 128;
  const std::size_t bytes = request.model_fingerprint().size();
  if (bytes > kMaxFingerprint || (bytes == 0 && request.token_ids_size() > 0)) {
    throw ServiceError::invalid("model_fingerprint",
                                "1 to " + std::to_string(kMaxFingerprint) + " bytes with token_ids",
                                std::to_string(bytes));
  }
  check_at_most("token_ids", request.token_ids_size(), capacity, ", the capacity");
}

/// Counts what a tenant has made for it apart from its sessions' strands, until the result is gone.
/// Throws QUEUE_FULL where that is too much.
std::shared_ptr<void> place_for(Tenant& tenant, const char* too_many) {
  if (!tenant.take(Shared::kCreations, 1, kMaxQueuedCreations)) {
    throw ServiceError::overloaded("QUEUE_FULL", too_many);
  }
  return {nullptr, [&tenant](void*) { tenant.give(Shared::kCreations, 1); }};
}

PageStoreOptions page_options(const ServiceCoreOptions& options, MemoryRoom& room) {
  PageStoreOptions pages = options.pages;
  pages.lease_ttl = options.lease_ttl;
  pages.now = options.now;
  pages.may_take = [&room](std::uint64_t bytes) { return room.has(MemoryUse::kPages, bytes); };
  return pages;
}

}  // namespace

struct ServiceCore::Creation {
  Creation(const CallRecord& arrival_in, Call call_in, const v1::CreateSessionRequest& request_in,
           v1::CreateSessionResponse& response_in, Done done_in)
      : arrival(arrival_in),
        call(std::move(call_in)),
        request(request_in),
        response(response_in),
        done(std::move(done_in)) {}
  Creation(const Creation&) = delete;  // ends once
  Creation& operator=(const Creation&) = delete;

  const CallRecord arrival;
  const Call call;
  const v1::CreateSessionRequest& request;
  v1::CreateSessionResponse& response;
  const Done done;
  std::shared_ptr<void> place;  ///< Among what is created.
  std::shared_ptr<InflightReservation> reservation;
  ModelSpec spec;
  std::int64_t capacity = 0;
  bool charged = false;  ///< For a session; later the entry is.
  std::shared_ptr<Model> model;
  std::shared_ptr<SessionEntry> entry;
  std::optional<TimePoint> started;
};

ServiceCore::ServiceCore(ServiceCoreOptions options, Executor& executor)
    : options_(std::move(options)),
      started_(options_.now()),
      executor_(executor),
      tenants_(options_.tenants, options_.default_limits),
      memory_(options_.max_session_memory),
      room_(options_.group_memory, options_.now),
      models_(model_options()),
      pages_(page_options(options_, room_)) {
  if (!options_.replaced_tenants.empty()) replace_tenants(options_.replaced_tenants);
}

ModelPoolOptions ServiceCore::model_options() const {
  ModelPoolOptions models = options_.models;
  models.on_tier_wait = [this](bool waiting) {
    if (waiting) {
      BusyMark::pause();
    } else {
      BusyMark::go_on(options_.now());
    }
    executor_.on_tier_wait(waiting);
  };
  return models;
}

std::int64_t ServiceCore::piece_work_of(const Model& model) const {
  if (options_.piece_work > 0) return options_.piece_work;
  return std::int64_t{1} << (model.engine.backend() == Backend::kCpu ? 27 : 33);
}

ServiceCore::~ServiceCore() {
  for (const auto& entry : sessions_.remove_all()) entry->close();
}

ServiceCore::CallRecord ServiceCore::arrive(const Call& call, std::string_view method) {
  ++received_;
  return {.method = method, .tenant = *call.tenant, .time = options_.now()};
}

void ServiceCore::finish(const CallRecord& arrival, std::optional<TimePoint> started,
                         const ServiceError* error, const Done& done) const {
  if (!options_.observers.empty()) {
    Operation operation{.method = arrival.method, .tenant = arrival.tenant, .error = error};
    operation.duration = options_.now() - arrival.time;
    if (started) operation.queued = *started - arrival.time;
    for (ServiceCoreObserver* observer : options_.observers) observer->finished(operation);
  }
  done(error);
}

void ServiceCore::refuse(const CallRecord& arrival, const Done& done) {
  ++rejected_;
  const ServiceError error = to_service_error(std::current_exception());
  finish(arrival, {}, &error, done);
}

TimePoint ServiceCore::deadline_of(const Call& call) const {
  return call.deadline == TimePoint::max() ? options_.now() + options_.max_call_time
                                           : call.deadline;
}

void ServiceCore::renew_for_client(SessionEntry& entry) const {
  const TimePoint::duration remaining =
      TimePoint::duration(entry.lease_end) - options_.now().time_since_epoch();
  for (ServiceCoreObserver* observer : options_.observers) observer->lease_renewed(remaining);
  renew(entry);
}

void ServiceCore::check_wanted(const Call& call) const {
  if (options_.now() > call.deadline) {
    throw ServiceError::unavailable("QUEUE_TIMEOUT", "the call waited past its deadline");
  }
  if (call.cancelled && call.cancelled()) {
    throw ServiceError(Code::kAborted, "CANCELLED", "the caller has gone");
  }
}

bool ServiceCore::do_piece(const Call& call, SessionEntry& entry, const Work& work,
                           std::shared_ptr<CallInPieces>& pieces) const {
  std::optional<BusyMark> mark;
  if (entry.model->engine.backend() == options_.watched_backend) {
    mark.emplace(entry, options_.now());
  }
  check_wanted(call);
  if (!entry.session) throw ServiceError::not_found();
  if (entry.model->failed) throw ServiceError::unavailable("DEVICE_LOST", "the device failed");
  try {
    if (pieces == nullptr) pieces = work(entry);
    return pieces == nullptr || pieces->next();
  } catch (const Error& error) {
    note_fault(error, *entry.model);
    throw;
  }
}

template <typename Entry>
void ServiceCore::queue(const CallRecord& arrival, const Call& call, std::size_t bytes,
                        const std::shared_ptr<Entry>& entry, Step step, const Done& done,
                        QueueOptions queueing, Settle settling) {
  constexpr bool kIsSession = std::is_same_v<Entry, SessionEntry>;
  std::shared_ptr<InflightReservation> reservation = admit_call(call, bytes);
  Call queued = call;
  const int counted = queueing.counts ? 1 : 0;
  if (queueing.counts && entry->calls.fetch_add(1) >= options_.max_queued_per_session) {
    --entry->calls;
    throw ServiceError::overloaded("QUEUE_FULL", kIsSession
                                                     ? "too many calls of this session are waiting"
                                                     : "too many calls of this lease are waiting");
  }
  queued.deadline = deadline_of(call);
  if constexpr (kIsSession) renew_for_client(*entry);  // a lease was renewed when it was found
  ++admitted_;
  ++entry->queued;
  try {
    entry->strand->enqueue(
        queueing.start,
        [this, arrival, entry, counted, done = done, reservation = std::move(reservation),
         queued = std::move(queued), step = std::move(step),
         has_answered = settling ? std::make_shared<std::atomic<bool>>(false) : nullptr,
         settling = std::move(settling), started = std::optional<TimePoint>()]() mutable {
          if (!started) started = options_.now();
          bool has_ended = true;
          const std::optional<ServiceError> failure = failure_of([&] { has_ended = step(queued); });
          if (!has_ended) return false;
          step = nullptr;
          reservation.reset();
          const auto end = [this, arrival, entry, counted, started, has_answered,
                            done = std::move(done)](const ServiceError* error = nullptr) {
            if (has_answered && has_answered->exchange(true)) return;
            renew(*entry);
            --entry->queued;
            entry->calls -= counted;
            finish(arrival, started, error, done);
          };
          if (failure || !settling) {
            end(failure ? &*failure : nullptr);
          } else if (failure_of([&] { settling(end); })) {
            end();  // no memory to wait: the reply says what is durable by now
          }
          return true;
        });
  } catch (...) {
    --admitted_;
    --entry->queued;
    entry->calls -= counted;
    throw;
  }
}

template void ServiceCore::queue(const CallRecord&, const Call&, std::size_t,
                                 const std::shared_ptr<PageLease>&, Step, const Done&, QueueOptions,
                                 Settle);

void ServiceCore::queue_on_session(const CallRecord& arrival, const Call& call,
                                   const std::string& name, std::size_t bytes, Work work,
                                   const Done& done, QueueOptions queueing) {
  check_serving();
  const std::shared_ptr<SessionEntry> entry = sessions_.find(*call.tenant, name);
  queue(
      arrival, call, bytes, entry,
      [this, &session = *entry, work = std::move(work), pieces = std::shared_ptr<CallInPieces>()](
          const Call& queued) mutable { return do_piece(queued, session, work, pieces); },
      done, queueing);
}

void ServiceCore::run(const Call& call, const v1::CreateSessionRequest& request,
                      v1::CreateSessionResponse& response, Done done) {
  const CallRecord arrival = arrive(call, rpc_name<v1::CreateSessionRequest>());
  std::shared_ptr<InflightReservation> reservation;
  Tenant& tenant = *call.tenant;
  const std::string& id = request.request_id();
  bool registered = false;
  try {
    Call queued = call;
    check_serving();
    check_request_id(id);
    reservation = admit_call(call, request.ByteSizeLong());
    if (!id.empty()) {
      if (const auto reply = tenant.replies().begin(id, body_digest(request))) {
        response.ParseFromString(*reply);
        ++admitted_;
        finish(arrival, {}, nullptr, done);
        return;
      }
      registered = true;
    }
    std::shared_ptr<void> place = place_for(tenant, "too many sessions are being created");
    queued.deadline = deadline_of(call);
    const auto creation =
        std::make_shared<Creation>(arrival, std::move(queued), request, response, done);
    creation->place = std::move(place);
    creation->reservation = std::move(reservation);
    ++admitted_;
    registered = false;
    proceed(*creation, [&] {
      prepare(*creation);
      creation->model = models_.find(creation->spec);
      if (creation->model != nullptr) return queue_opening(creation);
      executor_
          .make_strand({.tenant = tenant.index(), .weight = tenant.weight(), .engine = &models_})
          ->post([this, creation] {
            proceed(*creation, [&] {
              begin(*creation);
              creation->model = models_.acquire(creation->spec, &creation->arrival.tenant);
              queue_opening(creation);
            });
          });
    });
  } catch (...) {
    if (registered) tenant.replies().abandon(id);
    refuse(arrival, done);
  }
}

template <typename Act>
void ServiceCore::proceed(Creation& creation, Act act) {
  try {
    act();
  } catch (...) {
    const ServiceError failure = to_service_error(std::current_exception());
    const std::string& id = creation.request.request_id();
    if (!id.empty()) creation.arrival.tenant.replies().abandon(id);
    end(creation, &failure);
  }
}

void ServiceCore::begin(Creation& creation) const {
  if (!creation.started) creation.started = options_.now();
  check_wanted(creation.call);
}

void ServiceCore::end(Creation& creation, const ServiceError* error) {
  // Before the client has the reply: its next call may need what this one had.
  creation.entry.reset();
  creation.model.reset();
  if (creation.charged) creation.arrival.tenant.refund_session();
  creation.place.reset();
  creation.reservation.reset();
  finish(creation.arrival, creation.started, error, creation.done);
}

void ServiceCore::queue_opening(const std::shared_ptr<Creation>& creation) {
  const std::int64_t work = piece_work_of(*creation->model);
  creation->entry = std::make_shared<SessionEntry>(creation->arrival.tenant, memory_,
                                                   std::move(creation->model), executor_, work);
  creation->charged = false;  // from here on the entry gives back what it was charged
  creation->entry->strand->post([this, creation] {
    proceed(*creation, [&] {
      begin(*creation);
      open(*creation, creation->entry);
      end(*creation, nullptr);
    });
  });
}

void ServiceCore::open(const Creation& creation, const std::shared_ptr<SessionEntry>& entry) {
  const v1::CreateSessionRequest& request = creation.request;
  Tenant& tenant = creation.arrival.tenant;
  charge_base(*entry, creation.capacity);
  entry->retrieval = creation.spec.retrieval;
  entry->has_fingerprint = !request.model_fingerprint().empty();
  try {
    entry->session.emplace(entry->model->engine.open(
        {.capacity_tokens = creation.capacity,
         .token_ids = {request.token_ids().data(),
                       static_cast<std::size_t>(request.token_ids_size())},
         .tenant_secret = tenant.prefix_secret(),
         .model_fingerprint = request.model_fingerprint(),
         .whole = options_.whole_sessions}));
  } catch (const Error& error) {
    note_fault(error, *entry->model);
    throw;
  }
  charge_stored(*entry);
  renew(*entry);
  v1::CreateSessionResponse& response = creation.response;
  v1::Limits& limits = *response.mutable_limits();
  limits.set_max_message_bytes(kMaxMessageBytes);
  limits.set_max_batch_items(kMaxBatchItems);
  limits.set_max_chunk_tokens(kMaxChunkTokens);
  sessions_.insert(entry, options_.max_sessions);
  try {
    describe(*entry, *response.mutable_session());
  } catch (...) {
    static_cast<void>(sessions_.remove(tenant, entry->name));
    throw;
  }
  response.set_attached_tokens(entry->session->length());
  ++created_;
  if (!request.request_id().empty()) {
    keep_reply(tenant.replies(), request.request_id(), response);
  }
}

void ServiceCore::check_room(std::size_t sessions) const {
  sessions_.check_room(sessions, options_.max_sessions);
  if (short_of_memory_) {
    throw ServiceError::overloaded("OUT_OF_MEMORY",
                                   "the server's control group is short of memory");
  }
}

void ServiceCore::prepare(Creation& creation) const {
  const v1::CreateSessionRequest& request = creation.request;
  ModelSpec& spec = creation.spec;
  spec.model = model_of(request.geometry(), "geometry");
  spec.retrieval = retrieval_of(request.retrieval(), options_.retrieval, "retrieval");
  const std::int64_t max_tokens = options_.models.memory.max_session_tokens;
  if (std::int64_t{spec.retrieval.sink_tokens} + spec.retrieval.recent_tokens > max_tokens) {
    throw ServiceError::invalid(
        "retrieval", "at most " + std::to_string(max_tokens) + " sink and recent tokens", "more");
  }
  constexpr int kMaxSketches = 8;
  check_at_most("extra_sketches", request.extra_sketches_size(), kMaxSketches);
  for (int i = 0; i < request.extra_sketches_size(); ++i) {
    spec.extra_sketches.push_back(
        sketch_of(request.extra_sketches(i), "extra_sketches[" + std::to_string(i) + "]"));
  }
  check_within("capacity_tokens", request.capacity_tokens(), 0, max_tokens);
  const std::int64_t capacity =
      request.capacity_tokens() == 0 ? max_tokens : request.capacity_tokens();
  check_prefix(request, capacity);
  check_room(1);
  creation.capacity = capacity;
  creation.arrival.tenant.charge_session();
  creation.charged = true;
}

void ServiceCore::charge_base(SessionEntry& entry, std::int64_t capacity_tokens) const {
  const std::int64_t base = base_bytes_of(entry.model->engine.config(), capacity_tokens);
  entry.tenant.charge_kv(base);
  entry.charged_bytes = base;
  if (!entry.take_memory(base)) {
    throw ServiceError::overloaded(
        "SESSION_MEMORY_FULL", "sessions may hold " + std::to_string(options_.max_session_memory) +
                                   " bytes beside their pages: this one's " + std::to_string(base) +
                                   " do not fit");
  }
  entry.base_bytes = base;
  entry.capacity_tokens = capacity_tokens;
}

std::vector<std::shared_ptr<SessionEntry>> ServiceCore::fork(SessionEntry& parent, int count) {
  check_within("count", count, 1, kMaxForks);
  check_room(static_cast<std::size_t>(count));
  const std::int64_t kv_bytes = parent.charged_bytes - parent.base_bytes;
  std::vector<std::shared_ptr<SessionEntry>> entries;
  entries.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    parent.tenant.charge_session();
    try {
      entries.push_back(std::make_shared<SessionEntry>(parent.tenant, memory_, parent.model,
                                                       executor_, parent.piece_work));
    } catch (...) {
      parent.tenant.refund_session();
      throw;
    }
    SessionEntry& entry = *entries.back();
    charge_base(entry, parent.capacity_tokens);
    entry.tenant.charge_kv(kv_bytes);
    entry.charged_bytes += kv_bytes;
    entry.retrieval = parent.retrieval;
    entry.has_fingerprint = parent.has_fingerprint;
  }
  std::vector<Session> children = parent.session->fork(count);
  for (std::size_t i = 0; i < children.size(); ++i) {
    entries[i]->session.emplace(std::move(children[i]));
    renew(*entries[i]);
  }
  return entries;
}

void ServiceCore::describe(SessionEntry& entry, v1::Session& session) const {
  const ModelConfig& model = entry.model->engine.config().model;
  session.set_name(entry.name);
  *session.mutable_geometry() = geometry_of(model);
  session.mutable_layer_lengths()->Resize(model.layers, 0);
  session.set_capacity_tokens(entry.capacity_tokens);
  *session.mutable_lease_ttl() = duration_of(options_.lease_ttl);
  *session.mutable_memory() = message_of(kvtier::session_memory(
      entry.model->engine.config(), entry.capacity_tokens, entry.model->row_cache_rows));
  describe_length(entry, session);
}

void ServiceCore::describe_length(SessionEntry& entry, v1::Session& session) noexcept {
  for (int layer = 0; layer < session.layer_lengths_size(); ++layer) {
    session.set_layer_lengths(layer, entry.session->length(layer));
  }
  session.set_kv_bytes(entry.charged_bytes - entry.base_bytes);
}

void ServiceCore::run(const Call& call, const v1::ReleaseSessionRequest& request,
                      v1::ReleaseSessionResponse& response, Done done) {
  const CallRecord arrival = arrive(call, rpc_name<v1::ReleaseSessionRequest>());
  std::shared_ptr<SessionEntry> entry;  // null: it was released by this request before
  try {
    execute_once(call.tenant->replies(), request, response,
                 [&] { entry = sessions_.remove(*call.tenant, request.name()); });
  } catch (...) {
    refuse(arrival, done);
    return;
  }
  ++admitted_;
  if (entry == nullptr) return finish(arrival, {}, nullptr, done);
  ++released_;
  try {
    Strand& strand = *entry->strand;
    strand.post([this, arrival, entry = std::move(entry), done]() mutable {
      const TimePoint started = options_.now();
      entry->close();
      entry.reset();  // and its hold on the engine, before the client has the reply
      finish(arrival, started, nullptr, done);
    });
  } catch (const std::bad_alloc&) {
    finish(arrival, {}, nullptr, done);  // it ends with the last of its tasks
  }
}

void ServiceCore::answer(SessionEntry& entry, const v1::GetSessionRequest& /*request*/,
                         v1::GetSessionResponse& response) const {
  describe(entry, *response.mutable_session());
}

void ServiceCore::answer(SessionEntry& entry, const v1::TruncateSessionRequest& request,
                         v1::TruncateSessionResponse& response) const {
  execute_once(entry.tenant.replies(), request, response, [&] {
    describe(entry, *response.mutable_session());  // what may fail comes first
    truncate_to(entry, request.tokens());
    describe_length(entry, *response.mutable_session());
  });
}

void ServiceCore::answer(SessionEntry& entry, const v1::ForkSessionRequest& request,
                         v1::ForkSessionResponse& response) {
  execute_once(entry.tenant.replies(), request, response, [&] {
    const std::vector<std::shared_ptr<SessionEntry>> children = fork(entry, request.count());
    std::size_t inserted = 0;
    try {
      for (const auto& child : children) {
        sessions_.insert(child, options_.max_sessions);
        ++inserted;
        describe(*child, *response.add_sessions());
      }
    } catch (...) {
      for (std::size_t i = 0; i < inserted; ++i) {
        static_cast<void>(sessions_.remove(entry.tenant, children[i]->name));
      }
      throw;
    }
    created_ += children.size();
  });
}

void ServiceCore::list_sessions(const Call& call, const v1::ListSessionsRequest& request,
                                v1::ListSessionsResponse& response) {
  check_serving();
  const auto [names, next] =
      sessions_.list(*call.tenant, page_start_of(request.page_token()),
                     static_cast<std::size_t>(page_size_of(request.page_size())));
  for (const std::string& name : names) response.add_names(name);
  if (next) response.set_next_page_token(std::to_string(*next));
}

void ServiceCore::keep_alive(const Call& call, const v1::KeepAliveRequest& request,
                             v1::KeepAliveResponse& response) {
  check_serving();
  check_at_most("names", request.names_size(), kMaxBatchItems);
  for (const std::string& name : request.names()) {
    v1::ItemStatus& status = *response.add_statuses();
    try {
      if (std::string_view(name).starts_with("leases/")) {
        static_cast<void>(pages_.find(*call.tenant, name));  // renews it
      } else {
        renew_for_client(*sessions_.find(*call.tenant, name));
      }
    } catch (const ServiceError& error) {
      set_status(error, status);
    }
  }
}

template <typename Request, typename Response>
void ServiceCore::batch(const Call& call, const Request& request, Response& response, Done done) {
  const int count = request.items_size();
  struct Join {
    explicit Join(std::shared_ptr<InflightReservation> reservation)
        : budget(kReplyBytes, std::move(reservation)) {}
    ReplyBudget budget;
    Done done{};
    std::atomic<int> left{0};
  };
  std::shared_ptr<Join> join;
  const std::optional<ServiceError> failure = failure_of([&] {
    check_at_most("items", count, kMaxBatchItems);
    join = std::make_shared<Join>(call.reservation);
    for (int i = 0; i < count; ++i) response.add_items();
  });
  if (failure) return done(&*failure);
  // One more than there are items, so that the last of them cannot end the call before all are
  // queued.
  join->left = count + 1;
  join->done = std::move(done);
  const auto arrive = [join] {
    if (--join->left == 0) join->done(nullptr);
  };
  std::unordered_set<std::string_view> queued;  // sessions
  for (int i = 0; i < count; ++i) {
    auto& item = *response.mutable_items(i);
    const auto end = [&item, arrive](const ServiceError* error) {
      if (error != nullptr) {
        item.clear_response();
        set_status(*error, *item.mutable_status());
      }
      arrive();
    };
    Done listener;
    if (const std::optional<ServiceError> error = failure_of([&] { listener = end; })) {
      end(&*error);
      continue;
    }
    const std::string& session = request.items(i).session();
    const bool is_first = !queued.contains(session);
    const bool is_queued = on_session(
        call, rpc_name<Request>(), session, request.items(i).ByteSizeLong(),
        [&request, i, &item, join](SessionEntry& entry) {
          return execute(entry, request.items(i), join->budget, *item.mutable_response());
        },
        listener, {.counts = is_first});
    if (!is_first || !is_queued) continue;
    try {
      queued.insert(session);
    } catch (const std::bad_alloc&) {
      // The next item counts as a call of its own.
    }
  }
  arrive();
}

template void ServiceCore::batch(const Call&, const v1::BatchSelectRequest&,
                                 v1::BatchSelectResponse&, Done);
template void ServiceCore::batch(const Call&, const v1::BatchAttendRequest&,
                                 v1::BatchAttendResponse&, Done);
template void ServiceCore::batch(const Call&, const v1::BatchDecodeRequest&,
                                 v1::BatchDecodeResponse&, Done);
template void ServiceCore::batch(const Call&, const v1::BatchFetchRequest&, v1::BatchFetchResponse&,
                                 Done);

void ServiceCore::run(const Call& call, const v1::OpenLeaseRequest& request,
                      v1::OpenLeaseResponse& response, Done done) {
  const CallRecord arrival = arrive(call, rpc_name<v1::OpenLeaseRequest>());
  Call queued = call;
  queued.deadline = deadline_of(call);
  const auto open = [this, queued = std::move(queued), &request, &response] {
    check_serving();
    check_wanted(queued);
    const std::shared_ptr<InflightReservation> reservation =
        admit_call(queued, request.ByteSizeLong());
    execute_once(queued.tenant->replies(), request, response, [&] {
      const auto opened = pages_.open(
          *queued.tenant, {.model = request.model(), .page_bytes = page_bytes_of(request)},
          executor_.make_strand(
              {.tenant = queued.tenant->index(), .weight = queued.tenant->weight()}));
      v1::PageLease& lease = *response.mutable_lease();
      lease.set_name(opened->name);
      lease.set_page_bytes(opened->config.page_bytes);
      *lease.mutable_ttl() = duration_of(options_.lease_ttl);
      v1::PageLimits& limits = *response.mutable_limits();
      limits.set_max_batch_pages(kMaxBatchPages);
      limits.set_max_hash_bytes(kMaxPageHash);
      limits.set_max_transfer_bytes(kMaxTransferBytes);
      *limits.mutable_reservation_ttl() = duration_of(pages_.options().reservation_ttl);
      response.set_server_epoch(pages_.epoch());
    });
  };
  const auto answer = [this, arrival, open, done](std::optional<TimePoint> started) {
    const std::optional<ServiceError> failure = failure_of(open);
    ++(failure ? rejected_ : admitted_);
    finish(arrival, started, failure ? &*failure : nullptr, done);
  };
  if (pages_.has(*call.tenant)) return answer({});
  // The tenant's folder is read first, one tenant's at a time: the transport has others to serve.
  try {
    std::shared_ptr<void> place = place_for(*call.tenant, "too many first leases are being opened");
    executor_
        .make_strand(
            {.tenant = call.tenant->index(), .weight = call.tenant->weight(), .engine = &pages_})
        ->post([this, answer, place = std::move(place)]() mutable {
          place.reset();  // before the client has the reply
          answer(options_.now());
        });
  } catch (...) {
    refuse(arrival, done);
  }
}

void ServiceCore::run(const Call& call, const v1::CloseLeaseRequest& request,
                      v1::CloseLeaseResponse& response, Done done) {
  const auto close = [&] {
    execute_once(call.tenant->replies(), request, response,
                 [&] { pages_.close(*call.tenant, request.name()); });
  };
  answer_now(call, rpc_name<v1::CloseLeaseRequest>(), close, done);
}

std::shared_ptr<InflightReservation> ServiceCore::admit(Tenant& tenant, std::size_t bytes) {
  return std::make_shared<InflightReservation>(inflight_, options_.max_inflight_bytes, tenant,
                                               2 * static_cast<std::int64_t>(bytes));
}

std::shared_ptr<InflightReservation> ServiceCore::admit_call(const Call& call, std::size_t bytes) {
  if (!call.reservation) return admit(*call.tenant, bytes);
  call.reservation->take(2 * static_cast<std::int64_t>(bytes));
  return call.reservation;
}

std::shared_ptr<PageLease> ServiceCore::lease(const Call& call, const std::string& name) {
  check_serving();
  return pages_.find(*call.tenant, name);
}

void ServiceCore::get_stats(v1::GetStatsResponse& response) const {
  fill(models_.stats(), response);
  fill(pages_.stats(), *response.mutable_page_cache());
  v1::ServiceStats& service = *response.mutable_service();
  service.set_models(models_.size());
  service.set_sessions_created(created_);
  service.set_sessions_released(released_);
  service.set_leases_expired(expired_);
  service.set_received(received_);
  service.set_admitted(admitted_);
  service.set_rejected(rejected_);
  service.set_inflight_bytes(static_cast<std::uint64_t>(inflight_.load()));
  service.set_inflight_bytes_limit(static_cast<std::uint64_t>(options_.max_inflight_bytes));
}

void ServiceCore::get_server_info(v1::GetServerInfoResponse& response) const {
  response.set_version(KVTIER_VERSION);
  response.set_server_epoch(sessions_.epoch());
  response.set_state(draining_ ? v1::SERVER_STATE_DRAINING : v1::SERVER_STATE_SERVING);
  *response.mutable_uptime() =
      duration_of(std::chrono::floor<std::chrono::seconds>(options_.now() - started_));
}

void ServiceCore::list_tenants(const v1::ListTenantsRequest& request,
                               v1::ListTenantsResponse& response) const {
  const auto count = static_cast<std::size_t>(page_size_of(request.page_size()));
  const auto& all = tenants_.all();
  std::size_t i = page_start_of(request.page_token());
  for (; i < all.size() && static_cast<std::size_t>(response.tenants_size()) < count; ++i) {
    fill(*all[i], *response.add_tenants());
  }
  if (i < all.size()) response.set_next_page_token(std::to_string(i));
}

void ServiceCore::set_tenant_quota(const v1::SetTenantQuotaRequest& request,
                                   v1::SetTenantQuotaResponse& response) {
  const v1::TenantQuota& quota = request.quota();
  if (!request.has_quota() || quota.max_sessions() < 0 || quota.max_kv_bytes() < 0) {
    throw ServiceError::invalid("quota", "numbers of at least 0", "none, or below 0");
  }
  Tenant& tenant = tenants_.by_name(request.name());
  tenant.set_quota(quota.max_sessions(), quota.max_kv_bytes());
  fill(tenant, *response.mutable_tenant());
}

void ServiceCore::evict_tenant(const v1::EvictTenantRequest& request,
                               v1::EvictTenantResponse& response) {
  const RemovedPages removed = pages_.remove_unpinned(tenants_.by_name(request.name()));
  response.set_pages(removed.pages);
  response.set_bytes(removed.bytes);
}

void ServiceCore::note_fault(const Error& error, Model& model) const {
  if (error.code() == ErrorCode::kInternal) give_up(model);
}

bool ServiceCore::give_up(Model& model) const {
  if (model.failed.exchange(true)) return false;
  for (ServiceCoreObserver* observer : options_.observers) observer->device_failed();
  return true;
}

void ServiceCore::sweep() {
  const TimePoint now = options_.now();
  for (auto& entry : sessions_.remove_expired(now)) {
    ++expired_;
    Strand& strand = *entry->strand;
    strand.post([entry = std::move(entry)] { entry->close(); });
  }
  for (const auto& entry : sessions_.at_work_since(now - options_.device_timeout)) {
    if (give_up(*entry->model)) models_.lose_device();
  }
  short_of_memory_ = !room_.has(MemoryUse::kSessions, 0);
  pages_.sweep();
}

void ServiceCore::check_serving() const {
  if (draining_) throw ServiceError::draining();
}

}  // namespace kvtier::services
