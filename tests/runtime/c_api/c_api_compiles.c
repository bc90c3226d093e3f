#include "runtime/c_api/c_api_compiles.h"

#include "kvtier/kvtier.h"

#include <string.h>

_Static_assert(KVTIER_OK == 0, "success is zero");
_Static_assert(sizeof(kvtier_tensor) >= 2 * 4 * sizeof(int64_t), "shape and strides by value");

enum { kTokens = 71, kHeadDim = 64 };

static kvtier_tensor tensor_of(void* data, kvtier_dtype dtype, int64_t tokens) {
  kvtier_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.space = KVTIER_HOST;
  tensor.rank = 3;
  tensor.shape[0] = tokens;
  tensor.shape[1] = 1;
  tensor.shape[2] = kHeadDim;
  return tensor;
}

static kvtier_status run(kvtier_session* session, float* out) {
  static uint16_t rows[kTokens * kHeadDim];
  const kvtier_stream none = {0, NULL};
  /* bf16 1.0 or -1.0 by a fixed pattern. */
  for (int i = 0; i < kTokens * kHeadDim; ++i) rows[i] = (i * 7 / 3) % 2 ? 0xBF80 : 0x3F80;
  kvtier_tensor prompt = tensor_of(rows, KVTIER_BF16, kTokens - 1);
  kvtier_status status = kvtier_session_append(session, 0, &prompt, &prompt, none);
  if (status != KVTIER_OK) return status;

  kvtier_attend_args args;
  kvtier_attend_args_init(&args);
  args.query = tensor_of(rows, KVTIER_BF16, 1);
  args.key = tensor_of(rows + (kTokens - 1) * kHeadDim, KVTIER_BF16, 1);
  args.value = args.key;
  args.out = tensor_of(out, KVTIER_FP32, 1);
  return kvtier_session_decode(session, 0, &args, none);
}

int c_round_trip(int backend, float* out) {
  kvtier_config config;
  kvtier_config_init(&config);
  config.head_dim = kHeadDim;
  config.host_bytes = 1 << 20;
  config.device_bytes = 64 << 20;
  config.max_session_tokens = 1024;
  config.backend = (kvtier_backend)backend;
  kvtier_engine* engine = NULL;
  kvtier_status status = kvtier_engine_create(&config, &engine);
  if (status != KVTIER_OK) return (int)status;
  kvtier_session* session = NULL;
  status = kvtier_session_open(engine, 0, &session);
  if (status == KVTIER_OK) status = run(session, out);
  kvtier_session_close(session);
  kvtier_engine_destroy(engine);
  return (int)status;
}

const char* c_status_name(int number) { return kvtier_status_name((kvtier_status)number); }
