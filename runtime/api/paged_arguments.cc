#include "runtime/api/paged_arguments.h"

#include "hashing/sketch.h"
#include "include/types/failure.h"
#include "runtime/api/arguments.h"

#include <bit>
#include <limits>
#include <string>

namespace kvtier {

std::vector<std::string> PagedConfig::validate() const {
  Config engine;
  engine.model = model;
  engine.retrieval = retrieval;
  engine.memory.max_batch_rows = max_batch_rows;
  std::vector<std::string> of_engine = engine.validate();
  for (std::string& problem : of_engine) {
    const std::string memory = "memory.";
    if (problem.starts_with(memory)) problem.erase(0, memory.size());
  }
  Problems problems;
  problems.append("", of_engine);
  problems.require(retrieval.estimator == Estimator::kNormAware, "retrieval.estimator",
                   "norm_aware over pages of the caller", "another");
  problems.require(retrieval.query_bits == 4 || retrieval.query_bits == 8, "retrieval.query_bits",
                   "4 or 8 over pages of the caller", retrieval.query_bits);
  problems.require(retrieval.selection != Selection::kPerQueryHead, "retrieval.selection",
                   "per_sequence or per_kv_head over pages of the caller", "per_query_head");
  problems.require(retrieval.error_target == 0.0, "retrieval.error_target",
                   "0 over pages of the caller", retrieval.error_target);
  problems.require(retrieval.coarse_bits == 0, "retrieval.coarse_bits",
                   "0 over pages of the caller", retrieval.coarse_bits);
  for (std::size_t i = 0; i < model.layer_options.size(); ++i) {
    problems.require(model.layer_options[i].mode == LayerMode::kSparse, "model.layer_options",
                     "sparse layers alone over pages of the caller",
                     join("another mode at layer ", i));
  }
  const bool fits = block_tokens >= 16 && block_tokens <= hashing::kBlockTokens &&
                    std::has_single_bit(static_cast<unsigned>(block_tokens));
  problems.require(fits, "block_tokens", "a power of two from 16 to 1024", block_tokens);
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  problems.require(num_blocks >= 1 && (!fits || num_blocks <= kMost / block_tokens), "num_blocks",
                   "at least 1, and fewer than 2^31 slots", num_blocks);
  problems.require(max_tokens >= 1 && max_tokens <= kMost, "max_tokens", "1..2147483647",
                   max_tokens);
  return problems.take();
}

}  // namespace kvtier

namespace kvtier::runtime {

namespace {

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += extent < 0 ? "n" : std::to_string(extent);
  }
  return text + "]";
}

/// -1 in `shape` stands for any extent of at least 1.
void check_tensor(const PagedShape& paged, const std::string& name, const TensorView& tensor,
                  const std::string& dtypes, bool dtype_fits,
                  std::initializer_list<std::int64_t> shape) {
  bool same = !tensor.empty() && dtype_fits && tensor.rank == static_cast<int>(shape.size());
  std::size_t dim = 0;
  for (const std::int64_t extent : shape) {
    same = same && (extent < 0 ? tensor.shape[dim] >= 1 : tensor.shape[dim] == extent);
    ++dim;
  }
  if (!same) {
    throw_invalid(name, join(dtypes, " ", shape_text(shape)),
                  tensor.empty() ? "none" : describe(tensor));
  }
  check_strides(name, tensor);
  if (paged.backend == Backend::kCuda && tensor.space != MemorySpace::kDevice) {
    throw_invalid(name, "device memory", "host memory");
  }
}

void check_floats(const PagedShape& paged, const std::string& name, const TensorView& tensor,
                  std::initializer_list<std::int64_t> shape) {
  check_tensor(paged, name, tensor, "fp32, fp16 or bf16", is_float(tensor.dtype), shape);
}

void check_exact(const PagedShape& paged, const std::string& name, const TensorView& tensor,
                 DType dtype, std::initializer_list<std::int64_t> shape) {
  check_tensor(paged, name, tensor, std::string(dtype_name(dtype)), tensor.dtype == dtype, shape);
}

