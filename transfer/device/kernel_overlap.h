#pragma once

namespace kvtier::transfer {

/// Whether a CUDA kernel may start before the one ahead of it in its stream has ended
/// (programmatic dependent launch, docs/notes/overlap.md). It holds for launches from then on, of
/// the whole process; a captured graph keeps what held at its capture. Results are the same bit for
/// bit. Meant for tests, and to find out whether a fault comes from the overlap. At first it is on,
/// unless the environment variable KVTIER_KERNEL_OVERLAP is 0.
void set_kernel_overlap(bool on) noexcept;
[[nodiscard]] bool kernel_overlap() noexcept;

}  // namespace kvtier::transfer
