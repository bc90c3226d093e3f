#include "kvtier/engine.h"
#include "kvtier/kvtier.h"
#include "kvtier/version.h"

#include "runtime/c_api/c_api_convert.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

struct kvtier_engine {
  kvtier::Engine engine;
};

struct kvtier_session {
  kvtier::Session session;
};

using namespace kvtier::c_api;  // NOLINT: what this file's functions are written with

extern "C" {

const char* kvtier_version(void) { return KVTIER_VERSION; }

const char* kvtier_last_error(void) { return last_error().c_str(); }

const char* kvtier_status_name(kvtier_status status) {
  const int number = number_of(status);
  if (number == KVTIER_OK) return "OK";
  const bool known = number > 0 && number <= KVTIER_DATA_LOSS;
  return kvtier::error_code_name(static_cast<kvtier::ErrorCode>(known ? number : 0)).data();
}

void kvtier_retrieval_config_init(kvtier_retrieval_config* config) { *config = from_retrieval({}); }

void kvtier_retrieval_config_init_socket(kvtier_retrieval_config* config) {
  *config = from_retrieval(kvtier::RetrievalConfig::socket());
}

void kvtier_config_init(kvtier_config* config) {
  const kvtier::Config d;
  *config = {};
  config->struct_size = sizeof(*config);
  config->layers = d.model.layers;
  config->query_heads = d.model.query_heads;
  config->kv_heads = d.model.kv_heads;
  config->head_dim = d.model.head_dim;
  config->kv_dtype = static_cast<kvtier_dtype>(d.model.kv_dtype);
  config->device_bytes = d.memory.device_bytes;
  config->host_bytes = d.memory.host_bytes;
  config->placement = static_cast<kvtier_placement>(d.memory.placement);
  config->page_format = static_cast<kvtier_page_format>(d.memory.page_format);
  config->page_tokens = d.memory.page_tokens;
  config->max_session_tokens = d.memory.max_session_tokens;
  config->max_batch_rows = d.memory.max_batch_rows;
  config->staging_rows = d.memory.staging_rows;
  config->pin_threads = d.memory.pin_threads;
  config->host_allocation = static_cast<kvtier_host_allocation>(d.memory.host_allocation);
  kvtier_retrieval_config_init(&config->retrieval);
  config->backend = KVTIER_BACKEND_AUTO;
  config->reject_nonfinite = d.reject_nonfinite ? 1 : 0;
  config->tier_deadline_ms = static_cast<std::uint64_t>(d.memory.tier_deadline.count());
  config->row_cache_bytes = d.memory.row_cache_bytes.value_or(KVTIER_ROW_CACHE_BYTES_AUTO);
  config->row_cache_rows = d.memory.row_cache_rows;
  config->row_cache_policy = static_cast<kvtier_row_cache_policy>(d.memory.row_cache_policy);
  config->verify_rows = d.memory.verify_rows ? 1 : 0;
  config->prefetch_rows = d.memory.prefetch_rows ? 1 : 0;
  config->dense_when_faster = d.dense_when_faster ? 1 : 0;
}

void kvtier_options_init(kvtier_options* options) {
  const kvtier::RecallTarget d;
  *options = {.struct_size = sizeof(*options),
              .softmax_scale = 0.0F,
              .logit_softcap = -1.0F,
              .mode = KVTIER_LAYER_DEFAULT,
              .dense_from = -1,
              .retrieval = nullptr,
              .recall_target = 0.0,
              .min_top_k = d.min_top_k,
              .noise_share = d.noise_share};
}

void kvtier_attend_args_init(kvtier_attend_args* args) {
  *args = {};
  args->struct_size = sizeof(*args);
}

kvtier_status kvtier_engine_create(const kvtier_config* config, kvtier_engine** engine) {
  return guarded([&] {
    kvtier_engine*& created = given(engine, "engine");
    created = new kvtier_engine{kvtier::Engine(to_config(given(config, "config")))};
  });
}

void kvtier_engine_destroy(kvtier_engine* engine) { delete engine; }

kvtier_backend kvtier_engine_backend(const kvtier_engine* engine) {
  return engine == nullptr ? KVTIER_BACKEND_AUTO
                           : static_cast<kvtier_backend>(engine->engine.backend());
}

kvtier_status kvtier_engine_stats(const kvtier_engine* engine, kvtier_stats* stats) {
  return guarded([&] {
    const std::size_t size = given(stats, "stats").struct_size;
    if (size < sizeof(size) || size > sizeof(*stats))
      check_size(size, sizeof(*stats), "kvtier_stats");
    const kvtier::Stats s = given(engine, "engine").engine.stats();
    const kvtier_stats full = {
        .struct_size = size,
        .tokens_appended = s.cumulative.tokens_appended,
        .queries = s.cumulative.queries,
        .rows_selected = s.cumulative.rows_selected,
        .rows_attended = s.cumulative.rows_attended,
        .bytes_host_to_device = s.cumulative.bytes_host_to_device,
        .bytes_device_to_host = s.cumulative.bytes_device_to_host,
        .bytes_device_resident = s.cumulative.bytes_device_resident,
        .bytes_sketch_read = s.cumulative.bytes_sketch_read,
        .nonfinite_tokens = s.cumulative.nonfinite_tokens,
        .sessions = s.snapshot.sessions,
        .host_page_bytes = s.snapshot.host_page_bytes,
        .host_page_bytes_used = s.snapshot.host_page_bytes_used,
        .device_bytes = s.snapshot.device_bytes,
        .sketch_bytes_used = s.snapshot.sketch_bytes_used,
        .pages = s.snapshot.pages,
        .pages_used = s.snapshot.pages_used,
        .pages_shared = s.snapshot.pages_shared,
        .prefix_tokens = s.snapshot.prefix_tokens,
        .prefix_tokens_asked = s.cumulative.prefix_tokens_asked,
        .prefix_tokens_attached = s.cumulative.prefix_tokens_attached,
        .prefix_tokens_evicted = s.cumulative.prefix_tokens_evicted,
        .pages_in_tiers = s.snapshot.pages_in_tiers,
        .pages_evicted = s.cumulative.pages_evicted,
        .pages_restored = s.cumulative.pages_restored,
        .pages_lost = s.cumulative.pages_lost,
        .cold_steps = s.cumulative.cold_steps,
        .tier_bytes_written = s.cumulative.tier_bytes_written,
        .tier_bytes_read = s.cumulative.tier_bytes_read,
        .tier_hits = s.cumulative.tier_hits,
        .tier_misses = s.cumulative.tier_misses,
        .tier_corrupt = s.cumulative.tier_corrupt,
        .tier_refused = s.cumulative.tier_refused,
        .tier_unavailable = s.cumulative.tier_unavailable,
        .tier_nanoseconds = s.cumulative.tier_nanoseconds,
        .pages_repaired = s.cumulative.pages_repaired,
        .num_tiers = s.tiers.size(),
        .row_cache_hits = s.cumulative.row_cache_hits,
        .row_cache_misses = s.cumulative.row_cache_misses,
        .row_cache_admissions = s.cumulative.row_cache_admissions,
        .row_cache_evictions = s.cumulative.row_cache_evictions,
        .row_cache_bytes = s.snapshot.row_cache_bytes,
        .row_cache_bytes_used = s.snapshot.row_cache_bytes_used,
        .rows_corrupt = s.cumulative.rows_corrupt,
        .rows_prefetched = s.cumulative.rows_prefetched,
        .rows_prefetched_useful = s.cumulative.rows_prefetched_useful,
        .rows_prefetched_wasted = s.cumulative.rows_prefetched_wasted,
        .row_cache_rows = static_cast<std::uint64_t>(s.snapshot.row_cache_rows),
        .dense_queries = s.cumulative.dense_queries};
    std::memcpy(stats, &full, size);
  });
}

kvtier_status kvtier_engine_tier_stats(const kvtier_engine* engine, size_t index,
                                       kvtier_tier_stats* stats) {
  return guarded([&] {
    const std::size_t size = given(stats, "stats").struct_size;
    if (size < sizeof(size) || size > sizeof(*stats))
      check_size(size, sizeof(*stats), "kvtier_tier_stats");
    const kvtier::Stats all = given(engine, "engine").engine.stats();
    const kvtier_tier_stats full = to_tier_stats(all.tiers, index, size);
    std::memcpy(stats, &full, size);
  });
}

kvtier_status kvtier_engine_decode(kvtier_engine* engine, int32_t layer,
                                   const kvtier_batch_item* items, size_t num_items,
                                   kvtier_stream stream) {
  return guarded([&] {
    (void)given(engine, "engine");
    if (num_items > 0) (void)given(items, "items");
    std::vector<std::unique_ptr<Options>> options;
    std::vector<kvtier::BatchItem> batch;
    for (size_t i = 0; i < num_items; ++i) {
      const kvtier_attend_args& args = checked_args(items[i].args);
      options.push_back(std::make_unique<Options>(args.options));
      batch.push_back({.session = &given(items[i].session, "items.session").session,
                       .inputs = to_decode_inputs(args),
                       .outputs = to_outputs(args),
                       .options = options.back()->options});
    }
    engine->engine.decode(layer, batch, to_stream(stream));
  });
}

kvtier_status kvtier_engine_merge(kvtier_engine* engine, const kvtier_tensor* outs,
                                  const kvtier_tensor* lses, size_t num_parts,
                                  const kvtier_tensor* out, const kvtier_tensor* lse,
                                  kvtier_stream stream) {
  return guarded([&] {
    (void)given(engine, "engine");
    std::vector<kvtier::PartialResult> parts;
    for (size_t i = 0; i < num_parts; ++i) {
      parts.push_back(
          {to_view(given(outs + i, "outs"), "outs"), to_view(given(lses + i, "lses"), "lses")});
    }
    engine->engine.merge(parts,
                         {.out = to_view(out, "out"), .lse = to_view(lse, "lse"), .selected = {}},
                         to_stream(stream));
  });
}

kvtier_status kvtier_session_open(kvtier_engine* engine, int64_t capacity_tokens,
                                  kvtier_session** session) {
  return guarded([&] {
    kvtier_session*& opened = given(session, "session");
    opened = new kvtier_session{
        given(engine, "engine").engine.open({.capacity_tokens = capacity_tokens})};
  });
}

void kvtier_session_close(kvtier_session* session) { delete session; }

kvtier_status kvtier_session_append(kvtier_session* session, int32_t layer,
                                    const kvtier_tensor* keys, const kvtier_tensor* values,
                                    kvtier_stream stream) {
  return guarded([&] {
    given(session, "session")
        .session.append(layer, to_view(keys, "keys"), to_view(values, "values"), to_stream(stream));
  });
}

kvtier_status kvtier_session_reserve(kvtier_session* session, int64_t tokens,
                                     kvtier_stream stream) {
  return guarded([&] { given(session, "session").session.reserve(tokens, to_stream(stream)); });
}

kvtier_status kvtier_session_select(kvtier_session* session, int32_t layer,
                                    const kvtier_tensor* query, const kvtier_tensor* ids,
                                    const kvtier_tensor* scores, const kvtier_tensor* bias,
                                    const kvtier_options* options, kvtier_stream stream) {
  return guarded([&] {
    const Options converted(options);
    given(session, "session")
        .session.select(layer, to_view(query, "query"),
                        {.ids = to_view(ids, "ids"),
                         .scores = to_view(scores, "scores"),
                         .bias = to_view(bias, "bias")},
                        to_stream(stream), converted.options);
  });
}

kvtier_status kvtier_session_prefetch(kvtier_session* session, int32_t layer,
                                      const kvtier_tensor* query, const kvtier_options* options,
                                      kvtier_stream stream) {
  return guarded([&] {
    const Options converted(options);
    given(session, "session")
        .session.prefetch(layer, to_view(query, "query"), to_stream(stream), converted.options);
  });
}

kvtier_status kvtier_session_attend(kvtier_session* session, int32_t layer,
                                    const kvtier_attend_args* args, kvtier_stream stream) {
  return guarded([&] {
    const kvtier_attend_args& a = checked_args(args);
    const Options converted(a.options);
    given(session, "session")
        .session.attend(layer,
                        {.query = to_view(a.query, "query"),
                         .selected = to_view(a.selected, "selected"),
                         .bias = to_view(a.bias, "bias")},
                        to_outputs(a), to_stream(stream), converted.options);
  });
}

kvtier_status kvtier_session_decode(kvtier_session* session, int32_t layer,
                                    const kvtier_attend_args* args, kvtier_stream stream) {
  return guarded([&] {
    const kvtier_attend_args& a = checked_args(args);
    const Options converted(a.options);
    given(session, "session")
        .session.decode(layer, to_decode_inputs(a), to_outputs(a), to_stream(stream),
                        converted.options);
  });
}

kvtier_status kvtier_session_fetch(kvtier_session* session, int32_t layer,
                                   const kvtier_tensor* tokens, const kvtier_tensor* keys,
                                   const kvtier_tensor* values) {
  return guarded([&] {
    given(session, "session")
        .session.fetch(layer, to_view(given(tokens, "tokens"), "tokens"),
                       {.keys = to_view(given(keys, "keys"), "keys"),
                        .values = to_view(given(values, "values"), "values")});
  });
}

kvtier_status kvtier_session_length(const kvtier_session* session, int32_t layer, int64_t* tokens) {
  return guarded(
      [&] { given(tokens, "tokens") = given(session, "session").session.length(layer); });
}

kvtier_status kvtier_session_truncate(kvtier_session* session, int64_t tokens,
                                      kvtier_stream stream) {
  return guarded([&] { given(session, "session").session.truncate(tokens, to_stream(stream)); });
}

kvtier_status kvtier_session_open_prefix(kvtier_engine* engine, int64_t capacity_tokens,
                                         const kvtier_prefix* prefix, kvtier_session** session) {
  return guarded([&] {
    kvtier_session*& opened = given(session, "session");
    kvtier::SessionConfig config = with_prefix(given(prefix, "prefix"));
    config.capacity_tokens = capacity_tokens;
    opened = new kvtier_session{given(engine, "engine").engine.open(config)};
  });
}

kvtier_status kvtier_session_open_config(kvtier_engine* engine, const kvtier_session_config* config,
                                         kvtier_session** session) {
  return guarded([&] {
    kvtier_session*& opened = given(session, "session");
    const kvtier_session_config& c = given(config, "config");
    check_size(c.struct_size, sizeof(c), "kvtier_session_config");
    kvtier::SessionConfig wanted;
    if (c.prefix != nullptr) wanted = with_prefix(*c.prefix);
    wanted.capacity_tokens = c.capacity_tokens;
    wanted.max_page_bytes = c.max_page_bytes;
    if (c.tenant != nullptr) wanted.tenant = c.tenant;
    opened = new kvtier_session{given(engine, "engine").engine.open(wanted)};
  });
}

kvtier_status kvtier_engine_set_quota(kvtier_engine* engine, const char* tenant,
                                      uint64_t page_bytes) {
  return guarded([&] {
    (void)given(tenant, "tenant");
    given(engine, "engine").engine.set_quota(tenant, page_bytes);
  });
}

kvtier_status kvtier_session_publish(kvtier_session* session, const int32_t* token_ids,
                                     size_t num_token_ids, kvtier_stream stream) {
  return guarded([&] {
    if (num_token_ids > 0) (void)given(token_ids, "token_ids");
    given(session, "session").session.publish({token_ids, num_token_ids}, to_stream(stream));
  });
}

kvtier_status kvtier_session_fork(kvtier_session* session, int32_t count, kvtier_session** children,
                                  kvtier_stream stream) {
  return guarded([&] {
    kvtier_session*& first = given(children, "children");
    std::vector<kvtier::Session> forked =
        given(session, "session").session.fork(count, to_stream(stream));
    std::vector<std::unique_ptr<kvtier_session>> handles;
    for (kvtier::Session& child : forked) {
      handles.emplace_back(new kvtier_session{std::move(child)});
    }
    std::transform(handles.begin(), handles.end(), &first,
                   [](std::unique_ptr<kvtier_session>& handle) { return handle.release(); });
  });
}

kvtier_status kvtier_session_advance(kvtier_session* session, int32_t layer, int64_t tokens) {
  return guarded([&] { given(session, "session").session.advance(layer, tokens); });
}

}  // extern "C"