void check_cache(const PagedShape& paged, const std::string& name, const TensorView& tensor) {
  const ModelConfig& model = paged.config.model;
  check_exact(paged, name, tensor, model.kv_dtype,
              {paged.config.num_blocks, paged.config.block_tokens, model.kv_heads, model.head_dim});
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (address % 16 != 0) {
    throw_invalid(name, "an address that is a multiple of 16 bytes",
                  join(address % 16, " beyond one"));
  }
  for (std::size_t i = 0; i < 3; ++i) {
    if (tensor.strides[i] % 8 != 0) {
      throw_invalid(name, "strides that are multiples of 8 elements",
                    join("stride ", tensor.strides[i]));
    }
  }
}

}  // namespace

void PagedShape::check_stream(StreamRef stream) const {
  if (stream.given() && backend == Backend::kCpu) {
    throw_invalid("stream", "none on the CPU backend", "a stream");
  }
}

std::int64_t PagedShape::check_store(const TensorView& keys, const TensorView& values,
                                     const TensorView& slots) const {
  const ModelConfig& model = config.model;
  check_floats(*this, "keys", keys, {-1, model.kv_heads, model.head_dim});
  check_floats(*this, "values", values, {keys.shape[0], model.kv_heads, model.head_dim});
  check_exact(*this, "slots", slots, DType::kInt32, {keys.shape[0]});
  return keys.shape[0];
}

std::int64_t PagedShape::check_batch(const PagedBatch& batch, const TensorView& query) const {
  if (batch.max_length < 0 || batch.max_length > config.max_tokens) {
    throw_invalid("max_length", join("0..", config.max_tokens, " (max_tokens)"), batch.max_length);
  }
  check_floats(*this, "query", query, {-1, config.model.query_heads, config.model.head_dim});
  const std::int64_t sequences = query.shape[0];
  check_exact(*this, "blocks", batch.blocks, DType::kInt32, {sequences, -1});
  check_exact(*this, "lengths", batch.lengths, DType::kInt32, {sequences});
  const std::int64_t length = max_length(batch);
  const std::int64_t least = (length + config.block_tokens - 1) / config.block_tokens;
  if (batch.blocks.shape[1] < least) {
    throw_invalid("blocks",
                  join(least, " ids or more a sequence, for ", length, " tokens (max_length)"),
                  batch.blocks.shape[1]);
  }
  return sequences;
}

void PagedShape::check_select(std::int64_t sequences, const PagedSelectOutputs& outputs,
                              std::int64_t bound) const {
  const std::int64_t heads = config.model.num_sets(config.retrieval.selection);
  check_exact(*this, "ids", outputs.ids, DType::kInt32, {sequences, heads, -1});
  if (outputs.ids.shape[2] < bound) {
    throw_invalid("ids", join(bound, " or more a set, which a query may attend"),
                  outputs.ids.shape[2]);
  }
  if (outputs.bias.empty()) return;
  if (config.retrieval.rule != SelectionRule::kPriority) {
    throw_invalid("bias", "none without the priority rule", describe(outputs.bias));
  }
  check_exact(*this, "bias", outputs.bias, DType::kFloat32,
              {sequences, heads, outputs.ids.shape[2]});
}

void PagedShape::check_attend(std::int64_t sequences, const PagedLayer& cache,
                              const PagedAttendOutputs& outputs) const {
  const ModelConfig& model = config.model;
  check_cache(*this, "cache.keys", cache.keys);
  check_cache(*this, "cache.values", cache.values);
  check_floats(*this, "out", outputs.out, {sequences, model.query_heads, model.head_dim});
  if (outputs.lse.empty()) return;
  check_exact(*this, "lse", outputs.lse, DType::kFloat32, {sequences, model.query_heads});
}

}  // namespace kvtier::runtime
