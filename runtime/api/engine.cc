#include "kvtier/engine.h"

#include "attention/flash_decode.h"
#include "include/types/failure.h"
#include "runtime/api/arguments.h"
#include "runtime/engine/engine_state.h"
#include "runtime/engine/session.h"
#include "runtime/step/append.h"
#include "runtime/step/result_checks.h"
#include "runtime/step/step.h"
#include "scoring/recall_params.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace kvtier {

class Engine::Impl : public runtime::EngineState {
 public:
  using EngineState::EngineState;
};

class Session::Impl : public runtime::SessionState {
 public:
  using SessionState::SessionState;
};

namespace {

using runtime::AttendPart;
using runtime::EngineState;
using runtime::SessionState;
using runtime::SubmissionScope;

/// A session's use by one submission: ordered after the uses before it, and marked when it ends,
/// also by an error, because work may have been enqueued by then.
class SessionUse {
 public:
  /// Throws, with nothing changed, when a child of a fork cannot make its memory its own.
  SessionUse(SessionState& session, SubmissionScope& scope) : session_(&session), scope_(&scope) {
    session.begin_use(scope);
    session.own_memory(scope);
  }
  /// For a use that leaves the memory as it is.
  struct Shared {};
  SessionUse(SessionState& session, SubmissionScope& scope, Shared)
      : session_(&session), scope_(&scope) {
    session.begin_use(scope);
  }
  SessionUse(SessionUse&& other) noexcept
      : session_(std::exchange(other.session_, nullptr)), scope_(other.scope_) {}
  SessionUse& operator=(SessionUse&&) = delete;  // a use ends once
  ~SessionUse() {
    if (session_ == nullptr) return;
    try {
      session_->end_use(*scope_);
    } catch (...) {
      // The device has failed, which the submission scope reports.
    }
  }

