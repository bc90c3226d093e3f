#pragma once

#include "kvtier/tensor.h"

#include "transfer/device/device.h"
#include "transfer/kv/rows.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace kvtier::runtime {

/// Moves host tensors of synchronous calls to a GPU and back, through pinned memory. On the CPU
/// backend every tensor is used in place.
///
/// Use: `input` and `output` for each tensor slice of a chunk, enqueue the work, then `finish`,
/// which waits and writes the host outputs. Buffers grow as needed and are kept.
class HostStaging {
 public:
  explicit HostStaging(transfer::Device& device);

  /// A slice of a tensor `[tokens, heads, n]`, readable and writable by kernels.
  struct Slice {
    void* data = nullptr;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;

    [[nodiscard]] transfer::TokenTensor tokens(DType dtype) const {
      return {data, dtype, token_stride, head_stride};
    }
  };

  /// Makes tokens [begin, begin + count) of `tensor` readable by kernels.
  Slice input(transfer::Stream& stream, const TensorView& tensor, std::int64_t begin,
              std::int64_t count);
  /// Gives memory for tokens [begin, begin + count) of `tensor`, written back by `finish`.
  Slice output(const MutableTensorView& tensor, std::int64_t begin, std::int64_t count);
  /// Waits for the stream and writes the outputs, when there is anything of the host's to wait for.
  void finish(transfer::Stream& stream);
  /// Forgets the tensors of a call that ended by an error before `finish`.
  void discard() noexcept;

 private:
  struct Block {
    transfer::Buffer device;
    transfer::Buffer pinned;
  };
  struct Pending {
    MutableTensorView tensor;
    std::int64_t begin = 0;
    std::int64_t count = 0;
    const Block* block = nullptr;
    std::size_t bytes = 0;
  };
  Block& take(std::size_t bytes);

  transfer::Device* device_;
  bool in_place_;
  std::deque<Block> blocks_;  // `pending_` points to them while they grow in number
  std::size_t used_ = 0;
  std::vector<Pending> pending_;
};

}  // namespace kvtier::runtime
