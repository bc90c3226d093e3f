#include "runtime/engine/host_staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvtier::runtime {

namespace {

/// The last dimension's length; `[tokens, heads]` tensors count as `[tokens, heads, 1]`.
std::int64_t inner(const TensorView& tensor) { return tensor.rank >= 3 ? tensor.shape[2] : 1; }

std::size_t slice_bytes(const TensorView& tensor, std::int64_t count) {
  return static_cast<std::size_t>(count * tensor.shape[1] * inner(tensor)) *
         dtype_bytes(tensor.dtype);
}

/// Calls `f(offset of a run in the tensor, offset in the dense slice, bytes)` for each (token,
/// head).
template <typename F>
void for_each_run(const TensorView& tensor, std::int64_t begin, std::int64_t count, F&& f) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  const std::int64_t run = inner(tensor) * element;
  std::int64_t dense = 0;
  for (std::int64_t t = begin; t < begin + count; ++t) {
    for (std::int64_t h = 0; h < tensor.shape[1]; ++h) {
      f((t * tensor.strides[0] + h * tensor.strides[1]) * element, dense,
        static_cast<std::size_t>(run));
      dense += run;
    }
  }
}

}  // namespace

HostStaging::HostStaging(transfer::Device& device)
    : device_(&device), in_place_(device.backend() == Backend::kCpu) {}

HostStaging::Block& HostStaging::take(std::size_t bytes) {
  const std::size_t wanted = std::max<std::size_t>(bytes, 256);
  if (used_ == blocks_.size()) blocks_.emplace_back();
  Block& block = blocks_[used_];
  if (block.device.bytes() < wanted) {
    const std::size_t grown = std::max(wanted, 2 * block.device.bytes());
    block = Block{};
    Block fresh;  // a block has both or none, also when the second allocation throws
    fresh.device = device_->allocate(transfer::Space::kDevice, grown);
    fresh.pinned = device_->allocate(transfer::Space::kPinnedHost, grown);
    block = std::move(fresh);
  }
  ++used_;
  return block;
}

HostStaging::Slice HostStaging::input(transfer::Stream& stream, const TensorView& tensor,
                                      std::int64_t begin, std::int64_t count) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  if (in_place_ || tensor.space == MemorySpace::kDevice) {
    // A view of const data becomes a slice that kernels only read.
    auto* base = static_cast<std::byte*>(const_cast<void*>(tensor.data));
    return {base + begin * tensor.strides[0] * element, tensor.strides[0], tensor.strides[1]};
  }
  const std::size_t bytes = slice_bytes(tensor, count);
  Block& block = take(bytes);
  const auto* from = static_cast<const std::byte*>(tensor.data);
  for_each_run(tensor, begin, count, [&](std::int64_t source, std::int64_t dense, std::size_t run) {
    std::memcpy(block.pinned.data() + dense, from + source, run);
  });
  const transfer::CopyRun copy{block.device.data(), block.pinned.data(), bytes};
  stream.copy({&copy, 1});
  return {block.device.data(), tensor.shape[1] * inner(tensor), inner(tensor)};
}

HostStaging::Slice HostStaging::output(const MutableTensorView& tensor, std::int64_t begin,
                                       std::int64_t count) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  if (in_place_ || tensor.space == MemorySpace::kDevice) {
    auto* base = static_cast<std::byte*>(tensor.data);
    return {base + begin * tensor.strides[0] * element, tensor.strides[0], tensor.strides[1]};
  }
  const std::size_t bytes = slice_bytes(tensor, count);
  Block& block = take(bytes);
  pending_.push_back({tensor, begin, count, &block, bytes});
  return {block.device.data(), tensor.shape[1] * inner(tensor), inner(tensor)};
}

void HostStaging::finish(transfer::Stream& stream) {
  if (used_ == 0) return;
  for (const Pending& pending : pending_) {
    const transfer::CopyRun copy{pending.block->pinned.data(), pending.block->device.data(),
                                 pending.bytes};
    stream.copy({&copy, 1});
  }
  stream.synchronize();
  for (const Pending& pending : pending_) {
    auto* to = static_cast<std::byte*>(pending.tensor.data);
    for_each_run(pending.tensor, pending.begin, pending.count,
                 [&](std::int64_t target, std::int64_t dense, std::size_t run) {
                   std::memcpy(to + target, pending.block->pinned.data() + dense, run);
                 });
  }
  discard();
}

void HostStaging::discard() noexcept {
  pending_.clear();
  used_ = 0;
}

}  // namespace kvtier::runtime
