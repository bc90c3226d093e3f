#include "attention/rest.h"

#include "transfer/float16.h"
#include "transfer/with_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvtier::attention {
namespace {

void add_rest_to(const RestItem& item, const transfer::KvGeometry& kv, int head) {
  const float missed = item.missed[head * item.missed_stride];
  const float* const value = item.value + head / kv.group() * item.value_stride;
  transfer::with_float_type(item.dtype, [&](auto type) {
    using Stored = decltype(type);
    auto* row = static_cast<std::byte*>(item.out) +
                head * item.head_stride * static_cast<std::int64_t>(sizeof(Stored));
    for (int x = 0; x < kv.head_dim; ++x, row += sizeof(Stored)) {
      Stored stored;
      std::memcpy(&stored, row, sizeof(Stored));
      const float out = stored.to_float();
      stored = Stored::from_float(out + missed * (value[x] - out));
      std::memcpy(row, &stored, sizeof(Stored));
    }
  });
  if (item.lse != nullptr) item.lse[head * item.lse_stride] -= std::log1p(-missed);
}

}  // namespace

void add_rest(transfer::Stream& stream, const transfer::KvGeometry& kv, const RestBatch& batch) {
  const auto wanted = [](const RestItem& item) { return item.value != nullptr; };
  if (std::none_of(batch.items, batch.items + batch.count, wanted)) return;
  if constexpr (transfer::kWithCuda) {
    if (stream.native() != nullptr) return cuda::add_rest(stream.native(), kv, batch);
  }
  stream.run([=] {
    for (int row = 0; row < batch.count; ++row) {
      if (batch[row].value == nullptr) continue;
      for (int head = 0; head < kv.query_heads; ++head) add_rest_to(batch[row], kv, head);
    }
  });
}

}  // namespace kvtier::attention
