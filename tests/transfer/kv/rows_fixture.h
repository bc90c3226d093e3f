#pragma once

#include "support/backend_fixture.h"
#include "tests/transfer/device/reference_round.h"
#include "transfer/kv/rows.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace kvtier::transfer {

/// A host tensor `[tokens, heads, head_dim]` with gaps between heads and tokens, and what it holds.
struct HostTensor {
  DType dtype = DType::kFloat32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::vector<std::byte> bytes;

  HostTensor(DType type, std::int64_t tokens, int heads, int head_dim, std::int64_t head_gap,
             std::int64_t token_gap)
      : dtype(type),
        token_stride(heads * (head_dim + head_gap) + token_gap),
        head_stride(head_dim + head_gap),
        // The gaps are NaN in every dtype.
        bytes(static_cast<std::size_t>(tokens * token_stride) * dtype_bytes(type),
              std::byte{0xFF}) {}

  [[nodiscard]] std::size_t offset(std::int64_t token, std::int64_t head, std::int64_t i) const {
    return static_cast<std::size_t>(token * token_stride + head * head_stride + i) *
           dtype_bytes(dtype);
  }
  void set(std::int64_t token, std::int64_t head, std::int64_t i, double value) {
    if (dtype == DType::kFloat32) {
      const auto narrow = static_cast<float>(value);
      std::memcpy(&bytes[offset(token, head, i)], &narrow, 4);
    } else {
      const std::uint16_t bits = testing::reference_bits(value, dtype);
      std::memcpy(&bytes[offset(token, head, i)], &bits, 2);
    }
  }
  [[nodiscard]] double get(std::int64_t token, std::int64_t head, std::int64_t i) const {
    if (dtype == DType::kFloat32) {
      float value = 0;
      std::memcpy(&value, &bytes[offset(token, head, i)], 4);
      return static_cast<double>(value);
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, &bytes[offset(token, head, i)], 2);
    return testing::reference_value(bits, dtype);
  }
  [[nodiscard]] TokenTensor view(const void* data) const {
    return {.data = data, .dtype = dtype, .token_stride = token_stride, .head_stride = head_stride};
  }
};

inline HostTensor random_tensor(std::mt19937& random, DType dtype, std::int64_t tokens, int heads,
                                int head_dim, std::int64_t head_gap, std::int64_t token_gap) {
  HostTensor tensor(dtype, tokens, heads, head_dim, head_gap, token_gap);
  std::normal_distribution<double> normal(0.0, 3.0);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (int head = 0; head < heads; ++head) {
      for (int i = 0; i < head_dim; ++i) tensor.set(token, head, i, normal(random));
    }
  }
  return tensor;
}

/// One sequence on the device, and beside it the bytes that it ought to hold, written token by
/// token in the plainest way.
struct SequenceUnderTest {
  Buffer pages, table, sink, ring, counters;
  std::int64_t num_pages = 0;
  std::vector<std::size_t> page_order;  ///< Table entry to place in `pages`.
  SequenceView view;

  std::vector<std::uint16_t> expected_pages, expected_sink, expected_ring;
  SequenceCounters expected;
};

class RowsTest : public testing::BackendTest {
 protected:
  static constexpr std::uint16_t kUnwritten = 0xA5A5;

  SequenceUnderTest make_sequence(const KvGeometry& g, std::int64_t capacity) {
    SequenceUnderTest s;
    s.num_pages = (capacity + g.page_tokens - 1) / g.page_tokens;
    const auto page_bytes = static_cast<std::size_t>(g.page_bytes());
    s.pages = device_->allocate(Space::kPinnedHost,
                                static_cast<std::size_t>(s.num_pages + 1) * page_bytes);
    std::memset(s.pages.data(), 0xA5, s.pages.bytes());
    std::vector<std::byte*> addresses;
    for (std::int64_t i = 0; i < s.num_pages; ++i) {
      s.page_order.push_back(static_cast<std::size_t>(s.num_pages - 1 - i));
      addresses.push_back(s.pages.data() + s.page_order.back() * page_bytes);
    }
    s.table = upload(addresses);
    const auto rows = static_cast<std::size_t>(g.row_bytes() / 2 * g.kv_heads);
    s.sink = allocate<std::uint16_t>(rows * static_cast<std::size_t>(g.sink_capacity));
    s.ring = allocate<std::uint16_t>(rows * static_cast<std::size_t>(g.recent_capacity));
    s.expected.capacity = capacity;
    s.counters = upload(std::vector<SequenceCounters>{s.expected});
    s.view = {.pages = s.table.as<const std::byte*>(),
              .sink_rows = s.sink.data(),
              .recent_rows = s.ring.data(),
              .counters = s.counters.as<SequenceCounters>()};
    s.expected_pages.assign(s.pages.bytes() / 2, kUnwritten);
    s.expected_sink.assign(s.sink.bytes() / 2, kUnwritten);
    s.expected_ring.assign(s.ring.bytes() / 2, kUnwritten);
    return s;
  }

