/* The C ABI of kvtier: the verbs of kvtier/engine.h over opaque handles. Shapes, dtypes, units and
 * the completion rule are those of kvtier/engine.h and kvtier/tensor.h.
 *
 * Every function that can fail returns a kvtier_status; `kvtier_last_error` gives the message of
 * the calling thread's last failure. A call that fails has changed nothing, except with
 * KVTIER_INTERNAL, after which the engine is failed.
 *
 * Structs that may grow begin with `struct_size`. The `..._init` functions set it, and every field,
 * to the defaults; a size that this library does not know is refused. A struct that is only written
 * to (kvtier_stats) is filled up to the caller's size.
 *
 * ```c
 * kvtier_config config;
 * kvtier_engine* engine;
 * kvtier_session* session;
 * kvtier_config_init(&config);
 * config.query_heads = 32;
 * config.head_dim = 128;
 * if (kvtier_engine_create(&config, &engine) != KVTIER_OK) puts(kvtier_last_error());
 * if (kvtier_session_open(engine, 0, &session) != KVTIER_OK) puts(kvtier_last_error());
 * kvtier_session_close(session);
 * kvtier_engine_destroy(engine);
 * ```
 */
#ifndef KVTIER_KVTIER_H_
#define KVTIER_KVTIER_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KVTIER_C_EXPORT __attribute__((visibility("default")))
#else
#define KVTIER_C_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Numbers of gRPC's canonical codes; when each is returned: kvtier/error.h. */
typedef enum kvtier_status {
  KVTIER_OK = 0,
  KVTIER_CANCELLED = 1,
  KVTIER_INVALID_ARGUMENT = 3,
  KVTIER_DEADLINE_EXCEEDED = 4,
  KVTIER_NOT_FOUND = 5,
  KVTIER_RESOURCE_EXHAUSTED = 8,
  KVTIER_FAILED_PRECONDITION = 9,
  KVTIER_ABORTED = 10,
  KVTIER_UNIMPLEMENTED = 12,
  KVTIER_INTERNAL = 13,
  KVTIER_UNAVAILABLE = 14,
  KVTIER_DATA_LOSS = 15
} kvtier_status;

typedef enum kvtier_dtype {
  KVTIER_FP32 = 0,
  KVTIER_FP16 = 1,
  KVTIER_BF16 = 2,
  KVTIER_INT32 = 3
} kvtier_dtype;

typedef enum kvtier_space { KVTIER_HOST = 0, KVTIER_DEVICE = 1 } kvtier_space;

typedef enum kvtier_backend {
  KVTIER_BACKEND_AUTO = 0,
  KVTIER_BACKEND_CPU = 1,
  KVTIER_BACKEND_CUDA = 2
} kvtier_backend;

typedef enum kvtier_estimator {
  KVTIER_SOFT_COLLISION = 0,
  KVTIER_HARD_COLLISION = 1,
  KVTIER_NORM_AWARE = 2
} kvtier_estimator;

typedef enum kvtier_value_weighting {
  KVTIER_WEIGHTING_DEFAULT = 0,
  KVTIER_WEIGHTING_LINEAR = 1,
  KVTIER_WEIGHTING_CALIBRATED = 2,
  KVTIER_WEIGHTING_LOGIT = 3,
  KVTIER_WEIGHTING_NONE = 4
} kvtier_value_weighting;

typedef enum kvtier_selection {
  KVTIER_PER_QUERY_HEAD = 0,
  KVTIER_PER_KV_HEAD = 1,
  KVTIER_PER_SEQUENCE = 2
} kvtier_selection;

/* Which tokens are taken by their scores: SelectionRule. */
typedef enum kvtier_rule { KVTIER_TOP_K = 0, KVTIER_PRIORITY = 1 } kvtier_rule;

/* How the bits of a sketch are made from a key: SketchCode. */
typedef enum kvtier_code { KVTIER_SIGN = 0, KVTIER_SCALAR = 1 } kvtier_code;