 private:
  SessionState* session_;
  SubmissionScope* scope_;
};

/// One call on a session: `body` enqueues its work within a submission scope, and the call returns
/// with its outputs written when it has no stream. `uncaptured`: the name of a call that no graph
/// may contain.
template <typename Body>
void submit(SessionState& session, StreamRef stream, Body body, const char* uncaptured = nullptr) {
  SubmissionScope scope(session.engine().submission, stream);
  if (uncaptured != nullptr) scope.refuse_capture(uncaptured);
  {
    const SessionUse use(session, scope);
    body(scope);
  }
  scope.finish();
}

/// Checks what every call on a layer of a session needs.
void check_call(SessionState& session, int layer) {
  runtime::check_layer(session.engine(), layer);
  session.check_flags();
}

/// Enqueues attention or a selection, checks its results, and counts its queries: those of a call
/// that throws are not counted.
void attend_and_check(SubmissionScope& scope, EngineState& engine, int layer,
                      std::span<const AttendPart> parts, bool after_append = false) {
  const runtime::QueryCount count = runtime::attend(scope, engine, layer, parts, after_append);
  runtime::check_results(scope, engine, layer, parts);
  if (scope.capturing()) return;
  engine.statistics.queries += count.all;
  engine.statistics.dense_queries += count.dense;
}

/// Appends and then attends, for all parts or none: when a page that attention reads cannot be had,
/// the appends are taken back.
void append_and_attend(SubmissionScope& scope, EngineState& engine, int layer,
                       std::span<const runtime::AppendPart> appends,
                       std::span<const AttendPart> attends) {
  std::vector<SessionUse> uses;
  uses.reserve(appends.size());
  for (const runtime::AppendPart& part : appends) uses.emplace_back(*part.session, scope);
  runtime::Append append(scope, engine, layer, appends);
  const bool appended = append.enqueue();
  try {
    attend_and_check(scope, engine, layer, attends, appended);
  } catch (...) {
    if (!scope.capturing()) append.undo();
    throw;
  }
  append.count();
}

/// With `MemoryConfig::prefetch_rows`, after a step whose outputs the caller has or waits for on
/// its stream: rows that its queries, which the workspace has, would choose beyond its own enter
/// the row cache.
void prefetch_after_step(SubmissionScope& scope, EngineState& engine, int layer,
                         std::span<const AttendPart> parts) {
  if (!engine.config.memory.prefetch_rows || engine.pools.row_cache == nullptr || scope.capturing())
    return;
  constexpr double kMore = 1.5;
  const auto heads = std::int64_t{engine.kv.query_heads()};
  const auto row = heads * engine.kv.head_dim;
  const MemorySpace space =
      engine.device->backend() == Backend::kCuda ? MemorySpace::kDevice : MemorySpace::kHost;
  std::vector<AttendPart> next_parts;
  for (const AttendPart& part : parts) {
    const bool last = part.inputs.query.shape[0] == 1 && part.options.tokens_after == 0;
    if (!last || !runtime::can_batch_with(part, parts, engine.workspace.batch_queries)) return;
    const float* query =
        engine.workspace.queries.as<float>() + static_cast<std::int64_t>(next_parts.size()) * row;
    AttendPart& next = next_parts.emplace_back();
    next.session = part.session;
    next.inputs.query = {query, DType::kFloat32, {1, heads, engine.kv.head_dim}, space};
    next.prefetches = true;
    next.options = part.options;
    const scoring::ScoreParams& own = part.options.params;
    constexpr double kMost = std::numeric_limits<int>::max();
    next.options.params.top_k = static_cast<int>(std::min(kMore * own.top_k, kMost));
    if (own.sparsity > 0) next.options.params.sparsity = std::max(own.sparsity / kMore, 1.0);
    next.options.params.threshold = own.threshold / static_cast<float>(kMore);
    next.sketch = part.sketch;
  }
  try {
    scope.continue_on_engine_stream();
    std::vector<SessionUse> uses;
    uses.reserve(next_parts.size());
    for (const AttendPart& part : next_parts) uses.emplace_back(*part.session, scope);
    runtime::attend(scope, engine, layer, next_parts);
  } catch (const std::exception& error) {  // the step has been done
    engine.log(LogLevel::kWarning, std::string("row prefetch: ") + error.what());
  }
}

/// The decode step of one layer of all parts, from the append to the row prefetch.
void decode_parts(EngineState& engine, int layer, std::span<const runtime::AppendPart> appends,
                  std::span<const AttendPart> attends, StreamRef stream) {
  SubmissionScope scope(engine.submission, stream);
  append_and_attend(scope, engine, layer, appends, attends);
  scope.finish();
  prefetch_after_step(scope, engine, layer, attends);
}

AttendInputs attended(const DecodeInputs& inputs) {
  return {.query = inputs.query, .selected = inputs.selected, .bias = inputs.bias};
}

/// Completes a part whose tensors and options have been checked.
AttendPart attend_part(SessionState& session, int layer, const AttendInputs& inputs,
                       const AttendOutputs& outputs, const AttendOptions& options) {
  const EngineState& engine = session.engine();
  AttendPart part;
  part.session = &session;
  part.inputs = inputs;
  part.outputs = outputs;
  part.options = runtime::resolve_options(engine, layer, options);
  const bool scores = part.options.rule.mode == LayerMode::kSparse && inputs.selected.empty();
  if (!scores) return part;
  const RetrievalConfig& retrieval =
      options.retrieval != nullptr ? *options.retrieval : engine.config.retrieval;
  part.sketch = engine.pools.fitting_sketch(retrieval);
  if (options.recall_target || !outputs.missed.empty()) {
    part.options.recall_params = scoring::make_recall_params(
        retrieval, engine.config.model.head_dim, part.options.softmax_scale, options.recall_target);
  }
  return part;
}

void check_partial(const TensorView& tensor, std::string_view name, int rank,
                   const TensorView& like) {
  bool same = tensor.rank == rank && like.rank == rank;
  std::int64_t dense = 1;
  for (int i = rank - 1; i >= 0 && same; --i) {
    const auto dim = static_cast<std::size_t>(i);
    same = tensor.shape[dim] == like.shape[dim] &&
           (tensor.shape[dim] == 1 || tensor.strides[dim] == dense);
    dense *= tensor.shape[dim];
  }
  if (tensor.empty() || !same || tensor.space != like.space) {
    throw_invalid(name, join("contiguous ", describe(like), " in the same memory"),
                  describe(tensor));
  }
}

void check_fp32(const TensorView& tensor, std::string_view name) {
  if (tensor.dtype != DType::kFloat32) throw_invalid(name, "fp32", dtype_name(tensor.dtype));
}

}  // namespace

