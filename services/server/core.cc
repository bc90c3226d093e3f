#include "services/server/core.h"

#include "services/server/paging.h"
#include "services/server/replay_once.h"
#include "services/server/wire.h"
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

PageStoreOptions page_options(const CoreOptions& options, MemoryRoom& room) {
  PageStoreOptions pages = options.pages;
  pages.lease_ttl = options.lease_ttl;
  pages.now = options.now;
  pages.may_take = [&room](std::uint64_t bytes) { return room.has(MemoryUse::kPages, bytes); };
  return pages;
}

}  // namespace

Core::Core(CoreOptions options, Executor& executor)
    : options_(std::move(options)),
      started_(options_.now()),
      executor_(executor),
      tenants_(options_.tenants, options_.default_limits),
      memory_(options_.max_session_memory),
      room_(options_.group_memory, options_.now),
      models_(options_.models),
      pages_(page_options(options_, room_)),
      control_(executor.make_strand()) {}

Core::~Core() {
  for (const auto& entry : sessions_.remove_all()) entry->close();
}

Core::Arrival Core::arrive(const Call& call, std::string_view method) {
  ++received_;
  return {.method = method, .tenant = *call.tenant, .time = options_.now()};
}

void Core::finish(const Arrival& arrival, std::optional<TimePoint> started,
                  const ServiceError* error, const Done& done) const {
  if (!options_.observers.empty()) {
    Operation operation{.method = arrival.method, .tenant = arrival.tenant, .error = error};
    operation.duration = options_.now() - arrival.time;
    if (started) operation.queued = *started - arrival.time;
    for (CoreObserver* observer : options_.observers) observer->finished(operation);
  }
  done(error);
}

void Core::refuse(const Arrival& arrival, const Done& done) {
  ++rejected_;
  const ServiceError error = to_service_error(std::current_exception());
  finish(arrival, {}, &error, done);
}

TimePoint Core::deadline_of(const Call& call) const {
  return std::min(call.deadline, options_.now() + options_.max_call_time);
}

void Core::renew(SessionEntry& entry) const {
  entry.lease_end = (options_.now() + options_.lease_ttl).time_since_epoch().count();
}

void Core::renew_for_client(SessionEntry& entry) const {
  const TimePoint::duration remaining =
      TimePoint::duration(entry.lease_end) - options_.now().time_since_epoch();
  for (CoreObserver* observer : options_.observers) observer->lease_renewed(remaining);
  renew(entry);
}

void Core::execute(const Call& call, SessionEntry& entry, const Work& work) {
  const TimePoint now = options_.now();
  const AtWork mark(entry, now);
  if (now > call.deadline) {
    throw ServiceError::unavailable("QUEUE_TIMEOUT", "the call waited past its deadline");
  }
  if (call.cancelled && call.cancelled()) {
    throw ServiceError(Code::kAborted, "CANCELLED", "the caller has gone");
  }
  if (!entry.session) throw ServiceError::not_found();
  if (entry.model->failed) throw ServiceError::unavailable("DEVICE_LOST", "the device failed");
  try {
    work(entry);
  } catch (const Error& error) {
    note_fault(error, *entry.model);
    throw;
  }
}

