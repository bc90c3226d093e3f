// Tutorial 02: compute a prompt once and use it often. A fork continues a session in several ways;
// a stored prefix starts later sessions. docs/tutorials/02-forks-and-prefixes.md explains it.

#include "kvtier/engine.h"
#include "kvtier/error.h"

#include "tutorials/tensors.h"

#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

int main() try {
  using tutorial::Tensor;
  constexpr std::int64_t kPrompt = 1000;
  kvtier::Config config;
  config.model = {.layers = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
  config.memory.host_bytes = 16 * kvtier::MiB;
  config.memory.max_session_tokens = 4096;
  config.retrieval.top_k = 128;
  kvtier::Engine engine(config);

  const Tensor keys = Tensor::random(kPrompt, 2, 64, 1), values = Tensor::random(kPrompt, 2, 64, 2);
  std::vector<std::int32_t> prompt_ids(kPrompt);
  std::iota(prompt_ids.begin(), prompt_ids.end(), 5000);

  // A session that says which tokens it holds, so that it can publish them.
  kvtier::SessionConfig named;
  named.token_ids = prompt_ids;
  named.tenant_secret = "a secret of this tenant";
  named.model_fingerprint = "my-model-v1";
  kvtier::Session parent = engine.open(named);
  std::printf("first session begins with %lld tokens\n", static_cast<long long>(parent.length()));
  parent.append(0, keys.view(), values.view());
  parent.publish(prompt_ids);

  // Forks share the pages of the parent until they write.
  std::vector<kvtier::Session> children = parent.fork(3);
  const std::size_t pages_before = engine.stats().snapshot.pages_used;
  for (unsigned i = 0; i < children.size(); ++i) {
    const Tensor token = Tensor::random(1, 2, 64, 10 + i);
    children[i].append(0, token.view(), token.view());
  }
  const kvtier::Stats::Snapshot held = engine.stats().snapshot;
  std::printf("parent and 3 forks: %zu pages, %zu of them shared; 3 new ones for 3 appends\n",
              held.pages_used, held.pages_shared);

  // A later session with the same prompt begins with its whole pages: 15 of 64 tokens.
  kvtier::Session later = engine.open(named);
  const std::int64_t attached = later.length();
  std::printf("later session begins with %lld of %lld tokens\n", static_cast<long long>(attached),
              static_cast<long long>(kPrompt));

  const bool ok = parent.length() == kPrompt && children[0].length() == kPrompt + 1 &&
                  attached == kPrompt / 64 * 64 && held.pages_used == pages_before + 3 &&
                  held.pages_shared == 15;
  return ok ? 0 : 1;
} catch (const kvtier::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
