#include <cmath>
#include <cstdio>
#include <kvtier/engine.h>
#include <vector>

// An embedder's program: with everything selected, attention over equal keys is the mean of the
// values.
int main() {
  constexpr int kTokens = 5;
  constexpr int kHeadDim = 64;
  kvtier::Config config;
  config.model = {.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = kHeadDim};
  config.memory.device_bytes = 64 * kvtier::MiB;
  config.memory.host_bytes = 16 * kvtier::MiB;
  config.memory.max_session_tokens = 1024;
  config.backend = kvtier::Backend::kCpu;

  kvtier::Engine engine(config);
  kvtier::Session session = engine.open();
  std::vector<float> keys(kTokens * kHeadDim, 1.0F);
  std::vector<float> values(kTokens * kHeadDim);
  for (int t = 0; t < kTokens; ++t) {
    for (int i = 0; i < kHeadDim; ++i) values[t * kHeadDim + i] = static_cast<float>(t);
  }
  session.append(0, {keys.data(), kvtier::DType::kFloat32, {kTokens, 1, kHeadDim}},
                 {values.data(), kvtier::DType::kFloat32, {kTokens, 1, kHeadDim}});
  std::vector<float> query(2 * kHeadDim, 0.5F);
  std::vector<float> out(2 * kHeadDim);
  session.attend(0, {.query = {query.data(), kvtier::DType::kFloat32, {1, 2, kHeadDim}}},
                 {.out = {out.data(), kvtier::DType::kFloat32, {1, 2, kHeadDim}}});

  for (float y : out) {
    if (std::abs(y - 2.0F) > 1e-2F) {
      std::fprintf(stderr, "expected 2, found %g\n", static_cast<double>(y));
      return 1;
    }
  }
  try {
    session.append(7, {}, {});
  } catch (const kvtier::Error& error) {
    std::printf("kvtier: %d tokens, %s caught across the library\n", kTokens,
                kvtier::error_code_name(error.code()).data());
    return error.code() == kvtier::ErrorCode::kInvalidArgument ? 0 : 1;
  }
  return 1;
}