typedef enum kvtier_plane_kind {
  KVTIER_PLANES_DEFAULT = -1, /* gaussian, or orthogonal for norm-aware */
  KVTIER_PLANES_GAUSSIAN = 0,
  KVTIER_PLANES_ORTHOGONAL = 1
} kvtier_plane_kind;

typedef enum kvtier_layer_mode {
  KVTIER_LAYER_DEFAULT = -1, /* the layer's own, in options */
  KVTIER_LAYER_SPARSE = 0,
  KVTIER_LAYER_DENSE = 1,
  KVTIER_LAYER_SLIDING_WINDOW = 2
} kvtier_layer_mode;

typedef enum kvtier_placement { KVTIER_PLACE_HOST = 0, KVTIER_PLACE_DEVICE = 1 } kvtier_placement;

typedef enum kvtier_page_format {
  KVTIER_PAGES_MODEL = 0,
  KVTIER_PAGES_INT8 = 1
} kvtier_page_format;

typedef enum kvtier_host_allocation {
  KVTIER_ALLOCATE_AUTO = 0,
  KVTIER_ALLOCATE_MANAGED = 1,
  KVTIER_ALLOCATE_REGISTERED = 2,
  KVTIER_ALLOCATE_DRIVER = 3
} kvtier_host_allocation;

/* Which of the cached rows has to go for a new one. */
typedef enum kvtier_row_cache_policy {
  KVTIER_ROW_CACHE_CLOCK = 0,
  KVTIER_ROW_CACHE_LRU = 1,
  KVTIER_ROW_CACHE_SCORE = 2
} kvtier_row_cache_policy;

typedef struct kvtier_engine kvtier_engine;
typedef struct kvtier_session kvtier_session;

/* A strided array; `data` NULL stands for an optional tensor that is not given. */
typedef struct kvtier_tensor {
  void* data;
  kvtier_dtype dtype;
  kvtier_space space;
  int32_t rank;
  int64_t shape[4];
  int64_t strides[4]; /* in elements; all 0: row-major without gaps */
} kvtier_tensor;

typedef struct kvtier_sketch_config {
  kvtier_plane_kind kind;
  int32_t num_planes;
  uint64_t seed;
  kvtier_code code;
} kvtier_sketch_config;

typedef struct kvtier_retrieval_config {
  size_t struct_size;
  kvtier_estimator estimator;
  kvtier_value_weighting value_weighting;
  kvtier_selection selection;
  kvtier_plane_kind plane_kind;
  uint64_t seed;
  int32_t planes_per_table;
  int32_t tables;
  float tau;
  int32_t num_planes; /* 0: by head_dim */
  int32_t query_bits;
  int32_t top_k;   /* 0: not given; as RetrievalConfig has it, a default error target then */
  double sparsity; /* 0: not given */
  int32_t sink_tokens;
  int32_t recent_tokens;
  kvtier_rule rule;
  kvtier_code code;
  double error_target; /* 0: not given */
  int32_t coarse_bits; /* 0: one phase */
  int32_t candidates;
} kvtier_retrieval_config;

typedef struct kvtier_layer_config {
  kvtier_layer_mode mode;
  int64_t window_tokens;
  float softmax_scale; /* 0: 1 / sqrt(head_dim) */
  float logit_softcap;
} kvtier_layer_config;

/* The device row cache takes what `device_bytes` has left for it. */
#define KVTIER_ROW_CACHE_BYTES_AUTO UINT64_MAX

