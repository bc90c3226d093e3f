#include "hashing/planes.h"

#include "hashing/philox.h"
#include "hashing/scalar_code.h"
#include "include/types/float16.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <numbers>
#include <span>

namespace kvtier::hashing {

namespace {

constexpr int kNormalsPerBlock = 4;
constexpr int kStrideMultiple = 16;
constexpr std::size_t kAlignment = 256;

int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

std::size_t bits_bytes(int num_planes, int head_dim) {
  const std::size_t bytes =
      static_cast<std::size_t>(num_planes) * static_cast<std::size_t>(head_dim) * 2;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

double uniform(std::uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; }

void box_muller(std::uint32_t word0, std::uint32_t word1, double* normals) {
  const double radius = std::sqrt(-2.0 * std::log(uniform(word0)));
  const double angle = 2.0 * std::numbers::pi * uniform(word1);
  normals[0] = radius * std::cos(angle);
  normals[1] = radius * std::sin(angle);
}

void fill_normals(std::uint64_t seed, int plane, std::span<double> row) {
  const PhiloxKey key = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (std::size_t begin = 0; begin < row.size(); begin += kNormalsPerBlock) {
    const auto block = static_cast<std::uint32_t>(begin / kNormalsPerBlock);
    const PhiloxBlock words = philox4x32({static_cast<std::uint32_t>(plane), block, 0, 0}, key);
    std::array<double, kNormalsPerBlock> normals{};
    box_muller(words[0], words[1], normals.data());
    box_muller(words[2], words[3], normals.data() + 2);
    const std::size_t count = std::min<std::size_t>(kNormalsPerBlock, row.size() - begin);
    std::copy_n(normals.begin(), count, row.begin() + static_cast<std::ptrdiff_t>(begin));
  }
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void scale(std::span<double> row, double factor) {
  for (double& x : row) x *= factor;
}

// Each row is made orthogonal to those before it twice: one pass leaves an error that grows with
// the condition of the block.
void orthonormalise(std::span<double> rows, std::size_t dim) {
  for (std::size_t i = 0; i * dim < rows.size(); ++i) {
    const std::span<double> row = rows.subspan(i * dim, dim);
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t j = 0; j < i; ++j) {
        const std::span<const double> earlier = rows.subspan(j * dim, dim);
        const double projection = dot(row, earlier);
        for (std::size_t x = 0; x < dim; ++x) row[x] -= projection * earlier[x];
      }
      scale(row, 1.0 / std::sqrt(dot(row, row)));
    }
  }
}

}  // namespace

std::vector<std::uint16_t> generate_planes(const SketchConfig& config, int head_dim) {
  assert(config.num_planes > 0 && head_dim > 0);
  const auto dim = static_cast<std::size_t>(head_dim);
  const int count = planes_needed(config, head_dim);
  std::vector<double> rows(static_cast<std::size_t>(count) * dim);
  for (int plane = 0; plane < count; ++plane) {
    fill_normals(config.seed, plane,
                 std::span(rows).subspan(static_cast<std::size_t>(plane) * dim, dim));
  }
  if (config.kind == PlaneKind::kOrthogonal) {
    for (std::size_t begin = 0; begin < rows.size(); begin += dim * dim) {
      const std::span<double> block =
          std::span(rows).subspan(begin, std::min(dim * dim, rows.size() - begin));
      orthonormalise(block, dim);
      scale(block, std::sqrt(static_cast<double>(head_dim)));
    }
  }
  std::vector<std::uint16_t> bits(rows.size());
  std::transform(rows.begin(), rows.end(), bits.begin(),
                 [](double x) { return BFloat16::from_float(static_cast<float>(x)).bits; });
  return bits;
}

Planes::Planes(transfer::Device& device, const SketchConfig& config, int head_dim)
    : config_(config), head_dim_(head_dim), host_(generate_planes(config, head_dim)) {
  const auto dim = static_cast<std::size_t>(head_dim);
  const int count = planes_needed(config, head_dim);
  const auto stride = static_cast<std::size_t>(round_up(count, kStrideMultiple));
  std::vector<float> transposed(dim * stride, 0.0F);
  for (std::size_t i = 0; i < host_.size(); ++i) {
    transposed[i % dim * stride + i / dim] = BFloat16{host_[i]}.to_float();
  }

  const std::size_t offset = bits_bytes(count, head_dim);
  device_ = device.allocate(transfer::Space::kDevice, offset + transposed.size() * sizeof(float));
  const std::array runs = {
      transfer::CopyRun{device_.data(), host_.data(), host_.size() * sizeof(std::uint16_t)},
      transfer::CopyRun{device_.data() + offset, transposed.data(),
                        transposed.size() * sizeof(float)}};
  const auto stream = device.make_stream();
  stream->copy(runs);
  stream->synchronize();
}

PlanesView Planes::view() const noexcept {
  const int count = planes_needed(config_, head_dim_);
  const std::size_t offset = bits_bytes(count, head_dim_);
  return {.bf16 = device_.as<const std::uint16_t>(),
          .transposed = reinterpret_cast<const float*>(device_.data() + offset),
          .num_planes = count,
          .stride = round_up(count, kStrideMultiple),
          .head_dim = head_dim_,
          .code_bits = code_bits(config_, head_dim_)};
}

}  // namespace kvtier::hashing
