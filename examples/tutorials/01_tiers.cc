// Tutorial 01: more KV than host memory. Evicted pages go to a folder and come back when a step
// reads them; the output does not change. docs/tutorials/01-tiers.md explains it.

#include "kvtier/engine.h"
#include "kvtier/error.h"

#include "tutorials/tensors.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace {

constexpr std::int64_t kTokens = 8192;
constexpr int kSteps = 16;

/// Appends a prompt and decodes; returns the output of the last step.
tutorial::Tensor run(kvtier::Engine& engine) {
  using tutorial::Tensor;
  kvtier::Session session = engine.open();
  const Tensor keys = Tensor::random(kTokens, 2, 64, 1), values = Tensor::random(kTokens, 2, 64, 2);
  session.append(0, keys.view(), values.view());

  Tensor out(1, 8, 64);
  for (unsigned step = 0; step < kSteps; ++step) {
    const Tensor query = Tensor::random(1, 8, 64, 100 + step, 3.0F);
    const Tensor key = Tensor::random(1, 2, 64, 200 + step);
    kvtier::DecodeInputs inputs;
    inputs.query = query.view();
    inputs.key = key.view();
    inputs.value = key.view();
    kvtier::AttendOutputs outputs;
    outputs.out = out.view();
    session.decode(0, inputs, outputs);
  }
  return out;
}

}  // namespace

int main() try {
  std::string folder = (std::filesystem::temp_directory_path() / "kvtier-tutorial-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) {
    std::perror(folder.c_str());
    return 1;
  }

  kvtier::Config config;
  config.backend = kvtier::Backend::kCpu;  // where the same rows give the same bits
  config.model = {.layers = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
  config.memory.max_session_tokens = kTokens + kSteps;
  config.memory.host_bytes = 8 * kvtier::MiB;  // all of the KV: 8208 tokens x 2 heads x 256 B
  config.retrieval.top_k = 256;
  kvtier::Engine large(config);
  const tutorial::Tensor expected = run(large);

  config.memory.host_bytes = 2 * kvtier::MiB;  // half of it
  config.memory.disk_cache = folder;
  config.memory.disk_cache_bytes = 64 * kvtier::MiB;
  bool same = false;
  kvtier::Stats::Cumulative counts;
  {
    kvtier::Engine small(config);
    same = run(small).values() == expected.values();
    counts = small.stats().cumulative;
  }
  std::filesystem::remove_all(folder);

  std::printf("pages evicted %llu, restored %llu; the output is %s\n",
              static_cast<unsigned long long>(counts.pages_evicted),
              static_cast<unsigned long long>(counts.pages_restored),
              same ? "the same, bit for bit" : "different");
  return same && counts.pages_evicted > 0 && counts.pages_restored > 0 ? 0 : 1;
} catch (const kvtier::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
