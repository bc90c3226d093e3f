#pragma once

#include "runtime/engine_fixture.h"
#include "support/fault_tier.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace kvtier::testing {

inline constexpr std::int64_t kPageTokens = 16;

/// An engine of two layers over pages of 16 tokens, with `frames` frames, and its twin with room
/// for everything. `tier` none: the twin.
inline Config tiered_config(Backend backend, std::size_t frames, std::shared_ptr<PageTier> tier) {
  Config config = small_config(backend);
  config.model.layers = 2;
  config.memory.page_tokens = kPageTokens;
  config.memory.max_session_tokens = 2048;
  config.memory.max_batch_rows = 4;
  config.retrieval.top_k = 48;
  config.retrieval.sink_tokens = 8;
  config.retrieval.recent_tokens = 16;
  const std::size_t page_bytes = std::size_t{4} * 64 * 2 * kPageTokens;
  config.memory.host_bytes = frames * page_bytes;
  if (tier) config.memory.tiers = {std::move(tier)};
  return config;
}
inline constexpr std::size_t kPlenty = 4096;

/// Fetches every row of a layer.
inline std::vector<std::byte> all_rows(Session& session, const ModelConfig& model, int layer) {
  const std::int64_t n = session.length(layer);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(model.kv_heads * n));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(n));
  }
  const auto bytes = static_cast<std::size_t>(model.kv_heads * n * model.head_dim * 2);
  std::vector<std::byte> rows(2 * bytes);
  const auto view = [&](std::size_t at) {
    return MutableTensorView(rows.data() + at, DType::kBFloat16,
                             {model.kv_heads, n, model.head_dim});
  };
  session.fetch(layer, {ids.data(), DType::kInt32, {model.kv_heads, n}}, {view(0), view(bytes)});
  return rows;
}

class SpillTest : public EngineTest {
 protected:
  [[nodiscard]] Config with_frames(std::size_t frames) const {
    return tiered_config(GetParam(), frames, tier_);
  }
  [[nodiscard]] Config twin() const { return tiered_config(GetParam(), kPlenty, nullptr); }

  std::shared_ptr<FaultTier> tier_ = std::make_shared<FaultTier>();
};

/// Returns whether two calls chose the same tokens and gave the same results but for rounding.
inline bool near_results(const CallTensors& a, const CallTensors& b) {
  const auto near = [](const HostTensor& x, const HostTensor& y) {
    bool all = true;
    for (std::size_t i = 0; i < x.bytes().size() / sizeof(float); ++i) {
      // A NaN is no number that is near.
      all = all && std::abs(x.get(i) - y.get(i)) <= 2e-5F * (1.0F + std::abs(y.get(i)));
    }
    return all;
  };
  return a.ids.data == b.ids.data && near(a.out, b.out) && near(a.lse, b.lse);
}

/// What the results of a call must be that may need more pages at once than there are frames, or
/// finds other cached rows: a GPU takes its sums in another order then.
inline bool as_resident(Backend backend, const CallTensors& spilled, const CallTensors& resident) {
  return backend == Backend::kCpu ? spilled.same_results(resident)
                                  : near_results(spilled, resident);
}

/// A batch of one call in each session.
inline std::vector<BatchItem> batch_of(std::vector<Session>& sessions,
                                       std::vector<CallTensors>& calls) {
  std::vector<BatchItem> items;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    items.push_back({.session = &sessions[i],
                     .inputs = calls[i].inputs(),
                     .outputs = calls[i].outputs(),
                     .options = {}});
  }
  return items;
}

/// One decode of `tokens` tokens in every layer, on both engines, must give the same bits, or with
/// `crowded` what `as_resident` says.
inline void expect_same_decode(Session& spilled, Session& resident, const ModelConfig& model,
                               std::int64_t tokens, std::uint64_t seed,
                               const AttendOptions& options = {}, bool with_ids = false,
                               std::optional<Backend> crowded = std::nullopt) {
  for (int layer = 0; layer < model.layers; ++layer) {
    CallTensors a(model, tokens, seed + static_cast<std::uint64_t>(layer));
    CallTensors b(model, tokens, seed + static_cast<std::uint64_t>(layer));
    spilled.decode(layer, a.inputs(), a.outputs(with_ids), {}, options);
    resident.decode(layer, b.inputs(), b.outputs(with_ids), {}, options);
    const bool same = crowded ? as_resident(*crowded, a, b) : a.same_results(b);
    ASSERT_TRUE(same) << "layer " << layer << ", seed " << seed;
  }
}

}  // namespace kvtier::testing