typedef struct kvtier_config {
  size_t struct_size;
  int32_t layers;
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  kvtier_dtype kv_dtype;
  const kvtier_layer_config* layer_options; /* NULL, or one per layer */
  uint64_t device_bytes;
  uint64_t host_bytes;
  kvtier_placement placement;
  int32_t page_tokens;
  int64_t max_session_tokens;
  int32_t max_batch_rows;
  int32_t staging_rows;
  int32_t pin_threads;
  kvtier_host_allocation host_allocation;
  const char* calibration_file; /* NULL: none */
  kvtier_retrieval_config retrieval;
  const kvtier_sketch_config* extra_sketches;
  size_t num_extra_sketches;
  kvtier_backend backend;
  int32_t reject_nonfinite;
  void (*log)(void* context, int32_t level, const char* message); /* NULL: no messages */
  void* log_context;
  const char* disk_cache; /* NULL: none; else the next is its size */
  uint64_t disk_cache_bytes;
  uint64_t tier_deadline_ms;
  uint64_t row_cache_bytes; /* KVTIER_ROW_CACHE_BYTES_AUTO: of device_bytes; 0: no row cache */
  int32_t row_cache_rows;   /* -1: automatic; 0: no row cache */
  kvtier_row_cache_policy row_cache_policy;
  kvtier_page_format page_format;
  int32_t verify_rows;       /* not 0: rows in host memory are compared with checksums */
  int32_t prefetch_rows;     /* not 0: rows are put into the row cache after each step */
  int32_t dense_when_faster; /* not 0: sparse layers attend to all tokens where that is faster */
} kvtier_config;

/* Per-call overrides; `kvtier_options_init` sets every field to "not given". */
typedef struct kvtier_options {
  size_t struct_size;
  float softmax_scale; /* 0: not given */
  float logit_softcap; /* negative: not given */
  kvtier_layer_mode mode;
  int64_t dense_from;                       /* negative: not given */
  const kvtier_retrieval_config* retrieval; /* NULL: the engine's */
  double recall_target;                     /* 0: not given; else the next two count, too */
  int32_t min_top_k;
  float noise_share;
} kvtier_options;

/* A caller's stream. given 0: the call returns with its outputs written; otherwise `handle` is a
 * cudaStream_t of the engine's GPU on which the call is enqueued. cudaStreamPerThread is refused.
 */
typedef struct kvtier_stream {
  int32_t given;
  void* handle;
} kvtier_stream;

/* Tensors of one attend or decode; key and value are used by decode alone. */
typedef struct kvtier_attend_args {
  size_t struct_size;
  kvtier_tensor query;
  kvtier_tensor key;
  kvtier_tensor value;
  kvtier_tensor selected; /* optional input ids */
  kvtier_tensor bias;     /* optional, of `selected` */
  kvtier_tensor out;
  kvtier_tensor lse;             /* optional */
  kvtier_tensor selected_out;    /* optional */
  kvtier_tensor missed;          /* optional */
  const kvtier_options* options; /* NULL: defaults */
} kvtier_attend_args;

typedef struct kvtier_batch_item {
  kvtier_session* session;
  const kvtier_attend_args* args;
} kvtier_batch_item;

typedef struct kvtier_stats {
  size_t struct_size;
  uint64_t tokens_appended, queries, rows_selected, rows_attended;
  uint64_t bytes_host_to_device, bytes_device_to_host, bytes_device_resident, bytes_sketch_read;
  uint64_t nonfinite_tokens;
  uint64_t sessions, host_page_bytes, host_page_bytes_used, device_bytes, sketch_bytes_used;
  uint64_t pages, pages_used;
  uint64_t pages_shared, prefix_tokens;
  uint64_t prefix_tokens_asked, prefix_tokens_attached, prefix_tokens_evicted;
  uint64_t pages_in_tiers, pages_evicted, pages_restored, pages_lost, cold_steps;
  uint64_t tier_bytes_written, tier_bytes_read, tier_hits, tier_misses, tier_corrupt;
  uint64_t tier_refused, tier_unavailable, tier_nanoseconds;
  uint64_t pages_repaired, num_tiers;
  uint64_t row_cache_hits, row_cache_misses, row_cache_admissions, row_cache_evictions,
      row_cache_bytes, row_cache_bytes_used;
  uint64_t rows_corrupt;
  uint64_t rows_prefetched, rows_prefetched_useful, rows_prefetched_wasted;
  uint64_t row_cache_rows; /* per KV head of a session's layer; 0: no row cache */
  uint64_t dense_queries;  /* of `queries`: attended to all tokens, as that was faster */
} kvtier_stats;

