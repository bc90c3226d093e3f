#include "include/types/float16.h"
#include "llama/blas.h"
#include "llama/compute.h"
#include "llama/simd_loops.h"
#include "llama/threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <vector>

namespace kvtier::llama {
namespace {

constexpr std::int64_t kTileRows = 128;  // Of a projection's output, one task's share.
constexpr std::int64_t kTileColumns = 256;
constexpr std::int64_t kQueryTile = 64;        // Query tokens of one attention task.
constexpr std::int64_t kKeyBlock = 512;        // 64 tokens x 4 heads x 512 logits fit a 2 MB L2.
constexpr std::int64_t kSerialWork = 1 << 22;  // Multiply-adds below which threads cost more.

/// c `[m, n]` = a `[m, k]` * b^T `[n, k]`, with row strides.
void multiply_transposed(std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
                         std::int64_t a_stride, const float* b, std::int64_t b_stride, float* c,
                         std::int64_t c_stride) {
  multiply({.m = m,
            .n = n,
            .k = k,
            .a = a,
            .a_stride = a_stride,
            .b = b,
            .b_stride = b_stride,
            .b_transposed = true,
            .c = c,
            .c_stride = c_stride});
}

/// One (KV head, query tile) of prefill attention; rows are (token, query head of the group).
class AttentionTile {
 public:
  AttentionTile(const PrefillAttention& in, std::int64_t head, std::int64_t begin)
      : in_(in),
        head_(head),
        begin_(begin),
        group_(in.query_heads / in.kv_heads),
        rows_(std::min(kQueryTile, in.tokens - begin) * group_) {}

  void run() {
    query_.resize(index(rows_ * d()));
    out_.resize(query_.size());
    logits_.resize(index(rows_ * kKeyBlock));
    states_.resize(index(rows_), {-std::numeric_limits<float>::infinity(), 0.0F});
    for (std::int64_t row = 0; row < rows_; ++row) {
      const float* source = in_.query + offset(row);
      for (std::int64_t i = 0; i < d(); ++i) query_[index(row * d() + i)] = source[i] * in_.scale;
    }
    const std::int64_t visible = in_.first_position + begin_ + rows_ / group_;
    for (std::int64_t key = 0; key < visible; key += kKeyBlock) {
      add_block(key, std::min(kKeyBlock, visible - key));
    }
    for (std::int64_t row = 0; row < rows_; ++row) {
      const float* source = &out_[index(row * d())];
      const float factor = 1.0F / states_[index(row)].sum;
      std::transform(source, source + d(), in_.out + offset(row),
                     [factor](float x) { return x * factor; });
    }
  }

 private:
  [[nodiscard]] std::int64_t d() const { return in_.head_dim; }
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::int64_t offset(std::int64_t row) const {
    const std::int64_t token = begin_ + row / group_;
    return (token * in_.query_heads + head_ * group_ + row % group_) * d();
  }

  void add_block(std::int64_t key, std::int64_t width) {
    const float* keys = in_.keys + (head_ * in_.capacity + key) * d();
    const float* values = in_.values + (head_ * in_.capacity + key) * d();
    multiply_transposed(rows_, width, d(), query_.data(), d(), keys, d(), logits_.data(),
                        kKeyBlock);
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t seen = in_.first_position + begin_ + row / group_ + 1 - key;
      const std::int64_t valid = std::clamp<std::int64_t>(seen, 0, width);
      const float factor =
          softmax_block(&logits_[index(row * kKeyBlock)], valid, width, states_[index(row)]);
      if (factor != 1.0F) scale_row(&out_[index(row * d())], d(), factor);
    }
    multiply({.m = rows_,
              .n = d(),
              .k = width,
              .a = logits_.data(),
              .a_stride = kKeyBlock,
              .b = values,
              .b_stride = d(),
              .c = out_.data(),
              .c_stride = d(),
              .beta = 1.0F});
  }

  const PrefillAttention& in_;
  std::int64_t head_, begin_, group_, rows_;
  std::vector<float> query_, out_, logits_;
  std::vector<SoftmaxState> states_;
};

class CpuCompute final : public Compute {
 public:
  /// BLAS gets one thread: work is divided here, so its threads never meet kvtier's.
  explicit CpuCompute(int threads)
      : threads_(threads > 0 ? threads : static_cast<int>(std::thread::hardware_concurrency())) {
    load_blas();
  }