bool Core::queue_on_session(const Call& call, std::string_view method, const std::string& name,
                            std::size_t bytes, Work work, Done done, SessionTurn turn) {
  const Arrival arrival = arrive(call, method);
  try {
    check_serving();
    const std::shared_ptr<SessionEntry> entry = sessions_.find(*call.tenant, name);
    std::shared_ptr<Grant> grant = admit(*call.tenant, bytes);
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
                              queued = std::move(queued), work = std::move(work)]() mutable {
                               const TimePoint started = options_.now();
                               std::optional<ServiceError> failure;
                               try {
                                 execute(queued, *entry, work);
                               } catch (...) {
                                 failure = to_service_error(std::current_exception());
                               }
                               renew(*entry);
                               --entry->queued;
                               entry->calls -= counted;
                               grant.reset();
                               finish(arrival, started, failure ? &*failure : nullptr, done);
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

void Core::create_session(const Call& call, const v1::CreateSessionRequest& request,
                          v1::CreateSessionResponse& response, Done done) {
  const Arrival arrival = arrive(call, "SessionService/CreateSession");
  std::shared_ptr<Grant> grant;
  Tenant& tenant = *call.tenant;
  const std::string& id = request.request_id();
  bool registered = false;
  try {
    Call queued = call;
    check_serving();
    check_request_id(id);
    grant = admit(tenant, request.ByteSizeLong());
    if (!id.empty()) {
      if (const auto reply = tenant.replies().begin(id, body_digest(request))) {
        response.ParseFromString(*reply);
        ++admitted_;
        finish(arrival, {}, nullptr, done);
        return;
      }
      registered = true;
    }
    if (opening_.fetch_add(1) >= kMaxQueuedCreations) {
      --opening_;
      throw ServiceError::overloaded("QUEUE_FULL", "too many sessions are being created");
    }
    queued.deadline = deadline_of(call);
    ++admitted_;
    try {
      control_->post([this, arrival, grant = std::move(grant), queued = std::move(queued), &tenant,
                      &request, &response, done]() mutable {
        const TimePoint started = options_.now();
        std::optional<ServiceError> failure;
        try {
          if (started > queued.deadline || (queued.cancelled && queued.cancelled())) {
            throw ServiceError::unavailable("QUEUE_TIMEOUT", "the call waited past its deadline");
          }
          create(tenant, request, response);
        } catch (...) {
          failure = to_service_error(std::current_exception());
          if (!request.request_id().empty()) tenant.replies().abandon(request.request_id());
        }
        --opening_;
        grant.reset();
        finish(arrival, started, failure ? &*failure : nullptr, done);
      });
    } catch (...) {
      --admitted_;
      --opening_;
      throw;
    }
  } catch (...) {
    if (registered) tenant.replies().abandon(id);
    refuse(arrival, done);
  }
}

void Core::create(Tenant& tenant, const v1::CreateSessionRequest& request,
                  v1::CreateSessionResponse& response) {
  v1::Limits& limits = *response.mutable_limits();
  limits.set_max_message_bytes(kMaxMessageBytes);
  limits.set_max_batch_items(kMaxBatchItems);
  limits.set_max_chunk_tokens(kMaxChunkTokens);
  const std::shared_ptr<SessionEntry> entry = open(tenant, request);
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

void Core::check_room(std::size_t sessions) const {
  if (sessions_.size() + sessions > options_.max_sessions) {
    throw ServiceError::overloaded("TOO_MANY_SESSIONS", "the server holds all sessions it may");
  }
  if (short_of_memory_) {
    throw ServiceError::overloaded("OUT_OF_MEMORY",
                                   "the server's control group is short of memory");
  }
}

std::shared_ptr<SessionEntry> Core::open(Tenant& tenant, const v1::CreateSessionRequest& request) {
  ModelSpec spec;
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
  tenant.charge_session();
  std::shared_ptr<SessionEntry> entry;
  try {
    entry = std::make_shared<SessionEntry>(tenant, memory_, models_.acquire(spec),
                                           executor_.make_strand());
  } catch (...) {
    tenant.refund_session();
    throw;
  }
  // From here on the entry gives back what it was charged.
  charge_base(*entry, capacity);
  entry->retrieval = spec.retrieval;
  entry->has_fingerprint = !request.model_fingerprint().empty();
  try {
    entry->session.emplace(entry->model->engine.open(
        {.capacity_tokens = capacity,
         .token_ids = {request.token_ids().data(),
                       static_cast<std::size_t>(request.token_ids_size())},
         .tenant_secret = tenant.prefix_secret(),
         .model_fingerprint = request.model_fingerprint()}));
  } catch (const Error& error) {
    note_fault(error, *entry->model);
    throw;
  }
  charge_stored(*entry);
  renew(*entry);
  sessions_.insert(entry);
  return entry;
}

void Core::charge_base(SessionEntry& entry, std::int64_t capacity_tokens) const {
  const std::int64_t base = base_bytes_of(entry.model->engine.config(), capacity_tokens);
  entry.tenant.charge_kv(base);
  entry.charged_bytes = base;
  if (!entry.memory.take(base)) {
    throw ServiceError::overloaded(
        "SESSION_MEMORY_FULL", "sessions may hold " + std::to_string(options_.max_session_memory) +
                                   " bytes beside their pages: this one's " + std::to_string(base) +
                                   " do not fit");
  }
  entry.memory_bytes = base;
  entry.base_bytes = base;
  entry.capacity_tokens = capacity_tokens;
}

std::vector<std::shared_ptr<SessionEntry>> Core::fork(SessionEntry& parent, int count) {
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
                                                       executor_.make_strand()));
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

void Core::describe(SessionEntry& entry, v1::Session& session) const {
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

void Core::describe_length(SessionEntry& entry, v1::Session& session) noexcept {
  for (int layer = 0; layer < session.layer_lengths_size(); ++layer) {
    session.set_layer_lengths(layer, entry.session->length(layer));
  }
  session.set_kv_bytes(entry.charged_bytes - entry.base_bytes);
}

void Core::get_session(const Call& call, const v1::GetSessionRequest& request,
                       v1::GetSessionResponse& response, Done done) {
  on_session(
      call, "SessionService/GetSession", request.name(), request.ByteSizeLong(),
      [this, &response](SessionEntry& entry) { describe(entry, *response.mutable_session()); },
      std::move(done), {.start = Strand::Start::kNowIfIdle});
}

void Core::truncate_session(const Call& call, const v1::TruncateSessionRequest& request,
                            v1::TruncateSessionResponse& response, Done done) {
  const auto work = [this, &request, &response](SessionEntry& entry) {
    execute_once(entry.tenant.replies(), request, response, [&] {
      describe(entry, *response.mutable_session());  // what may fail comes first
      truncate_to(entry, request.tokens());
      describe_length(entry, *response.mutable_session());
    });
  };
  on_session(call, "SessionService/TruncateSession", request.name(), request.ByteSizeLong(), work,
             std::move(done));
}

void Core::fork_session(const Call& call, const v1::ForkSessionRequest& request,
                        v1::ForkSessionResponse& response, Done done) {
  const auto work = [this, &request, &response](SessionEntry& entry) {
    execute_once(entry.tenant.replies(), request, response, [&] {
      const std::vector<std::shared_ptr<SessionEntry>> children = fork(entry, request.count());
      std::size_t inserted = 0;
      try {
        for (const auto& child : children) {
          sessions_.insert(child);
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
  };
  on_session(call, "SessionService/ForkSession", request.name(), request.ByteSizeLong(), work,
             std::move(done));
}

void Core::publish_prefix(const Call& call, const v1::PublishPrefixRequest& request,
                          v1::PublishPrefixResponse& response, Done done) {
  on_session(
      call, "SessionService/PublishPrefix", request.name(), request.ByteSizeLong(),
      [&request, &response](SessionEntry& entry) { publish_from(entry, request, response); },
      std::move(done));
}

void Core::release_session(const Call& call, const v1::ReleaseSessionRequest& request, Done done) {
  const Arrival arrival = arrive(call, "SessionService/ReleaseSession");
  std::shared_ptr<SessionEntry> entry;
  try {
    check_request_id(request.request_id());
    ReplayCache& replies = call.tenant->replies();
    const std::string& id = request.request_id();
    if (!id.empty() && replies.begin(id, body_digest(request))) {
      ++admitted_;
      finish(arrival, {}, nullptr, done);
      return;
    }
    try {
      entry = sessions_.remove(*call.tenant, request.name());
    } catch (...) {
      if (!id.empty()) replies.abandon(id);
      throw;
    }
    if (!id.empty()) keep_reply(replies, id, v1::ReleaseSessionResponse());
  } catch (...) {
    refuse(arrival, done);
    return;
  }
  ++admitted_;
  ++released_;
  try {
    entry->strand->post([this, arrival, entry, done] {
      const TimePoint started = options_.now();
      entry->close();
      finish(arrival, started, nullptr, done);
    });
  } catch (const std::bad_alloc&) {
    finish(arrival, {}, nullptr, done);  // it ends with the last of its tasks
  }
}

void Core::list_sessions(const Call& call, const v1::ListSessionsRequest& request,
                         v1::ListSessionsResponse& response) {
  check_serving();
  const auto [names, next] =
      sessions_.list(*call.tenant, page_start_of(request.page_token()),
                     static_cast<std::size_t>(page_size_of(request.page_size())));
  for (const std::string& name : names) response.add_names(name);
  if (next) response.set_next_page_token(std::to_string(*next));
}

void Core::keep_alive(const Call& call, const v1::KeepAliveRequest& request,
                      v1::KeepAliveResponse& response) {
  check_serving();
  if (request.names_size() > kMaxBatchItems) {
    throw ServiceError::invalid("names", "at most " + std::to_string(kMaxBatchItems),
                                std::to_string(request.names_size()));
  }
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

}  // namespace kvtier::services
