#include <kvtier/kvtier.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { kTokens = 5, kHeadDim = 64 };

static kvtier_tensor tensor(void* data, int64_t tokens, int64_t heads) {
  kvtier_tensor view;
  memset(&view, 0, sizeof view);
  view.data = data;
  view.dtype = KVTIER_FP32;
  view.space = KVTIER_HOST;
  view.rank = 3;
  view.shape[0] = tokens;
  view.shape[1] = heads;
  view.shape[2] = kHeadDim;
  return view;
}

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, kvtier_last_error());
  return 1;
}

/* With everything attended, attention over equal keys is the mean of the values. */
int main(void) {
  static float keys[kTokens * kHeadDim], values[kTokens * kHeadDim];
  static float query[2 * kHeadDim], out[2 * kHeadDim];
  const kvtier_stream none = {0, NULL};
  kvtier_engine* engine = NULL;
  kvtier_session* session = NULL;
  kvtier_config config;
  kvtier_attend_args args;
  kvtier_tensor key_view = tensor(keys, kTokens, 1), value_view = tensor(values, kTokens, 1);
  int i;

  kvtier_config_init(&config);
  config.query_heads = 2;
  config.head_dim = kHeadDim;
  config.device_bytes = 64 << 20;
  config.host_bytes = 16 << 20;
  config.max_session_tokens = 1024;
  config.backend = KVTIER_BACKEND_CPU;
  if (kvtier_engine_create(&config, &engine) != KVTIER_OK) return fail("create");
  if (kvtier_session_open(engine, 0, &session) != KVTIER_OK) return fail("open");

  for (i = 0; i < kTokens * kHeadDim; ++i) {
    keys[i] = 1.0F;
    values[i] = (float)(i / kHeadDim);
  }
  for (i = 0; i < 2 * kHeadDim; ++i) query[i] = 0.5F;
  if (kvtier_session_append(session, 0, &key_view, &value_view, none) != KVTIER_OK) {
    return fail("append");
  }
  kvtier_attend_args_init(&args);
  args.query = tensor(query, 1, 2);
  args.out = tensor(out, 1, 2);
  if (kvtier_session_attend(session, 0, &args, none) != KVTIER_OK) return fail("attend");
  for (i = 0; i < 2 * kHeadDim; ++i) {
    if (fabsf(out[i] - 2.0F) > 1e-2F) return fail("the output is not the mean");
  }
  if (kvtier_session_append(session, 7, &key_view, &value_view, none) != KVTIER_INVALID_ARGUMENT) {
    return fail("a layer that does not exist was accepted");
  }
  kvtier_session_close(session);
  kvtier_engine_destroy(engine);
  printf("kvtier %s from C\n", kvtier_version());
  return 0;
}
