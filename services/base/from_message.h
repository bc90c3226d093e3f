#pragma once

#include "kvtier/config.h"
#include "kvtier/engine.h"
#include "kvtier/tensor.h"
#include "kvtier/v1/session.pb.h"

#include "services/base/device_regions.h"
#include "services/base/service_error.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// From messages to the types of the library. Every function throws `ServiceError` with
/// the path of the field; none allocates by a number that a client sent before the number is
/// checked.
namespace kvtier::services {

/// Returns a * b, or nothing when that does not fit or a factor is negative. The one place where
/// extents are multiplied.
[[nodiscard]] std::optional<std::int64_t> checked_product(std::int64_t a, std::int64_t b) noexcept;

/// Views the bytes of a message; checks rank, extents and that `data` has the bytes of the shape.
/// Valid as long as `tensor` is.
[[nodiscard]] TensorView view_of(const v1::Tensor& tensor, const std::string& field);

/// Bytes of a tensor: of its data, or of its shape where it lies in device memory. Throws as
/// `view_of`.
[[nodiscard]] std::uint64_t bytes_of(const v1::Tensor& tensor, const std::string& field);

/// The device memory that tensors of one call lie in: it stays mapped as long as this lives.
class UsedRegions {
 public:
  explicit UsedRegions(const DeviceRegions& regions) : regions_(regions) {}

  /// Throws NOT_FOUND for a region that is none, and unless `bytes` at `place` lie within it.
  [[nodiscard]] std::byte* at(const v1::DeviceMemory& place, std::int64_t bytes,
                              const std::string& field);

 private:
  const DeviceRegions& regions_;
  std::vector<std::shared_ptr<const DeviceRegion>> used_;
};

/// As `view_of`, of bytes that may lie in device memory.
[[nodiscard]] TensorView view_of(const v1::Tensor& tensor, const std::string& field,
                                 UsedRegions& regions);

/// As `view_of`, of `[tokens, heads, head_dim]` floats with 1 to `max_tokens` tokens.
[[nodiscard]] TensorView tokens_of(const v1::Tensor& tensor, const std::string& field, int heads,
                                   int head_dim, std::int64_t max_tokens, UsedRegions& regions);

/// As `view_of`, of int32 `[heads, n]` with at least one id per head.
[[nodiscard]] TensorView ids_of(const v1::Tensor& tensor, const std::string& field, int heads);

/// Shapes `tensor` and returns its memory, zeroed. Extents are the server's own.
[[nodiscard]] MutableTensorView make_tensor(v1::Tensor& tensor, DType dtype,
                                            std::initializer_list<std::int64_t> shape);
/// As `make_tensor`, at `place`, which the tensor then names.
[[nodiscard]] MutableTensorView place_tensor(v1::Tensor& tensor, const v1::DeviceMemory& place,
                                             DType dtype, std::initializer_list<std::int64_t> shape,
                                             const std::string& field, UsedRegions& regions);

[[nodiscard]] ModelConfig model_of(const v1::Geometry& geometry, const std::string& field);
[[nodiscard]] SketchConfig sketch_of(const v1::Sketch& sketch, const std::string& field);

/// Returns `base` with what `options` gives, as retrieval.proto says. Checked.
[[nodiscard]] RetrievalConfig retrieval_of(const v1::RetrievalOptions& options,
                                           const RetrievalConfig& base, const std::string& field);

/// Options of one call. `retrieval` outlives its use in `options`.
struct CallOptions {
  AttendOptions options;
  RetrievalConfig retrieval;

  CallOptions(const v1::AttendOptions& message, const RetrievalConfig& session_default);
  CallOptions(const CallOptions&) = delete;  // options points to retrieval
  CallOptions& operator=(const CallOptions&) = delete;
};

/// Fills the status of a batch's item that failed.
void set_status(const ServiceError& error, v1::ItemStatus& status);

/// Returns the items of a page: `asked`, or 100 for 0. Throws INVALID_ARGUMENT outside 0 to 1000.
[[nodiscard]] int page_size_of(int asked);
/// Returns where a page starts: 0 for an empty token. Throws INVALID_ARGUMENT for one that the
/// server has not made.
[[nodiscard]] std::uint32_t page_start_of(const std::string& token);

}  // namespace kvtier::services
