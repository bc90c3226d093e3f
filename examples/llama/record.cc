#include "llama/record.h"

#include "formats/safetensors.h"
#include "include/types/failure.h"
#include "include/types/float16.h"

#include <cmath>
#include <map>
#include <vector>

namespace kvtier::llama {
namespace {

/// One tensor of the trace, `[heads, tokens, head_dim]`, filled from `[tokens, heads, head_dim]`.
class Trace {
 public:
  Trace(std::int64_t heads, std::int64_t tokens, std::int64_t head_dim)
      : heads_(heads),
        tokens_(tokens),
        head_dim_(head_dim),
        data_(static_cast<std::size_t>(heads * tokens * head_dim)) {}

  void put(const std::vector<std::uint16_t>& rows, std::int64_t first) {
    const auto d = static_cast<std::ptrdiff_t>(head_dim_);
    auto from = rows.begin();
    for (std::int64_t row = 0; from != rows.end(); ++row, from += d) {
      const std::int64_t target = row % heads_ * tokens_ + first + row / heads_;
      std::copy(from, from + d, data_.begin() + target * d);
    }
  }

  [[nodiscard]] formats::Tensor tensor() const {
    return {.dtype = DType::kBFloat16,
            .shape = {heads_, tokens_, head_dim_},
            .data = reinterpret_cast<const std::byte*>(data_.data()),
            .bytes = data_.size() * sizeof(std::uint16_t)};
  }

 private:
  std::int64_t heads_, tokens_, head_dim_;
  std::vector<std::uint16_t> data_;
};

struct LayerTrace {
  Trace k, v, q, o;
};

/// Copies what a decoder computes into traces.
class Recorder {
 public:
  Recorder(Decoder& decoder, std::int64_t context, std::int64_t steps, std::optional<int> only)
      : decoder_(decoder), context_(context) {
    const ModelConfig& model = decoder.config();
    for (int layer = 0; layer < model.layers; ++layer) {
      if (only && *only != layer) continue;
      const Trace kv(model.kv_heads, context + steps, model.head_dim);
      const Trace query(model.query_heads, steps, model.head_dim);
      layers_.emplace(layer, LayerTrace{.k = kv, .v = kv, .q = query, .o = query});
    }
  }

  void observe(const LayerStep& step) {
    const auto it = layers_.find(step.layer);
    if (it == layers_.end()) return;
    const ModelConfig& model = decoder_.config();
    const std::int64_t kv_count = step.tokens * model.kv_heads * model.head_dim;
    it->second.k.put(stored(step.key, kv_count), step.first_position);
    it->second.v.put(stored(step.value, kv_count), step.first_position);
    if (step.first_position < context_) return;
    const std::int64_t count = step.tokens * model.query_heads * model.head_dim;
    it->second.q.put(rounded(step.query, count), step.first_position - context_);
    it->second.o.put(rounded(step.out, count), step.first_position - context_);
  }

  [[nodiscard]] std::map<std::string, formats::Tensor> tensors(bool plain_names) const {
    std::map<std::string, formats::Tensor> result;
    for (const auto& [layer, trace] : layers_) {
      const std::string prefix = plain_names ? "" : "layers." + std::to_string(layer) + ".";
      result.emplace(prefix + "k", trace.k.tensor());
      result.emplace(prefix + "v", trace.v.tensor());
      result.emplace(prefix + "q", trace.q.tensor());
      result.emplace(prefix + "o", trace.o.tensor());
    }
    return result;
  }

 private:
  std::vector<std::uint16_t> stored(const std::uint16_t* from, std::int64_t count) {
    std::vector<std::uint16_t> rows(static_cast<std::size_t>(count));
    decoder_.compute().download(rows.data(), from, rows.size() * sizeof(std::uint16_t));
    return rows;
  }

  std::vector<std::uint16_t> rounded(const float* from, std::int64_t count) {
    std::vector<float> rows(static_cast<std::size_t>(count));
    decoder_.compute().download(rows.data(), from, rows.size() * sizeof(float));
    std::vector<std::uint16_t> result(rows.size());
    std::transform(rows.begin(), rows.end(), result.begin(),
                   [](float each) { return BFloat16::from_float(each).bits; });
    return result;
  }

  Decoder& decoder_;
  std::int64_t context_;
  std::map<int, LayerTrace> layers_;
};

void check_range(const char* option, std::int64_t lowest, std::int64_t highest,
                 std::int64_t found) {
  if (found < lowest || found > highest)
    throw_invalid(option, join(lowest, " to ", highest), found);
}

}  // namespace

void record(Decoder& decoder, const TaskFile& tasks, const RecordOptions& options,
            const std::filesystem::path& out) {
  const TaskCase task = tasks.at(options.task);
  const ModelConfig& model = decoder.config();
  check_range("--sequence", 0, task.sequences - 1, options.sequence);
  check_range("--steps", 0, task.tail(), options.steps);
  if (options.layer) check_range("--layer", 0, model.layers - 1, *options.layer);
  const std::int64_t steps = options.steps == 0 ? task.tail() : options.steps;
  const auto context = static_cast<std::size_t>(task.context);

  const std::vector<Method> dense{{.dense = true, .sparsity = 1.0, .retrieval = {}}};
  Engine engine(engine_config(model, options.runtime, dense, task.context + steps));
  Session session = engine.open();
  Recorder recorder(decoder, task.context, steps, options.layer);
  const std::span<const std::int32_t> tokens = task.sequence(options.sequence);
  PassOptions pass;
  pass.observer = [&recorder](const LayerStep& step) { recorder.observe(step); };
  decoder.prefill(session, tokens.first(context), pass);
  AttendOptions attend;
  attend.mode = LayerMode::kDense;
  const std::vector<float> logits = decoder.decode(
      session, tokens.subspan(context, static_cast<std::size_t>(steps)), attend, pass);

  formats::write_safetensors(
      out, recorder.tensors(options.layer.has_value()),
      {{"case", task.name},
       {"sequence", std::to_string(options.sequence)},
       {"context", std::to_string(task.context)},
       {"scale", std::to_string(1.0 / std::sqrt(static_cast<double>(model.head_dim)))}});
}

}  // namespace kvtier::llama
