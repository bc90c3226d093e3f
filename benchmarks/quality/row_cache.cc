#include "benchmarks/quality/row_cache.h"

#include "kvtier/engine.h"

#include "transfer/row_cache/row_cache_set.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <set>
#include <unordered_map>
#include <utility>

namespace kvtier::quality {
namespace {

using services::Trace;

constexpr std::int64_t kChunkSteps = 32;

Config engine_config(const Trace& trace, const RetrievalConfig& retrieval) {
  Config config;
  config.backend = Backend::kCpu;
  config.model = {.layers = static_cast<int>(trace.layers().size()),
                  .query_heads = static_cast<int>(trace.query_heads()),
                  .kv_heads = static_cast<int>(trace.kv_heads()),
                  .head_dim = static_cast<int>(trace.head_dim())};
  config.retrieval = retrieval;
  config.memory.max_session_tokens = trace.tokens();
  config.memory.max_batch_rows = kChunkSteps;
  const auto row_bytes = static_cast<std::size_t>(trace.kv_heads() * trace.head_dim() * 4);
  const std::size_t tokens = static_cast<std::size_t>(trace.tokens() + 1024);
  config.memory.host_bytes = trace.layers().size() * tokens * row_bytes;
  config.memory.device_bytes = GiB + config.memory.host_bytes;
  return config;
}

}  // namespace

std::vector<SelectedSteps> select_steps(const Trace& trace, const RetrievalConfig& retrieval) {
  Engine engine(engine_config(trace, retrieval));
  const auto heads = static_cast<std::size_t>(trace.kv_heads());
  std::vector<SelectedSteps> selected(trace.layers().size() * heads);
  for (std::size_t layer = 0; layer < trace.layers().size(); ++layer) {
    const services::TraceLayer& tensors = trace.layers()[layer];
    Session session = engine.open();
    std::int64_t length = 0;
    for (std::int64_t step = 0; step < trace.steps(); step += kChunkSteps) {
      const std::int64_t count = std::min(kChunkSteps, trace.steps() - step);
      const std::int64_t tokens = trace.context() + step + count - length;
      session.append(static_cast<int>(layer), Trace::by_token(tensors.keys, length, tokens),
                     Trace::by_token(tensors.values, length, tokens));
      length += tokens;
      const std::int64_t most = trace.tokens();
      std::vector<std::int32_t> ids(static_cast<std::size_t>(count) * heads *
                                    static_cast<std::size_t>(most));
      session.select(
          static_cast<int>(layer), Trace::by_token(tensors.queries, step, count),
          {.ids = {ids.data(), DType::kInt32, {count, trace.kv_heads(), most}}, .scores = {}});
      for (std::size_t i = 0; i < static_cast<std::size_t>(count) * heads; ++i) {
        const auto first = ids.begin() + static_cast<std::ptrdiff_t>(i) * most;
        selected[layer * heads + i % heads].emplace_back(first, std::find(first, first + most, -1));
      }
    }
  }
  return selected;
}

double step_overlap(const SelectedSteps& steps) {
  double sum = 0.0;
  for (std::size_t i = 1; i < steps.size(); ++i) {
    std::vector<std::int32_t> both;
    std::set_intersection(steps[i - 1].begin(), steps[i - 1].end(), steps[i].begin(),
                          steps[i].end(), std::back_inserter(both));
    sum += static_cast<double>(both.size()) / static_cast<double>(steps[i].size());
  }
  return sum / static_cast<double>(steps.size() - 1);
}

std::int64_t num_selected(const SelectedSteps& steps) {
  std::int64_t sum = 0;
  for (const std::vector<std::int32_t>& step : steps) sum += std::ssize(step);
  return sum;
}

std::int64_t policy_hits(const SelectedSteps& steps, int capacity, RowCachePolicy policy,
                         std::uint32_t heads) {
  const int num_sets = transfer::row_cache_sets(capacity);
  std::vector<transfer::RowCacheSet> sets(static_cast<std::size_t>(num_sets));
  std::memset(sets.data(), transfer::kEmptySetByte, sets.size() * sizeof(transfer::RowCacheSet));
  std::int64_t hits = 0;
  for (const std::vector<std::int32_t>& step : steps) {
    std::vector<transfer::OpenSet> open(sets.begin(), sets.end());
    const auto set_of = [&](std::int32_t token) -> transfer::OpenSet& {
      return open[static_cast<std::size_t>(transfer::row_cache_set(token, num_sets))];
    };
    std::vector<std::int32_t> missing;
    for (const std::int32_t token : step) {
      if (set_of(token).find(token, heads) < 0) missing.push_back(token);
    }
    hits += std::ssize(step) - std::ssize(missing);
    for (transfer::OpenSet& set : open) (void)set.count_uses(policy);
    for (const std::int32_t token : missing) {
      transfer::RowCacheChange change;
      (void)set_of(token).admit(policy, token, heads, change);
    }
  }
  return hits;
}

std::int64_t belady_hits(const SelectedSteps& steps, int capacity) {
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  std::vector<std::vector<std::size_t>> next_use(steps.size());
  std::unordered_map<std::int32_t, std::size_t> next;
  for (std::size_t i = steps.size(); i-- > 0;) {
    for (const std::int32_t token : steps[i]) {
      const auto found = next.find(token);
      next_use[i].push_back(found == next.end() ? kNever : found->second);
      next[token] = i;
    }
  }
  std::unordered_map<std::int32_t, std::size_t> kept;    // and when it is used next
  std::set<std::pair<std::size_t, std::int32_t>> order;  // by next use
  std::int64_t hits = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    for (std::size_t j = 0; j < steps[i].size(); ++j) {
      const std::int32_t token = steps[i][j];
      const auto found = kept.find(token);
      if (found != kept.end()) {
        ++hits;
        order.erase({found->second, token});
        kept.erase(found);
      }
      if (next_use[i][j] == kNever) continue;
      kept[token] = next_use[i][j];
      order.insert({next_use[i][j], token});
    }
    while (std::ssize(kept) > capacity) {
      const auto last = std::prev(order.end());
      kept.erase(last->second);
      order.erase(last);
    }
  }
  return hits;
}

}  // namespace kvtier::quality
