#include "services/tools/stress/ingest.h"

#include "services/evaluation/threads.h"

#include <algorithm>
#include <future>

namespace kvtier::services {
namespace {

constexpr std::int64_t kChunkTokens = 8192;

std::int64_t chunk_tokens(const StressOptions& options) {
  return std::min(options.tokens, kChunkTokens);
}

std::size_t tensor_bytes(const StressOptions& options) {
  return static_cast<std::size_t>(chunk_tokens(options) * *options.kv_heads * *options.head_dim) *
         dtype_bytes(DType::kBFloat16);
}

}  // namespace

std::size_t ingest_buffer_bytes(const StressOptions& options) { return 4 * tensor_bytes(options); }

Ingest::Ingest(const StressOptions& options, TensorDevice& device)
    : kv_heads_(*options.kv_heads),
      head_dim_(*options.head_dim),
      tokens_(options.tokens),
      chunk_tokens_(chunk_tokens(options)),
      device_(device) {
  for (Chunk& chunk : chunks_) {
    chunk = {device.allocate(tensor_bytes(options)), device.allocate(tensor_bytes(options))};
  }
}

void Ingest::append(Session& session, int layer, const LayerSource& source,
                    const std::function<bool(std::int64_t)>& advanced) {
  const auto make = [&](int slot, std::int64_t begin) {
    const Chunk& chunk = chunks_[slot];
    const std::int64_t count = std::min(chunk_tokens_, tokens_ - begin);
    source.fill(begin, count, reinterpret_cast<std::uint16_t*>(chunk.keys.host),
                reinterpret_cast<std::uint16_t*>(chunk.values.host), num_threads());
  };
  const auto start = [&](int slot, std::int64_t begin) {
    return std::async(std::launch::async, make, slot, begin);
  };
  std::int64_t begin = 0;
  int slot = 0;
  std::future<void> next = start(slot, begin);
  while (begin < tokens_) {
    next.get();
    const std::int64_t count = std::min(chunk_tokens_, tokens_ - begin);
    if (begin + count < tokens_) next = start(1 - slot, begin + count);

    const Chunk& chunk = chunks_[slot];
    const std::size_t bytes =
        static_cast<std::size_t>(count * kv_heads_ * head_dim_) * dtype_bytes(DType::kBFloat16);
    device_.upload(chunk.keys, bytes);
    device_.upload(chunk.values, bytes);
    const auto view = [&](const Mirror& mirror) {
      return TensorView(mirror.device, DType::kBFloat16, {count, kv_heads_, head_dim_},
                        device_.space());
    };
    session.append(layer, view(chunk.keys), view(chunk.values), device_.stream());
    device_.synchronize();  // the chunk is about to be made anew

    begin += count;
    slot = 1 - slot;
    if (!advanced(count)) break;  // the future waits for its thread
  }
}

}  // namespace kvtier::services