  /// The row of one (token, KV head), K then V, each element rounded by definition.
  static std::vector<std::uint16_t> expected_row(const KvGeometry& g, const HostTensor& keys,
                                                 const HostTensor& values, std::int64_t token,
                                                 int head) {
    std::vector<std::uint16_t> row;
    for (const HostTensor* tensor : {&keys, &values}) {
      for (int i = 0; i < g.head_dim; ++i) {
        row.push_back(testing::reference_bits(tensor->get(token, head, i), g.dtype));
      }
    }
    return row;
  }

  /// What an append does to a sequence, token by token.
  static void expect_append(const KvGeometry& g, SequenceUnderTest& s, const HostTensor& keys,
                            const HostTensor& values, std::int64_t tokens) {
    const std::int64_t row_elements = g.row_bytes() / 2;
    const auto put = [&](std::vector<std::uint16_t>& where, std::int64_t row_index,
                         const std::vector<std::uint16_t>& row) {
      std::copy(row.begin(), row.end(), where.begin() + row_index * row_elements);
    };
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::int64_t token = s.expected.length;
      if (token >= s.expected.capacity) {
        ++s.expected.overflow;
        continue;
      }
      for (int head = 0; head < g.kv_heads; ++head) {
        const std::vector<std::uint16_t> row = expected_row(g, keys, values, i, head);
        const auto page = static_cast<std::int64_t>(
            s.page_order[static_cast<std::size_t>(token / g.page_tokens)]);
        put(s.expected_pages, (page * g.kv_heads + head) * g.page_tokens + token % g.page_tokens,
            row);
        if (token < g.sink_capacity) put(s.expected_sink, head * g.sink_capacity + token, row);
        if (g.recent_capacity > 0) {
          put(s.expected_ring, head * g.recent_capacity + token % g.recent_capacity, row);
        }
      }
      ++s.expected.length;
      const std::int64_t in_ring = s.expected.length - s.expected.resident_begin;
      if (in_ring > g.recent_capacity) ++s.expected.resident_begin;
    }
  }

  void expect_state(SequenceUnderTest& s) {
    EXPECT_EQ(download<std::uint16_t>(s.pages.data(), s.expected_pages.size()), s.expected_pages);
    EXPECT_EQ(download<std::uint16_t>(s.sink.data(), s.expected_sink.size()), s.expected_sink);
    EXPECT_EQ(download<std::uint16_t>(s.ring.data(), s.expected_ring.size()), s.expected_ring);
    expect_counters(s);
  }

  void expect_counters(const SequenceUnderTest& s) {
    const SequenceCounters found = download<SequenceCounters>(s.counters.data(), 1)[0];
    EXPECT_EQ(found.length, s.expected.length);
    EXPECT_EQ(found.resident_begin, s.expected.resident_begin);
    EXPECT_EQ(found.capacity, s.expected.capacity);
    EXPECT_EQ(found.overflow, s.expected.overflow);
  }

  /// Flags in memory that the host and kernels share.
  StepFlags* make_flags() {
    flags_ = device_->allocate(Space::kPinnedHost, sizeof(StepFlags));
    return ::new (static_cast<void*>(flags_.data())) StepFlags{};
  }

  std::mt19937 random_{kSeed};
  static constexpr unsigned kSeed = 20240607;

 private:
  Buffer flags_;
};

inline KvGeometry geometry(int kv_heads, int head_dim, int page_tokens, int sink, int recent,
                           DType dtype = DType::kBFloat16) {
  return {.kv_heads = kv_heads,
          .group = 2,
          .head_dim = head_dim,
          .page_tokens = page_tokens,
          .sink_capacity = sink,
          .recent_capacity = recent,
          .dtype = dtype};
}

inline std::string describe_geometry(const KvGeometry& g) {
  return "kv_heads " + std::to_string(g.kv_heads) + ", head_dim " + std::to_string(g.head_dim) +
         ", page_tokens " + std::to_string(g.page_tokens) + ", sink " +
         std::to_string(g.sink_capacity) + ", recent " + std::to_string(g.recent_capacity) + ", " +
         std::string(dtype_name(g.dtype));
}

}  // namespace kvtier::transfer
