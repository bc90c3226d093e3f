#include "services/stress/memory.h"

#include "kvtier/engine.h"
#include "kvtier/error.h"

#include "services/stress/ingest.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace kvtier::services {
namespace {

constexpr std::size_t kBlockTokens = 1024;            // of a sketch block, docs/glossary.md
constexpr std::size_t kCounterBytes = 512;            // of a layer, with alignment
constexpr std::size_t kSpareDeviceBytes = 512 * MiB;  // context and kernels of a GPU

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::size_t row_bytes(const ModelConfig& model) {
  return static_cast<std::size_t>(2 * model.head_dim) * dtype_bytes(model.kv_dtype);
}

/// In a page: of fp8 with its two factors.
std::size_t page_row_bytes(const StressOptions& options) {
  const std::size_t row = row_bytes(options.model());
  return options.page_format == PageFormat::kFloat8 ? row / 2 + 2 * sizeof(float) : row;
}

/// Bytes of the page frames of one layer of every sequence.
std::size_t layer_page_bytes(const StressOptions& options) {
  const ModelConfig model = options.model();
  const std::int64_t page_tokens = MemoryConfig{}.page_tokens;
  const std::int64_t tokens = ceil_div(session_tokens(options), page_tokens) * page_tokens;
  return static_cast<std::size_t>(tokens * options.batch * model.kv_heads) *
         page_row_bytes(options);
}

/// Sketch bytes of one token of one layer, all KV heads: bits in chunks of 128, and two norms.
std::size_t sketch_token_bytes(const StressOptions& options) {
  const std::int64_t chunks =
      ceil_div(options.retrieval().sketch(*options.head_dim).num_planes, 128);
  return static_cast<std::size_t>(*options.kv_heads * (chunks * 16 + 4));
}

std::size_t layer_sketch_bytes(const StressOptions& options) {
  // One block more than full ones.
  const auto blocks = static_cast<std::size_t>(
      (session_tokens(options) / static_cast<std::int64_t>(kBlockTokens) + 1) * options.batch);
  return blocks * kBlockTokens * sketch_token_bytes(options);
}

std::size_t table_bytes(const StressOptions& options) {
  const ModelConfig model = options.model();
  const RetrievalConfig retrieval = options.retrieval();
  const std::int64_t tokens = session_tokens(options);
  const std::int64_t addresses = ceil_div(tokens, MemoryConfig{}.page_tokens) + tokens / 1024 + 1;
  const std::int64_t rows = retrieval.sink_tokens + retrieval.recent_tokens + options.batch;
  const std::size_t layer = kCounterBytes + static_cast<std::size_t>(16 * addresses) +
                            static_cast<std::size_t>(rows * model.kv_heads) * row_bytes(model);
  return layer * static_cast<std::size_t>(model.layers) * static_cast<std::size_t>(options.batch);
}

/// Bytes of the hot rows of a run: sets of 32 rows, each with 8 bytes that say what it is, and 16
/// of the set.
std::size_t hot_bytes(const StressOptions& options, int rows) {
  if (rows == 0) return 0;
  constexpr std::int64_t kSetRows = 32;
  constexpr std::size_t kAlign = 256;
  const ModelConfig model = options.model();
  const auto sets = static_cast<std::size_t>(ceil_div(rows, kSetRows) * model.kv_heads);
  const std::size_t layer = sets * (kSetRows * (row_bytes(model) + 8) + 16) + kAlign;
  return layer * static_cast<std::size_t>(model.layers) * static_cast<std::size_t>(options.batch);
}

/// Adds what the children take of which every row is fetched: of each layer the pages that the
/// steps write to, and the page, the sketch block and the next that they are in.
void add_children(const StressOptions& options, MemoryNeed& need) {
  const auto layers = static_cast<std::size_t>(*options.layers * options.batch);
  const std::int64_t page_tokens = MemoryConfig{}.page_tokens;
  const std::int64_t pages = ceil_div(kWarmupSteps + options.steps, page_tokens) + 1;
  need.pages += layers * static_cast<std::size_t>(pages * page_tokens * *options.kv_heads) *
                page_row_bytes(options);
  need.sketches += layers * 2 * kBlockTokens * sketch_token_bytes(options);
  need.tables *= 2;
}

Config base_config(const StressOptions& options) {
  Config config;
  config.model = options.model();
  config.retrieval = options.retrieval();
  config.backend = options.backend;
  config.memory.page_format = options.page_format;
  config.memory.max_session_tokens = session_tokens(options);
  config.memory.max_batch_rows = options.batch;
  if (options.hot_rows.value_or(0) > 0)
    config.memory.staging_rows = options.top_k;  // on any backend
  return config;
}

/// Returns the workspace of an engine for the run's shape, within a budget: what a small engine
/// holds beside its sketch blocks. A budget that leaves no room for these counts as used up.
std::size_t workspace_bytes(const StressOptions& options, std::optional<std::size_t> budget,
                            Backend& backend) {
  Config probe = base_config(options);
  probe.model.layers = 1;
  probe.memory.host_bytes =  // one page
      static_cast<std::size_t>(probe.memory.page_tokens * probe.model.kv_heads) *
      row_bytes(probe.model);
  const auto scores =
      static_cast<std::size_t>(session_tokens(options) * options.batch * probe.model.query_heads) *
      sizeof(float);
  probe.memory.device_bytes = budget.value_or(4 * GiB + 8 * scores);
  const Engine engine(probe);
  backend = engine.backend();
  const std::size_t held = engine.stats().snapshot.device_bytes;
  const std::size_t blocks = 64 * kBlockTokens * sketch_token_bytes(options);
  if (held + kBlockTokens * sketch_token_bytes(options) > probe.memory.device_bytes) return held;
  return held - std::min(held, blocks);
}

std::string counted(std::int64_t number, const char* noun) {
  return std::to_string(number) + " " + noun + (number == 1 ? "" : "s");
}

[[noreturn]] void refuse(const char* what, std::size_t wanted, std::size_t found,
                         const StressOptions& options, const MemoryNeed& need) {
  throw Error(ErrorCode::kResourceExhausted,
              std::string(what) + ": expected at least " + show_bytes(static_cast<double>(wanted)) +
                  ", found " + show_bytes(static_cast<double>(found)) + "\n" +
                  show_memory(options, need));
}

/// Returns the number that a file holds, or that follows `key` in it.
std::optional<std::size_t> read_number(const std::filesystem::path& path,
                                       const std::string& key = "") {
  std::ifstream file(path);
  std::string word;
  while (!key.empty() && file >> word) {
    if (word == key) break;
  }
  std::size_t number = 0;
  if (file >> number) return number;
  return {};
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
  Config config = base_config(options);
  config.memory.host_bytes = need.pages;
  // Half of the budget bounds the workspace, so a small model's budget is twice that.
  config.memory.device_bytes =
      options.device_budget.value_or(std::max(need.sketches + need.workspace, 2 * need.workspace));
  if (options.device_budget) config.memory.device_bytes -= need.tables + need.hot + need.dense;
  if (need.hot > 0) {
    config.memory.hot_bytes = need.hot;
    config.memory.hot_rows = options.rows_kept(need.backend);
  }
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
  MemoryNeed need;
  const auto layers = static_cast<std::size_t>(*options.layers);
  need.pages = layer_page_bytes(options) * layers;
  need.sketches = layer_sketch_bytes(options) * layers;
  need.tables = table_bytes(options);
  return need;
}

MemoryNeed memory_need(const StressOptions& options, Backend& backend) {
  MemoryNeed need = stored_need(options);
  const auto layers = static_cast<std::size_t>(*options.layers);
  need.source = ingest_buffer_bytes(options) + layers * static_cast<std::size_t>(options.batch) *
                                                   LayerSource::bytes(synthetic_shape(options));

  need.workspace = workspace_bytes(options, std::nullopt, backend);
  if (options.device_budget) {
    need.workspace =
        std::min(need.workspace, workspace_bytes(options, options.device_budget, backend));
  }
  need.backend = backend;
  need.hot = hot_bytes(options, options.rows_kept(backend));
  if (need.hot > 0) add_children(options, need);
  if (options.compare_dense) {
    need.dense = 2 * need.workspace + layer_page_bytes(options) + layer_sketch_bytes(options);
  }
  return need;
}

void check_memory(const StressOptions& options, const MemoryNeed& need, Backend backend,
                  const MemoryAvailable& available) {
  if (options.host_budget && *options.host_budget < need.pages) {
    refuse("host budget", need.pages, *options.host_budget, options, need);
  }
  if (options.device_budget && *options.device_budget < need.device()) {
    refuse("device budget", need.device(), *options.device_budget, options, need);
  }
  const std::size_t device =
      std::max(need.device(), options.device_budget.value_or(0)) + kSpareDeviceBytes;
  if (backend == Backend::kCuda && available.device && *available.device < device) {
    refuse("free device memory", device, *available.device, options, need);
  }
  const std::size_t host = need.host() + (backend == Backend::kCpu ? need.device() : 0);
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
  const std::size_t sketch = sketch_token_bytes(options) / static_cast<std::size_t>(model.kv_heads);
  std::string text =
      line("KV, host", need.pages,
           shape + std::to_string(page_row_bytes(options)) + " B" + times + ", in whole pages (" +
               (options.page_format == PageFormat::kFloat8 ? "fp8)" : "16 bit)")) +
      line("data, host", need.source, "generator, and chunks on their way into the cache") +
      line("sketches", need.sketches,
           shape + std::to_string(sketch) + " B" + times + ", in whole blocks, on the device") +
      line("workspace", need.workspace, "scores and staged rows of one step, on the device") +
      line("tables", need.tables, "page tables, first and last tokens, on the device");
  if (need.hot > 0) text += line("hot rows", need.hot, "fetched rows that stay on the device");
  if (need.dense > 0) {
    text += line("dense", need.dense, "one layer's KV and a workspace again, on the device");
  }
  text.pop_back();
  return text;
}

std::optional<std::size_t> available_host_bytes(const std::filesystem::path& root) {
  const std::optional<std::size_t> kibibytes =
      read_number(root / "proc" / "meminfo", "MemAvailable:");
  std::optional<std::size_t> available;
  if (kibibytes) available = *kibibytes * KiB;
  const std::filesystem::path group = root / "sys" / "fs" / "cgroup";
  const auto limit = read_number(group / "memory.max");  // "max" is no number
  const auto used = read_number(group / "memory.current");
  if (!limit || !used) return available;
  const std::size_t cached = read_number(group / "memory.stat", "inactive_file").value_or(0);
  const std::size_t taken = *used - std::min(*used, cached);
  const std::size_t left = *limit - std::min(*limit, taken);
  return std::min(left, available.value_or(left));
}

}  // namespace kvtier::services
