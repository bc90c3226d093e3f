#include "benchmarks/quality/library_selector.h"

#include <limits>
#include <vector>

namespace kvtier::quality {

LibrarySelector::LibrarySelector(const RetrievalConfig& retrieval, std::int64_t capacity)
    : retrieval_(retrieval), capacity_(capacity) {}

void LibrarySelector::build(const KvHead& head, std::int64_t tokens) {
  head_ = head;
  Config config;
  config.model = {
      .layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = static_cast<int>(head.head_dim)};
  config.retrieval = retrieval_;
  config.backend = Backend::kCpu;
  config.memory.max_session_tokens = capacity_;
  config.memory.max_batch_rows = 1;
  config.memory.host_bytes = static_cast<std::size_t>((capacity_ + 256) * 4 * head.head_dim);
  config.memory.device_bytes = 64 * MiB + static_cast<std::size_t>(1024 * capacity_);
  session_.reset();
  engine_.emplace(config);
  session_.emplace(engine_->open());
  tokens_scored_ = 0.0;
  append(0, tokens);
}

void LibrarySelector::append(std::int64_t token) { append(token, 1); }

void LibrarySelector::append(std::int64_t first, std::int64_t count) {
  session_->append(0, {head_.key(first), DType::kFloat32, {count, 1, head_.head_dim}},
                   {head_.value(first), DType::kFloat32, {count, 1, head_.head_dim}});
}

void LibrarySelector::score(const Query& query, const StepSpans& spans,
                            std::span<float> scores) const {
  const std::int64_t count = spans.num_eligible();
  if (count == 0) return;
  RetrievalConfig retrieval = retrieval_;
  retrieval.top_k = static_cast<int>(count);
  retrieval.sink_tokens = static_cast<int>(spans.sink_end);
  retrieval.recent_tokens = static_cast<int>(spans.visible - spans.eligible_end);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::vector<float> found(ids.size());
  session_->select(0, {query.values, DType::kFloat32, {1, 1, head_.head_dim}},
                   {.ids = {ids.data(), DType::kInt32, {1, 1, count}},
                    .scores = {found.data(), DType::kFloat32, {1, 1, count}}},
                   {}, {.retrieval = &retrieval});
  for (std::size_t i = 0; i < ids.size(); ++i) {
    scores[static_cast<std::size_t>(ids[i] - spans.sink_end)] = found[i];
  }
  tokens_scored_ += static_cast<double>(count);
}

double LibrarySelector::bits_per_token() const {
  if (tokens_scored_ == 0.0) return 0.0;
  const auto bytes = static_cast<double>(engine_->stats().cumulative.bytes_sketch_read);
  return 8.0 * bytes / tokens_scored_;
}

}  // namespace kvtier::quality