Engine::Engine(const Config& config) : impl_(std::make_shared<Impl>(config)) {}
Engine::~Engine() = default;
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;

Session Engine::open(const SessionConfig& config) {
  return Session(std::make_unique<Session::Impl>(impl_, config));
}

void Engine::set_quota(std::string_view tenant, std::size_t page_bytes) {
  if (tenant.empty()) throw_invalid("tenant", "a name", "none");
  const std::lock_guard lock(impl_->submission.mutex());
  impl_->quotas.set(tenant, page_bytes);
}

void Engine::decode(int layer, std::span<const BatchItem> items, StreamRef stream) {
  runtime::check_layer(*impl_, layer);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const BatchItem& item = items[i];
    const auto where = join("items[", i, "]");
    if (item.session == nullptr || item.session->impl_ == nullptr) {
      throw_invalid(where, "an open session", "none");
    }
    SessionState& session = *item.session->impl_;
    if (&session.engine() != impl_.get()) {
      throw_invalid(where, "a session of this engine", "another engine's");
    }
    const bool twice =
        std::any_of(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(i),
                    [&](const BatchItem& other) { return other.session == item.session; });
    if (twice) throw_invalid(where, "each session once", "it twice");
    try {
      session.check_flags();
      const std::int64_t tokens =
          runtime::check_keys_and_values(*impl_, item.inputs.key, item.inputs.value, stream);
      runtime::check_attend(session, layer, attended(item.inputs), item.outputs, tokens, stream,
                            item.options);
    } catch (const Error& error) {
      throw_error(error.code(), where, ": ", error.what());
    }
  }
  if (items.empty()) return;

  std::vector<runtime::AppendPart> appends;
  std::vector<AttendPart> attends;
  appends.reserve(items.size());
  attends.reserve(items.size());
  for (const BatchItem& item : items) {
    SessionState& session = *item.session->impl_;
    appends.push_back({&session, item.inputs.key, item.inputs.value});
    attends.push_back(
        attend_part(session, layer, attended(item.inputs), item.outputs, item.options));
  }

  decode_parts(*impl_, layer, appends, attends, stream);
}

void Engine::merge(std::span<const PartialResult> parts, const AttendOutputs& result,
                   StreamRef stream) {
  attention::MergeBatch batch;
  constexpr std::size_t kMaxParts = sizeof(batch.items) / sizeof(batch.items[0]);
  if (parts.empty() || parts.size() > kMaxParts) {
    throw_invalid("parts", join("1..", kMaxParts), parts.size());
  }
  const int heads = impl_->kv.query_heads();
  const std::int64_t tokens = runtime::check_tokens(*impl_, "out", result.out, heads, stream);
  check_partial(result.out, "out", 3, result.out);
  const TensorView like_lse(result.out.data, DType::kFloat32, {tokens, heads}, result.out.space);
  if (!result.lse.empty()) {
    check_fp32(result.lse, "lse");
    check_partial(result.lse, "lse", 2, like_lse);
  }
  for (const PartialResult& part : parts) {
    check_fp32(part.out, "parts.out");
    check_fp32(part.lse, "parts.lse");
    check_partial(part.out, "parts.out", 3, result.out);
    check_partial(part.lse, "parts.lse", 2, like_lse);
  }

  SubmissionScope scope(impl_->submission, stream);
  runtime::HostStaging& staging = impl_->workspace.staging;
  for (const PartialResult& part : parts) {
    batch.push(
        {static_cast<const float*>(staging.input(scope.stream(), part.out, 0, tokens).data),
         static_cast<const float*>(staging.input(scope.stream(), part.lse, 0, tokens).data)});
  }
  void* out = staging.output(result.out, 0, tokens).data;
  float* lse = result.lse.empty() ? nullptr
                                  : static_cast<float*>(staging.output(result.lse, 0, tokens).data);
  attention::merge_results(scope.stream(), batch, tokens * heads, impl_->kv.head_dim, out,
                           result.out.dtype, lse);
  staging.finish(scope.stream());
  scope.finish();
}

