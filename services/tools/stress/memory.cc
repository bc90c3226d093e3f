#include "services/tools/stress/memory.h"

#include "kvtier/engine.h"
#include "kvtier/memory.h"

#include "include/types/failure.h"
#include "services/tools/stress/ingest.h"

#include <algorithm>

namespace kvtier::services {
namespace {

constexpr std::size_t kSpareDeviceBytes = 512 * MiB;  // context and kernels of a GPU

Config base_config(const StressOptions& options) {
  Config config;
  config.model = options.model();
  config.retrieval = options.retrieval();
  config.backend = options.backend;
  config.memory.page_format = options.page_format;
  config.memory.max_session_tokens = session_tokens(options);
  config.memory.max_batch_rows = options.batch;
  if (options.row_cache_rows.value_or(0) > 0)
    config.memory.staging_rows = options.top_k;  // on any backend
  return config;
}

/// What a session takes at its full length, with so many rows in the row cache.
SessionMemory session_need(const StressOptions& options, int rows = 0) {
  return session_memory(base_config(options), session_tokens(options), rows);
}

/// Adds what the children take of which every row is fetched: of each layer the pages that the
/// steps write to, and the page, the sketch block and the next that they are in.
void add_children(const StressOptions& options, MemoryNeed& need) {
  const auto sequences = static_cast<std::size_t>(options.batch);
  const Config config = base_config(options);
  const auto taken = [&](std::int64_t tokens) {
    return session_memory(config, std::min(tokens, config.memory.max_session_tokens));
  };
  const std::int64_t page = config.memory.page_tokens;
  need.pages += sequences * taken(kWarmupSteps + options.steps + page).pages;
  const std::size_t slab = taken(1).sketches;
  need.sketches += 2 * sequences * slab;
  need.tables *= 2;
}

/// The configuration of an engine with these pages and this row cache.
Config pooled_config(const StressOptions& options, const MemoryNeed& need) {
  Config config = base_config(options);
  config.memory.host_bytes = need.pages;
  config.memory.row_cache_bytes = need.row_cache;
  config.memory.row_cache_rows = options.rows_kept(need.backend);
  return config;
}

/// What an engine takes beside sketches and workspace where it keeps factors of int8 rows.
std::size_t factor_bytes(const StressOptions& options, const MemoryNeed& need) {
  Config config = pooled_config(options, need);
  config.memory.device_bytes = SIZE_MAX / 2;
  if (engine_memory(config, need.backend).row_factors == 0) return 0;
  const std::size_t all =
      device_bytes_for(config, need.backend, session_tokens(options), options.batch);
  return all - std::min(all, need.sketches + need.workspace);
}

/// The backend of an engine, which is tried where it is automatic.
Backend backend_in_use(Backend wanted) {
  if (wanted != Backend::kAuto) return wanted;
  Config smallest;
  smallest.memory.host_bytes = 0;
  smallest.memory.max_session_tokens = 1;
  smallest.memory.max_batch_rows = 1;
  return Engine(smallest).backend();
}

/// Returns the workspace of an engine for the run's shape, within a budget if it has room for the
/// least one.
std::size_t workspace_bytes(const StressOptions& options, Backend backend) {
  Config config = base_config(options);
  config.memory.row_cache_bytes = 0;
  config.memory.device_bytes = SIZE_MAX / 2;
  const std::size_t most = engine_memory(config, backend).workspace;
  if (!options.device_budget) return most;
  config.memory.device_bytes = *options.device_budget;
  try {
    return std::min(most, engine_memory(config, backend).workspace);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    // The least, which is more than the budget: `check_memory` refuses that.
    config.memory.device_bytes = SIZE_MAX / 2;
    config.memory.max_batch_rows = 1;
    return std::min(most, engine_memory(config, backend).workspace);
  }
}

std::string counted(std::int64_t number, const char* noun) {
  return std::to_string(number) + " " + noun + (number == 1 ? "" : "s");
}

[[noreturn]] void refuse(const char* what, std::size_t wanted, std::size_t found,
                         const StressOptions& options, const MemoryNeed& need) {
  throw_error(ErrorCode::kResourceExhausted, what, ": expected at least ",
              show_bytes(static_cast<double>(wanted)), ", found ",
              show_bytes(static_cast<double>(found)), "\n", show_memory(options, need));
}

}  // namespace

SyntheticShape synthetic_shape(const StressOptions& options) {
  const ModelConfig model = options.model();
  return {.query_heads = model.query_heads,
          .kv_heads = model.kv_heads,
          .head_dim = model.head_dim,
          .tokens = options.tokens,
          .seed = options.seed};
}

std::int64_t session_tokens(const StressOptions& options) {
  return options.tokens + kWarmupSteps + options.steps;
}

Config engine_config(const StressOptions& options, const MemoryNeed& need) {
  Config config = pooled_config(options, need);
  // Half of the budget bounds the workspace, so a small model's budget is twice that.
  config.memory.device_bytes = options.device_budget.value_or(
      std::max(need.sketches + need.workspace + need.row_factors, 2 * need.workspace));
  if (options.device_budget)
    config.memory.device_bytes -= need.tables + need.row_cache + need.dense;
  return config;
}

Config dense_config(const StressOptions& options, const MemoryNeed& need) {
  Config config = base_config(options);
  config.model.layers = 1;
  config.memory.placement = KvPlacement::kDevice;
  config.memory.device_bytes = need.dense;
  return config;
}

MemoryNeed stored_need(const StressOptions& options) {
  const SessionMemory one = session_need(options);
  const auto sequences = static_cast<std::size_t>(options.batch);
  MemoryNeed need;
  need.pages = sequences * one.pages;
  need.sketches = sequences * one.sketches;
  need.tables = sequences * one.tables;
  return need;
}

std::size_t most_row_cache(const StressOptions& options) {
  Config config = base_config(options);
  config.memory.staging_rows = options.top_k;  // as a GPU has it
  config.memory.device_bytes = SIZE_MAX / 2;
  const int rows = engine_memory(config, Backend::kCpu).row_cache_rows;
  return static_cast<std::size_t>(options.batch) * session_need(options, rows).row_cache;
}

MemoryNeed memory_need(const StressOptions& options) {
  MemoryNeed need = stored_need(options);
  const auto layers = static_cast<std::size_t>(*options.layers);
  const auto sequences = static_cast<std::size_t>(options.batch);
  need.source = ingest_buffer_bytes(options) +
                layers * sequences * LayerSource::bytes(synthetic_shape(options));

  const Backend backend = need.backend = backend_in_use(options.backend);
  need.workspace = workspace_bytes(options, backend);
  need.row_cache = sequences * session_need(options, options.rows_kept(backend)).row_cache;
  if (options.compare_dense) {
    need.dense = 2 * need.workspace + (need.pages + need.sketches) / layers;
  }
  if (need.row_cache > 0) {
    add_children(options, need);
    const std::size_t factors = factor_bytes(options, need);
    // A budget without room for them is no reason to refuse.
    if (options.device_budget.value_or(SIZE_MAX) >= need.device() + factors)
      need.row_factors = factors;
  }
  return need;
}

void check_memory(const StressOptions& options, const MemoryNeed& need,
                  const MemoryAvailable& available) {
  if (options.host_budget && *options.host_budget < need.pages) {
    refuse("host budget", need.pages, *options.host_budget, options, need);
  }
  if (options.device_budget && *options.device_budget < need.device()) {
    refuse("device budget", need.device(), *options.device_budget, options, need);
  }
  const std::size_t device =
      std::max(need.device(), options.device_budget.value_or(0)) + kSpareDeviceBytes;
  if (need.backend == Backend::kCuda && available.device && *available.device < device) {
    refuse("free device memory", device, *available.device, options, need);
  }
  const std::size_t host = need.host() + (need.backend == Backend::kCpu ? need.device() : 0);
  if (available.host && *available.host < host) {
    refuse("available host memory", host, *available.host, options, need);
  }
}

std::string show_memory(const StressOptions& options, const MemoryNeed& need) {
  const ModelConfig model = options.model();
  const std::string shape = counted(session_tokens(options), "token") + " x " +
                            counted(model.kv_heads, "KV head") + " x ";
  const std::string times =
      " x " + counted(model.layers, "layer") + " x " + counted(options.batch, "sequence");
  const auto line = [](const char* name, std::size_t bytes, const std::string& how) {
    std::string text = "  " + std::string(name);
    text.resize(14, ' ');
    return text + show_bytes(static_cast<double>(bytes)) + (how.empty() ? "" : " = " + how) + "\n";
  };
  const bool int8 = options.page_format == PageFormat::kInt8;
  const std::int64_t row = int8 ? 2 * model.head_dim + 8 : 4 * model.head_dim;
  const SessionMemory one = session_need(options);
  const std::int64_t slabs = (session_tokens(options) + 1023) / 1024 * 1024;
  const std::size_t sketch =
      one.sketches / static_cast<std::size_t>(slabs * model.layers * model.kv_heads);
  std::string text =
      line("KV, host", need.pages,
           shape + std::to_string(row) + " B" + times + ", in whole pages (" +
               (int8 ? "int8)" : "16 bit)")) +
      line("data, host", need.source, "generator, and chunks on their way into the cache") +
      line("sketches", need.sketches,
           shape + std::to_string(sketch) + " B" + times + ", in whole blocks, on the device") +
      line("workspace", need.workspace, "scores and staged rows of one step, on the device") +
      line("tables", need.tables, "page tables, first and last tokens, on the device");
  if (need.row_cache > 0)
    text += line("cached rows", need.row_cache, "fetched rows that stay on the device");
  if (need.row_factors > 0)
    text += line("factors", need.row_factors, "of int8 rows, and spare sketches, on the device");
  if (need.dense > 0) {
    text += line("dense", need.dense, "one layer's KV and a workspace again, on the device");
  }
  text.pop_back();
  return text;
}

}  // namespace kvtier::services