  [[nodiscard]] MemorySpace space() const noexcept override { return MemorySpace::kHost; }

  [[nodiscard]] StreamRef stream() const noexcept override { return {}; }
  void wait() override {}

  [[nodiscard]] Buffer allocate(std::size_t bytes) override {
    constexpr std::align_val_t kAlignment{64};
    void* memory = ::operator new(std::max<std::size_t>(bytes, 1), kAlignment);
    return Buffer(std::shared_ptr<void>(memory, [](void* p) { ::operator delete(p, kAlignment); }));
  }

  void upload(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }

  void gather(const Matrix& table, const std::int32_t* ids, std::int64_t count,
              float* out) override {
    for (std::int64_t i = 0; i < count; ++i) {
      std::copy_n(table.buffer.floats() + ids[i] * table.columns, table.columns,
                  out + i * table.columns);
    }
  }

  void rms_norm(const float* x, const Vector& weight, std::int64_t rows, std::int64_t columns,
                float eps, float* out) override {
    for (std::int64_t row = 0; row < rows; ++row) {
      const float mean = sum_of_squares(x + row * columns, columns) / static_cast<float>(columns);
      scale_by(x + row * columns, weight.floats(), 1.0F / std::sqrt(mean + eps), columns,
               out + row * columns);
    }
  }

  void linear(const float* x, std::int64_t rows, const Matrix& weight, const Vector& bias,
              float* out) override {
    const std::int64_t columns = weight.rows;
    const std::int64_t depth = weight.columns;
    const bool serial = rows * columns * depth < kSerialWork;
    const std::int64_t tile_columns = serial ? columns : kTileColumns;
    const std::int64_t across = (columns + tile_columns - 1) / tile_columns;
    const std::int64_t down = (rows + kTileRows - 1) / kTileRows;
    run_parallel(serial ? 1 : threads_, across * down, [&](std::int64_t tile) {
      const std::int64_t row = tile / across * kTileRows;
      const std::int64_t column = tile % across * tile_columns;
      multiply_transposed(std::min(kTileRows, rows - row), std::min(tile_columns, columns - column),
                          depth, x + row * depth, depth, weight.buffer.floats() + column * depth,
                          depth, out + row * columns + column, columns);
    });
    if (bias.empty()) return;
    for (std::int64_t row = 0; row < rows; ++row) {
      add_rows(out + row * columns, bias.floats(), columns);
    }
  }

  void rotate(float* x, std::int64_t tokens, int heads, int head_dim, const float* table) override {
    const int half = head_dim / 2;
    for (std::int64_t row = 0; row < tokens * heads; ++row) {
      const float* cosine = table + row / heads * head_dim;
      const float* sine = cosine + half;
      float* low = x + row * head_dim;
      float* high = low + half;
      for (int i = 0; i < half; ++i) {
        const float a = low[i];
        const float b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
      }
    }
  }

  void add(float* x, const float* y, std::int64_t count) override { add_rows(x, y, count); }
  void swiglu(float* gate, const float* up, std::int64_t count) override {
    silu_times(gate, up, count);
  }
  void round(const float* x, std::int64_t count, std::uint16_t* out) override {
    std::transform(x, x + count, out, [](float each) { return BFloat16::from_float(each).bits; });
  }

  void scatter_heads(const std::uint16_t* rows, std::int64_t tokens, int heads, int head_dim,
                     std::int64_t first, std::int64_t capacity, float* out) override {
    for (std::int64_t row = 0; row < tokens * heads; ++row) {
      const std::int64_t target = row % heads * capacity + first + row / heads;
      std::transform(rows + row * head_dim, rows + (row + 1) * head_dim, out + target * head_dim,
                     [](std::uint16_t each) { return BFloat16{each}.to_float(); });
    }
  }

  void attend(const PrefillAttention& inputs) override {
    const std::int64_t tiles = (inputs.tokens + kQueryTile - 1) / kQueryTile;
    run_parallel(threads_, tiles * inputs.kv_heads, [&](std::int64_t task) {
      // Later tiles see more keys: the longest tasks start first.
      const std::int64_t tile = tiles - 1 - task / inputs.kv_heads;
      AttentionTile(inputs, task % inputs.kv_heads, tile * kQueryTile).run();
    });
  }

 private:
  int threads_;
};

}  // namespace

std::unique_ptr<Compute> make_cpu_compute(int threads) {
  return std::make_unique<CpuCompute>(threads);
}

}  // namespace kvtier::llama
