#pragma once

#include "kvtier/config.h"

#include "transfer/device/device.h"
#include "transfer/device/host_device.h"

#include <cstdint>
#include <vector>

namespace kvtier::hashing {

/// The planes on the device, by value to kernels.
struct PlanesView {
  const std::uint16_t* bf16 = nullptr;  ///< `[num_planes, head_dim]`.
  const float* transposed =
      nullptr;  ///< The same values, `[head_dim, stride]`, zero past num_planes.
  int num_planes = 0;
  int stride = 0;  ///< num_planes rounded up to 16.
  int head_dim = 0;
  int code_bits = 0;  ///< Bits of a coordinate of a scalar code; 0: a bit for the sign of a plane.

  /// Bits of a sketch that is made with these planes.
  KVTIER_HOST_DEVICE int sketch_bits() const {
    return num_planes * (code_bits > 0 ? code_bits : 1);
  }
};

/// The random hyperplanes of a sketch: made once on the host, rounded to bf16, uploaded, never
/// regenerated on a device, so that every backend has the same bits.
///
/// Entry (plane, 4 b + i) is the i-th normal of Philox4x32-10 with key = seed and counter = (plane,
/// b, 0, 0), by Box-Muller in double: words (0, 1) give normals 0 and 1, words (2, 3) normals 2 and
/// 3, with uniforms (word + 0.5) / 2^32, normal_even = sqrt(-2 ln u0) cos(2 pi u1), normal_odd the
/// sine. `kOrthogonal` takes blocks of head_dim rows, orthonormalises them in order (modified
/// Gram-Schmidt, twice, in double) and scales each row to length sqrt(head_dim). The first M planes
/// do not depend on the total.
class Planes {
 public:
  /// Generates and uploads. Throws `kResourceExhausted` when device memory is short.
  Planes(transfer::Device& device, const SketchConfig& config, int head_dim);

  [[nodiscard]] PlanesView view() const noexcept;
  [[nodiscard]] const SketchConfig& config() const noexcept { return config_; }
  /// Returns bf16 bits, `[planes_needed, head_dim]`, on the host.
  [[nodiscard]] const std::vector<std::uint16_t>& host_bits() const noexcept { return host_; }

 private:
  SketchConfig config_;
  int head_dim_;
  std::vector<std::uint16_t> host_;
  transfer::Buffer device_;
};

/// Generates the bf16 bits of planes on the host, `[planes_needed, head_dim]`.
[[nodiscard]] std::vector<std::uint16_t> generate_planes(const SketchConfig& config, int head_dim);

}  // namespace kvtier::hashing
