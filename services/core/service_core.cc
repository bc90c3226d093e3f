#include "services/core/service_core.h"

#include "services/base/from_message.h"
#include "services/base/paging.h"
#include "services/core/replay_once.h"
#include "services/wire/to_message.h"

#include <algorithm>
#include <new>

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
  if (request.token_ids_size() > capacity) {
    throw ServiceError::invalid("token_ids",
                                "at most " + std::to_string(capacity) + ", the capacity",
                                std::to_string(request.token_ids_size()));
  }
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
  ~Creation() {
    if (charged) arrival.tenant.refund_session();
  }
  Creation(const Creation&) = delete;  // gives its charge back once
  Creation& operator=(const Creation&) = delete;

  const CallRecord arrival;
  const Call call;
  const v1::CreateSessionRequest& request;
  v1::CreateSessionResponse& response;
  const Done done;
  std::shared_ptr<InflightReservation> grant;
  ModelSpec spec;
  std::int64_t capacity = 0;
  bool charged = false;  ///< For a session.
  std::shared_ptr<Model> model;
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
      pages_(page_options(options_, room_)) {}

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

void ServiceCore::renew(SessionEntry& entry) const {
  entry.lease_end = (options_.now() + options_.lease_ttl).time_since_epoch().count();
}

void ServiceCore::renew_for_client(SessionEntry& entry) const {
  const TimePoint::duration remaining =
      TimePoint::duration(entry.lease_end) - options_.now().time_since_epoch();
  for (ServiceCoreObserver* observer : options_.observers) observer->lease_renewed(remaining);
  renew(entry);
}