Backend Engine::backend() const noexcept { return impl_->device->backend(); }
int Engine::device_index() const noexcept { return impl_->device->index(); }
const Config& Engine::config() const noexcept { return impl_->config; }
Stats Engine::stats() const { return impl_->stats(); }

Session::Session(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

void Session::append(int layer, const TensorView& keys, const TensorView& values,
                     StreamRef stream) {
  EngineState& engine = impl_->engine();
  check_call(*impl_, layer);
  (void)runtime::check_keys_and_values(engine, keys, values, stream);

  submit(*impl_, stream, [&](SubmissionScope& scope) {
    const runtime::AppendPart part{impl_.get(), keys, values};
    runtime::Append append(scope, engine, layer, {&part, 1});
    (void)append.enqueue();
    append.count();
  });
}

void Session::reserve(std::int64_t tokens, StreamRef stream) {
  if (tokens < 0) throw_invalid("tokens", "at least 0", tokens);
  submit(
      *impl_, stream, [&](SubmissionScope& scope) { impl_->reserve(scope.stream(), tokens); },
      "reserve");
}

void Session::select(int layer, const TensorView& query, const SelectOutputs& outputs,
                     StreamRef stream, const AttendOptions& options) {
  check_call(*impl_, layer);
  runtime::check_select(*impl_, layer, query, outputs, stream, options);

  AttendPart part = attend_part(*impl_, layer, {.query = query}, {}, options);
  part.select = outputs;
  submit(*impl_, stream, [&](SubmissionScope& scope) {
    attend_and_check(scope, impl_->engine(), layer, {&part, 1});
  });
}

void Session::attend(int layer, const AttendInputs& inputs, const AttendOutputs& outputs,
                     StreamRef stream, const AttendOptions& options) {
  EngineState& engine = impl_->engine();
  check_call(*impl_, layer);
  runtime::check_attend(*impl_, layer, inputs, outputs, 0, stream, options);

  const AttendPart part = attend_part(*impl_, layer, inputs, outputs, options);
  SubmissionScope scope(engine.submission, stream);
  {
    const SessionUse use(*impl_, scope);
    attend_and_check(scope, engine, layer, {&part, 1});
  }
  scope.finish();
  prefetch_after_step(scope, engine, layer, {&part, 1});
}

void Session::decode(int layer, const DecodeInputs& inputs, const AttendOutputs& outputs,
                     StreamRef stream, const AttendOptions& options) {
  EngineState& engine = impl_->engine();
  check_call(*impl_, layer);
  const std::int64_t tokens =
      runtime::check_keys_and_values(engine, inputs.key, inputs.value, stream);
  const AttendInputs attend_inputs = attended(inputs);
  runtime::check_attend(*impl_, layer, attend_inputs, outputs, tokens, stream, options);

  const AttendPart part = attend_part(*impl_, layer, attend_inputs, outputs, options);
  const runtime::AppendPart append_part{impl_.get(), inputs.key, inputs.value};
  decode_parts(engine, layer, {&append_part, 1}, {&part, 1}, stream);
}

void Session::prefetch(int layer, const TensorView& query, StreamRef stream,
                       const AttendOptions& options) {
  EngineState& engine = impl_->engine();
  check_call(*impl_, layer);
  runtime::check_selection("prefetch", *impl_, layer, query, stream, options);
  if (engine.pools.row_cache == nullptr) return;

  AttendPart part = attend_part(*impl_, layer, {.query = query}, {}, options);
  part.prefetches = true;
  submit(*impl_, stream, [&](SubmissionScope& scope) {
    runtime::attend(scope, engine, layer, {&part, 1});
  });
}

void Session::fetch(int layer, const TensorView& tokens, const FetchOutputs& outputs) {
  check_call(*impl_, layer);
  runtime::check_fetch(*impl_, layer, tokens, outputs);

  submit(*impl_, {},
         [&](SubmissionScope& scope) { runtime::fetch(scope, *impl_, layer, tokens, outputs); });
}

std::int64_t Session::length(int layer) const {
  runtime::check_layer(impl_->engine(), layer);
  return impl_->layer(layer).length;
}

std::int64_t Session::length() const {
  std::int64_t shortest = impl_->layer(0).length;
  for (int i = 1; i < impl_->num_layers(); ++i) {
    shortest = std::min(shortest, impl_->layer(i).length);
  }
  return shortest;
}

void Session::truncate(std::int64_t tokens, StreamRef stream, std::optional<int> layer) {
  if (layer) runtime::check_layer(impl_->engine(), *layer);
  const int end = layer ? *layer + 1 : impl_->num_layers();
  std::int64_t longest = 0;
  for (int i = layer.value_or(0); i < end; ++i) {
    longest = std::max(longest, impl_->layer(i).length);
  }
  if (tokens < 0 || tokens > longest) {
    throw_invalid("tokens", join("0..", longest, " (the longest layer)"), tokens);
  }
  submit(
      *impl_, stream,
      [&](SubmissionScope& scope) {
        impl_->truncate(scope.stream(), tokens, layer.value_or(0), end);
      },
      "truncate");
}

void Session::publish(std::span<const std::int32_t> token_ids, StreamRef stream) {
  if (static_cast<std::int64_t>(token_ids.size()) > length()) {
    throw_invalid("token_ids", join("at most ", length(), " (the session's length)"),
                  token_ids.size());
  }
  impl_->check_flags();
  std::vector<runtime::PrefixKey> keys = impl_->keys_of(token_ids);
  submit(
      *impl_, stream, [&](SubmissionScope& scope) { impl_->publish(scope, std::move(keys)); },
      "publish");
}

std::vector<Session> Session::fork(int count, StreamRef stream) {
  EngineState& engine = impl_->engine();
  const auto most = static_cast<std::int64_t>(engine.statistics.max_sessions());
  if (count < 1 || count > most) throw_invalid("count", join("1..", most), count);
  impl_->check_flags();
  std::vector<Session> children;  // destroyed after the scope, when something fails
  children.reserve(static_cast<std::size_t>(count));
  SubmissionScope scope(engine.submission, stream);
  scope.refuse_capture("fork");
  {
    const SessionUse use(*impl_, scope, SessionUse::Shared{});
    const SessionState::ForkSnapshot snapshot(*impl_, scope.stream());
    for (int i = 0; i < count; ++i) {
      children.push_back(Session(std::make_unique<Impl>(scope, *impl_, snapshot.memory())));
    }
  }
  scope.finish();
  return children;
}

void Session::advance(int layer, std::int64_t tokens) {
  runtime::check_layer(impl_->engine(), layer);
  runtime::LayerState& state = impl_->layer(layer);
  if (tokens < 0 || tokens > state.capacity - state.length) {
    throw_invalid("tokens",
                  join("0..", state.capacity - state.length, " (reserved beyond the length)"),
                  tokens);
  }
  state.length += tokens;
  impl_->engine().statistics.tokens_appended += static_cast<std::uint64_t>(tokens);
}

}  // namespace kvtier