/* Bound i is 50 us << i; the last count is of what took longer than all of them. */
#define KVTIER_LATENCY_COUNTS 19
typedef struct kvtier_tier_stats {
  size_t struct_size;
  char kind[16]; /* ends in 0 */
  uint64_t gets, hits, misses, corrupt, get_timeouts, get_failures;
  uint64_t puts, stored, refused, put_timeouts, put_failures;
  uint64_t bytes_read, bytes_written, evicted, capacity_bytes, used_bytes;
  uint64_t servers, servers_open, servers_probing;
  uint64_t get_counts[KVTIER_LATENCY_COUNTS], get_nanoseconds;
  uint64_t put_counts[KVTIER_LATENCY_COUNTS], put_nanoseconds;
} kvtier_tier_stats;

/* "major.minor.patch" of the library. */
KVTIER_C_EXPORT const char* kvtier_version(void);
/* Message of the calling thread's last failure; valid until its next call. Never NULL. */
KVTIER_C_EXPORT const char* kvtier_last_error(void);
KVTIER_C_EXPORT const char* kvtier_status_name(kvtier_status status);

/* Set every field to the default of the C++ API. */
KVTIER_C_EXPORT void kvtier_config_init(kvtier_config* config);
KVTIER_C_EXPORT void kvtier_retrieval_config_init(kvtier_retrieval_config* config);
/* Sets every field as the SOCKET paper has it: RetrievalConfig::socket. */
KVTIER_C_EXPORT void kvtier_retrieval_config_init_socket(kvtier_retrieval_config* config);
KVTIER_C_EXPORT void kvtier_options_init(kvtier_options* options);
KVTIER_C_EXPORT void kvtier_attend_args_init(kvtier_attend_args* args);

KVTIER_C_EXPORT kvtier_status kvtier_engine_create(const kvtier_config* config,
                                                   kvtier_engine** engine);
/* Sessions may outlive their engine's handle. NULL is ignored. */
KVTIER_C_EXPORT void kvtier_engine_destroy(kvtier_engine* engine);
KVTIER_C_EXPORT kvtier_backend kvtier_engine_backend(const kvtier_engine* engine);
/* `stats->struct_size` must be set. */
KVTIER_C_EXPORT kvtier_status kvtier_engine_stats(const kvtier_engine* engine, kvtier_stats* stats);
/* Of tier `index`, in the order in which they are asked; from kvtier_stats::num_tiers on refused.
 */
KVTIER_C_EXPORT kvtier_status kvtier_engine_tier_stats(const kvtier_engine* engine, size_t index,
                                                       kvtier_tier_stats* stats);
/* A ragged batch: Engine::decode. */
KVTIER_C_EXPORT kvtier_status kvtier_engine_decode(kvtier_engine* engine, int32_t layer,
                                                   const kvtier_batch_item* items, size_t num_items,
                                                   kvtier_stream stream);
/* Merges `num_parts` partial results (fp32 outs and lses) by log-sum-exp: Engine::merge. */
KVTIER_C_EXPORT kvtier_status kvtier_engine_merge(kvtier_engine* engine, const kvtier_tensor* outs,
                                                  const kvtier_tensor* lses, size_t num_parts,
                                                  const kvtier_tensor* out,
                                                  const kvtier_tensor* lse, kvtier_stream stream);

/* capacity_tokens 0: max_session_tokens. */
KVTIER_C_EXPORT kvtier_status kvtier_session_open(kvtier_engine* engine, int64_t capacity_tokens,
                                                  kvtier_session** session);
KVTIER_C_EXPORT void kvtier_session_close(kvtier_session* session);
KVTIER_C_EXPORT kvtier_status kvtier_session_append(kvtier_session* session, int32_t layer,
                                                    const kvtier_tensor* keys,
                                                    const kvtier_tensor* values,
                                                    kvtier_stream stream);