bool ServiceCore::execute(const Call& call, SessionEntry& entry, const Work& work,
                          std::shared_ptr<CallInPieces>& pieces) const {
  const TimePoint now = options_.now();
  std::optional<BusyMark> mark;
  if (entry.model->engine.backend() == options_.watched_backend) mark.emplace(entry, now);
  if (now > call.deadline) {
    throw ServiceError::unavailable("QUEUE_TIMEOUT", "the call waited past its deadline");
  }
  if (call.cancelled && call.cancelled()) {
    throw ServiceError(Code::kAborted, "CANCELLED", "the caller has gone");
  }
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

bool ServiceCore::queue_on_session(const Call& call, std::string_view method,
                                   const std::string& name, std::size_t bytes, Work work, Done done,
                                   SessionTurn turn) {
  const CallRecord arrival = arrive(call, method);
  try {
    check_serving();
    const std::shared_ptr<SessionEntry> entry = sessions_.find(*call.tenant, name);
    std::shared_ptr<InflightReservation> grant = admit_call(call, bytes);
    Call queued = call;
    const int counted = turn.counts ? 1 : 0;
    if (turn.counts && entry->calls.fetch_add(1) >= options_.max_queued_per_session) {
      --entry->calls;
      throw ServiceError::overloaded("QUEUE_FULL", "too many calls of this session are waiting");
    }
    queued.deadline = deadline_of(call);
    renew_for_client(*entry);
    ++admitted_;
    ++entry->queued;
    try {
      entry->strand->enqueue(turn.start,
                             [this, arrival, entry, counted, done, grant = std::move(grant),
                              queued = std::move(queued), work = std::move(work),
                              pieces = std::shared_ptr<CallInPieces>(),
                              started = std::optional<TimePoint>()]() mutable {
                               if (!started) started = options_.now();
                               std::optional<ServiceError> failure;
                               try {
                                 if (!execute(queued, *entry, work, pieces)) return false;
                               } catch (...) {
                                 failure = to_service_error(std::current_exception());
                               }
                               pieces.reset();
                               renew(*entry);
                               --entry->queued;
                               entry->calls -= counted;
                               grant.reset();
                               finish(arrival, started, failure ? &*failure : nullptr, done);
                               return true;
                             });
    } catch (...) {
      --admitted_;
      --entry->queued;
      entry->calls -= counted;
      throw;
    }
    return true;
  } catch (...) {
    refuse(arrival, done);
    return false;
  }
}

void ServiceCore::create_session(const Call& call, const v1::CreateSessionRequest& request,
                                 v1::CreateSessionResponse& response, Done done) {
  const CallRecord arrival = arrive(call, "SessionService/CreateSession");
  std::shared_ptr<InflightReservation> grant;
  Tenant& tenant = *call.tenant;
  const std::string& id = request.request_id();
  bool registered = false;
  try {
    Call queued = call;
    check_serving();
    check_request_id(id);
    grant = admit_call(call, request.ByteSizeLong());
    if (!id.empty()) {
      if (const auto reply = tenant.replies().begin(id, body_digest(request))) {
        response.ParseFromString(*reply);
        ++admitted_;
        finish(arrival, {}, nullptr, done);
        return;
      }
      registered = true;
    }
    if (!tenant.take(Shared::kCreations, 1, kMaxQueuedCreations)) {
      throw ServiceError::overloaded("QUEUE_FULL", "too many sessions are being created");
    }
    queued.deadline = deadline_of(call);
    std::shared_ptr<Creation> creation;
    try {
      creation = std::make_shared<Creation>(arrival, std::move(queued), request, response, done);
    } catch (...) {
      tenant.give(Shared::kCreations, 1);
      throw;
    }
    creation->grant = std::move(grant);
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
  const TimePoint now = options_.now();
  if (!creation.started) creation.started = now;
  if (now > creation.call.deadline || (creation.call.cancelled && creation.call.cancelled())) {
    throw ServiceError::unavailable("QUEUE_TIMEOUT", "the call waited past its deadline");
  }
}

void ServiceCore::end(Creation& creation, const ServiceError* error) {
  creation.arrival.tenant.give(Shared::kCreations, 1);
  creation.grant.reset();
  finish(creation.arrival, creation.started, error, creation.done);
}

void ServiceCore::queue_opening(const std::shared_ptr<Creation>& creation) {
  const std::int64_t work = piece_work_of(*creation->model);
  auto entry = std::make_shared<SessionEntry>(creation->arrival.tenant, memory_,
                                              std::move(creation->model), executor_, work);
  creation->charged = false;  // from here on the entry gives back what it was charged
  Strand& strand = *entry->strand;
  strand.post([this, creation, entry = std::move(entry)] {
    proceed(*creation, [&] {
      begin(*creation);
      open(*creation, entry);
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
  sessions_.insert(entry);
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
  if (sessions_.size() + sessions > options_.max_sessions) {
    throw ServiceError::overloaded("TOO_MANY_SESSIONS", "the server holds all sessions it may");
  }
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
  if (request.extra_sketches_size() > kMaxSketches) {
    throw ServiceError::invalid("extra_sketches", "at most " + std::to_string(kMaxSketches),
                                std::to_string(request.extra_sketches_size()));
  }
  for (int i = 0; i < request.extra_sketches_size(); ++i) {
    spec.extra_sketches.push_back(
        sketch_of(request.extra_sketches(i), "extra_sketches[" + std::to_string(i) + "]"));
  }
  const std::int64_t capacity =
      request.capacity_tokens() == 0 ? max_tokens : request.capacity_tokens();
  if (capacity < 1 || capacity > max_tokens) {
    throw ServiceError::invalid("capacity_tokens", "0 to " + std::to_string(max_tokens),
                                std::to_string(capacity));
  }
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
  if (count < 1 || count > kMaxForks) {
    throw ServiceError::invalid("count", "1 to " + std::to_string(kMaxForks),
                                std::to_string(count));
  }
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
  const auto ttl = options_.lease_ttl.count();
  session.mutable_lease_ttl()->set_seconds(ttl / 1000);
  session.mutable_lease_ttl()->set_nanos(static_cast<int>(ttl % 1000 * 1'000'000));
  describe_length(entry, session);
}

void ServiceCore::describe_length(SessionEntry& entry, v1::Session& session) noexcept {
  for (int layer = 0; layer < session.layer_lengths_size(); ++layer) {
    session.set_layer_lengths(layer, entry.session->length(layer));
  }
  session.set_kv_bytes(entry.charged_bytes - entry.base_bytes);
}

}  // namespace kvtier::services
