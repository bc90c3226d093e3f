#include "runtime/engine/workspace.h"

namespace kvtier::runtime {

Workspace::Workspace(transfer::Device& device, const transfer::KvGeometry& kv,
                     const WorkspacePlan& plan)
    : batch_queries(plan.selector.num_queries),
      append_tokens(plan.append_tokens),
      staged_rows(plan.selector.staged_rows),
      selector(device, plan.selector),
      flash(device, plan.flash),
      packed(device.allocate(transfer::Space::kDevice, plan.packed_bytes)),
      queries(device.allocate(transfer::Space::kDevice, plan.query_bytes)),
      staging(device),
      device_(device),
      kv_heads_(kv.kv_heads),
      row_bytes_(kv.row_bytes()) {}

std::byte* Workspace::read_back(std::size_t bytes) {
  if (read_back_.bytes() < bytes) {
    read_back_ = device_.allocate(transfer::Space::kPinnedHost, 2 * bytes);
  }
  return read_back_.data();
}

hashing::PackedRows Workspace::packed_rows() const {
  std::byte* const squares = packed.data() + append_tokens * kv_heads_ * row_bytes_;
  return {packed.data(), reinterpret_cast<transfer::RowSquares*>(squares)};
}

std::int64_t Workspace::given_tokens() const {
  return append_tokens * row_bytes_ / static_cast<std::int64_t>(sizeof(transfer::RowSquares));
}

}  // namespace kvtier::runtime