KVTIER_C_EXPORT kvtier_status kvtier_session_reserve(kvtier_session* session, int64_t tokens,
                                                     kvtier_stream stream);
KVTIER_C_EXPORT kvtier_status kvtier_session_select(kvtier_session* session, int32_t layer,
                                                    const kvtier_tensor* query,
                                                    const kvtier_tensor* ids,
                                                    const kvtier_tensor* scores, /* may be NULL */
                                                    const kvtier_tensor* bias,   /* may be NULL */
                                                    const kvtier_options* options,
                                                    kvtier_stream stream);
/* Puts the rows that the query selects into the row cache for steps to come: Session::prefetch. */
KVTIER_C_EXPORT kvtier_status kvtier_session_prefetch(kvtier_session* session, int32_t layer,
                                                      const kvtier_tensor* query,
                                                      const kvtier_options* options,
                                                      kvtier_stream stream);
KVTIER_C_EXPORT kvtier_status kvtier_session_attend(kvtier_session* session, int32_t layer,
                                                    const kvtier_attend_args* args,
                                                    kvtier_stream stream);
KVTIER_C_EXPORT kvtier_status kvtier_session_decode(kvtier_session* session, int32_t layer,
                                                    const kvtier_attend_args* args,
                                                    kvtier_stream stream);
/* Copies stored rows by token id to host memory: Session::fetch. */
KVTIER_C_EXPORT kvtier_status kvtier_session_fetch(kvtier_session* session, int32_t layer,
                                                   const kvtier_tensor* tokens,
                                                   const kvtier_tensor* keys,
                                                   const kvtier_tensor* values);
KVTIER_C_EXPORT kvtier_status kvtier_session_length(const kvtier_session* session, int32_t layer,
                                                    int64_t* tokens);
KVTIER_C_EXPORT kvtier_status kvtier_session_truncate(kvtier_session* session, int64_t tokens,
                                                      kvtier_stream stream);
/* What stored prefixes are found by: SessionConfig. */
typedef struct kvtier_prefix {
  size_t struct_size;
  const int32_t* token_ids;
  size_t num_token_ids;
  const void* tenant_secret;
  size_t tenant_secret_bytes;
  const char* model_fingerprint; /* NULL: empty */
} kvtier_prefix;

/* Opens a session with the longest stored prefix of these token ids. */
KVTIER_C_EXPORT kvtier_status kvtier_session_open_prefix(kvtier_engine* engine,
                                                         int64_t capacity_tokens,
                                                         const kvtier_prefix* prefix,
                                                         kvtier_session** session);
/* SessionConfig. Zero and NULL: the default. */
typedef struct kvtier_session_config {
  size_t struct_size;
  int64_t capacity_tokens;
  const kvtier_prefix* prefix; /* may be NULL */
  uint64_t max_page_bytes;
  const char* tenant;
} kvtier_session_config;
KVTIER_C_EXPORT kvtier_status kvtier_session_open_config(kvtier_engine* engine,
                                                         const kvtier_session_config* config,
                                                         kvtier_session** session);
/* Engine::set_quota; UINT64_MAX: no limit. */
KVTIER_C_EXPORT kvtier_status kvtier_engine_set_quota(kvtier_engine* engine, const char* tenant,
                                                      uint64_t page_bytes);
/* Stores the whole pages of the first tokens for sessions opened later: Session::publish. */
KVTIER_C_EXPORT kvtier_status kvtier_session_publish(kvtier_session* session,
                                                     const int32_t* token_ids, size_t num_token_ids,
                                                     kvtier_stream stream);
/* Opens `count` sessions that start as this one is: Session::fork. `children` has room for `count`
 * handles; none is written when the call fails. */
KVTIER_C_EXPORT kvtier_status kvtier_session_fork(kvtier_session* session, int32_t count,
                                                  kvtier_session** children, kvtier_stream stream);
KVTIER_C_EXPORT kvtier_status kvtier_session_advance(kvtier_session* session, int32_t layer,
                                                     int64_t tokens);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_KVTIER_H_ */
