#pragma once

#include "scoring/selector.h"

#include <cstddef>
#include <cstdint>

/// The two implementations behind scoring/selector.h.
namespace kvtier::scoring {

/// Memory of a `Selector`, all on the device, strides by `limits`.
struct SelectorWorkspace {
  SelectorLimits limits;
  QueryTables tables;         ///< Written by build_query_tables before `select`.
  QueryTables coarse_tables;  ///< The same of the first of two phases.
  float* scores = nullptr;    ///< `[queries][query_heads][max_tokens]`
  float* combined = nullptr;  ///< `[queries][kv_heads][max_tokens]`, per-KV-head scores.
  std::uint16_t* token_mask =
      nullptr;                   ///< `[queries][kv_heads][max_tokens]`, bit h: head h chose it.
  std::byte* scratch = nullptr;  ///< `scratch_bytes(limits)` bytes, 256-byte aligned.
  float* rest_logs = nullptr;    ///< `[queries][query_heads]`, ln of the mass left out; of the CPU.
  transfer::SelectionView selection;  ///< What `select` and `adopt` fill.
};

namespace cpu {
[[nodiscard]] std::size_t scratch_bytes(const SelectorLimits& limits);
/// Scores (one estimator), combines heads if asked, finds each query's k-th best, writes the
/// selection.
void select(const SelectRequest& request, const SelectorWorkspace& workspace,
            const RecallParams& recall_params);
void adopt(const SelectRequest& request, const SelectorWorkspace& workspace, const IdTensor& ids,
           const IdFloats& bias);
void export_ids(const SelectRequest& request, const SelectorWorkspace& workspace,
                const IdTensor& out, const IdFloats& bias);
void export_scores(const SelectRequest& request, const SelectorWorkspace& workspace,
                   const IdTensor& ids, const IdFloats& out);
}  // namespace cpu

namespace cuda {  // `stream` is a cudaStream_t
[[nodiscard]] std::size_t scratch_bytes(const SelectorLimits& limits);
/// The first bytes of the scratch memory, which must be zero before it is used.
[[nodiscard]] std::size_t zeroed_bytes(const SelectorLimits& limits);
/// A lease of the current device, of as many as leave an SM free (docs/decisions/0013).
[[nodiscard]] ExchangeLease lease_exchange();
/// `part`: all queries, or some of them where the plan says so. Two parts may run at a time.
void select(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
            const RecallParams& recall_params, const SelectionPlan& plan, const QueryPart& part);
void export_missed(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
                   const MissedBatch& batch, const SelectionPlan& plan);
void adopt(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
           const IdTensor& ids, const IdFloats& bias);
void export_ids(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
                const IdTensor& out, const IdFloats& bias);
void export_scores(void* stream, const SelectRequest& request, const SelectorWorkspace& workspace,
                   const IdTensor& ids, const IdFloats& out);
}  // namespace cuda

}  // namespace kvtier::scoring
