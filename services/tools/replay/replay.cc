#include "services/tools/replay/replay.h"

#include "kvtier/engine.h"

#include "include/types/failure.h"
#include "services/console/retrieval.h"
#include "services/evaluation/dense_reference.h"
#include "services/evaluation/threads.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

namespace kvtier::services {
namespace {

constexpr int kMaxChunkSteps = 16;
constexpr std::size_t kReferenceBytes = 256 * MiB;  // of the dense references of one chunk

/// Consecutive steps that are decoded in one call.
struct Chunk {
  std::int64_t first_step = 0;
  std::int64_t steps = 0;
};

/// Returns the number of steps to replay, checked against the trace.
std::int64_t num_steps(const Trace& trace, const ReplayOptions& options) {
  const auto expect = [](const char* option, std::int64_t limit, const std::string& why,
                         std::int64_t found) {
    if (found >= 0 && found <= limit) return;
    throw_invalid(option, join("0..", limit, why), found);
  };
  expect("--steps", trace.steps(), " (the steps of the trace)", options.steps);
  const std::int64_t steps = options.steps > 0 ? options.steps : trace.steps();
  const std::int64_t last = (steps - 1) * trace.steps() / steps;
  expect("--first-step", trace.steps() - 1 - last,
         options.steps > 0 ? join(" with --steps ", options.steps)
                           : std::string(" without --steps, which leaves some out"),
         options.first_step);
  return steps;
}

std::vector<Chunk> make_chunks(const Trace& trace, std::int64_t steps, std::int64_t first_step) {
  constexpr std::size_t kBytesPerWeight = sizeof(double) + 2 * sizeof(std::int32_t);
  const std::size_t step_bytes =
      static_cast<std::size_t>(trace.query_heads() * trace.tokens()) * kBytesPerWeight;
  const auto limit = static_cast<std::int64_t>(
      std::clamp<std::size_t>(kReferenceBytes / step_bytes, 1, kMaxChunkSteps));
  std::vector<Chunk> chunks;
  for (std::int64_t i = 0; i < steps; ++i) {
    const std::int64_t step = first_step + i * trace.steps() / steps;
    if (!chunks.empty() && chunks.back().first_step + chunks.back().steps == step &&
        chunks.back().steps < limit) {
      ++chunks.back().steps;
    } else {
      chunks.push_back({step, 1});
    }
  }
  return chunks;
}

ModelConfig model_of(const Trace& trace) {
  const bool fp16 = trace.layers()[0].keys.dtype == DType::kFloat16;
  return {.layers = static_cast<int>(trace.layers().size()),
          .query_heads = static_cast<int>(trace.query_heads()),
          .kv_heads = static_cast<int>(trace.kv_heads()),
          .head_dim = static_cast<int>(trace.head_dim()),
          .kv_dtype = fp16 ? DType::kFloat16 : DType::kBFloat16};
}

Config engine_config(const Trace& trace, const ReplayOptions& options,
                     const std::vector<RetrievalConfig>& rows) {
  Config config;
  config.model = model_of(trace);
  config.backend = options.backend;
  config.log = options.log;
  config.time_stages = true;
  config.retrieval = rows.front();
  config.extra_sketches = needed_sketches(rows, config.model.head_dim);

  const std::int64_t layers = config.model.layers;
  const std::int64_t pages = trace.tokens() / config.memory.page_tokens + 1;
  config.memory.page_format = options.page_format;
  const std::int64_t page_bytes =
      trace.kv_heads() * config.memory.page_tokens * trace.head_dim() * 4;
  config.memory.host_bytes = static_cast<std::size_t>(layers * pages * page_bytes);
  config.memory.max_session_tokens = trace.tokens();
  config.memory.max_batch_rows = kMaxChunkSteps;
  std::int64_t token_bytes = 0;
  for (const SketchConfig& sketch : config.extra_sketches) {
    token_bytes += trace.kv_heads() * (sketch.num_planes / 8 + 16);
  }
  config.memory.device_bytes +=
      static_cast<std::size_t>(4 * layers * token_bytes * (trace.tokens() + 4096));
  return config;
}

/// Selected token ids of one call, `[steps, heads, capacity]`, padded with -1.
struct SelectedIds {
  std::int64_t heads = 0;
  std::int64_t capacity = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> scores;

  SelectedIds(std::int64_t steps, std::int64_t num_heads, std::int64_t k)
      : heads(num_heads),
        capacity(std::max<std::int64_t>(k, 1)),
        ids(static_cast<std::size_t>(steps * heads * capacity), -1),
        scores(ids.size(), -std::numeric_limits<float>::infinity()) {}

  [[nodiscard]] std::size_t offset(std::int64_t step, std::int64_t head) const {
    return static_cast<std::size_t>((step * heads + head) * capacity);
  }
  [[nodiscard]] std::span<std::int32_t> list(std::int64_t step, std::int64_t head) {
    return std::span(ids).subspan(offset(step, head), static_cast<std::size_t>(capacity));
  }
  [[nodiscard]] MutableTensorView ids_view() {
    return {ids.data(),
            DType::kInt32,
            {static_cast<std::int64_t>(ids.size()) / (heads * capacity), heads, capacity}};
  }
  [[nodiscard]] MutableTensorView scores_view() {
    MutableTensorView view = ids_view();
    view.data = scores.data();
    view.dtype = DType::kFloat32;
    return view;
  }

  /// Returns the ids of one list by falling score, ties by rising id.
  [[nodiscard]] std::vector<std::int32_t> ranking(std::int64_t step, std::int64_t head) const {
    const std::size_t begin = offset(step, head);
    std::vector<std::size_t> entries(static_cast<std::size_t>(capacity));
    std::iota(entries.begin(), entries.end(), begin);
    std::erase_if(entries, [&](std::size_t i) { return ids[i] < 0; });
    std::stable_sort(entries.begin(), entries.end(),
                     [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
    std::vector<std::int32_t> ranked(entries.size());
    std::transform(entries.begin(), entries.end(), ranked.begin(),
                   [&](std::size_t i) { return ids[i]; });
    return ranked;
  }
};

std::int64_t num_to_select(const RetrievalConfig& retrieval, const StepSpans& spans) {
  return std::min(retrieval.most_selected(spans.visible), spans.num_eligible());
}

/// Replays one layer of a trace; all rows see the same session.
class LayerReplay {
 public:
  LayerReplay(const Trace& trace, int layer, const ReplayGrid& grid, Engine& engine,
              Session& session)
      : trace_(trace),
        layer_(layer),
        tensors_(trace.layers()[static_cast<std::size_t>(layer)]),
        grid_(grid),
        engine_(engine),
        session_(session),
        dense_(trace, tensors_),
        group_(trace.query_heads() / trace.kv_heads()),
        threads_(num_threads()) {}

  /// Appends the tokens up to the chunk's last step and computes its references.
  void begin(const Chunk& chunk) {
    chunk_ = chunk;
    const std::int64_t length = session_.length(layer_);
    const std::int64_t count = trace_.context() + chunk.first_step + chunk.steps - length;
    session_.append(layer_, Trace::by_token(tensors_.keys, length, count),
                    Trace::by_token(tensors_.values, length, count));
    spans_.clear();
    references_.clear();
    for (std::int64_t t = 0; t < chunk.steps; ++t) {
      const std::int64_t step = chunk.first_step + t;
      spans_.push_back(step_spans(trace_.context() + step + 1, grid_.sink, grid_.window));
      references_.push_back(dense_.step(step, spans_.back(), threads_));
    }
    query_ = Trace::by_token(tensors_.queries, chunk.first_step, chunk.steps);
    out_.resize(static_cast<std::size_t>(chunk.steps * trace_.query_heads() * trace_.head_dim()));
  }

  /// Compares kvtier's dense output with the recorded one.
  void dense(Mean& error, double& max_error) {
    session_.attend(layer_, {.query = query_}, {.out = out_view()}, {},
                    {.mode = LayerMode::kDense});
    for (std::int64_t t = 0; t < chunk_.steps; ++t) {
      for (std::int64_t h = 0; h < trace_.query_heads(); ++h) {
        const std::span<const float> recorded = dense_.recorded(h, chunk_.first_step + t);
        const std::vector<double> expected(recorded.begin(), recorded.end());
        const double difference = relative_error(output(t, h), expected);
        error.add(difference);
        max_error = std::max(max_error, difference);
      }
    }
  }

  void estimator(const RetrievalConfig& retrieval, MetricSums& sums,
                 const std::function<void(std::span<const std::int32_t>)>& on_selected) {
    SelectedIds selected = make_ids(retrieval);
    const AttendOptions options{.retrieval = &retrieval};
    session_.select(layer_, query_, {.ids = selected.ids_view(), .scores = selected.scores_view()},
                    {}, options);
    const Stats before = engine_.stats();
    session_.attend(layer_, {.query = query_}, {.out = out_view()}, {}, options);
    sums.add(before, engine_.stats(), chunk_.steps);
    std::vector<std::vector<std::int32_t>> rankings;
    for (std::int64_t t = 0; t < chunk_.steps; ++t) {
      for (std::int64_t head = 0; head < selected.heads; ++head) {
        rankings.push_back(selected.ranking(t, head));
        if (!on_selected) continue;
        std::vector<std::int32_t> ids = rankings.back();
        std::sort(ids.begin(), ids.end());
        on_selected(ids);
      }
    }
    judge(sums, selected.heads, rankings);
  }

  void exact(const RetrievalConfig& retrieval, MetricSums& sums) {
    SelectedIds selected = make_ids(retrieval);
    std::vector<std::vector<std::int32_t>> rankings;
    for (std::int64_t t = 0; t < chunk_.steps; ++t) {
      const auto step = static_cast<std::size_t>(t);
      const std::span<const HeadReference> heads = references_[step];
      const auto k = static_cast<std::size_t>(num_to_select(retrieval, spans_[step]));
      for (std::int64_t head = 0; head < selected.heads; ++head) {
        const auto selected_heads = static_cast<std::size_t>(selected.heads);
        const std::size_t first = static_cast<std::size_t>(head) * (heads.size() / selected_heads);
        rankings.push_back(
            retrieval.selection == Selection::kPerQueryHead
                ? heads[first].order
                : shared_order(heads.subspan(first, heads.size() / selected_heads), spans_[step]));
        rankings.back().resize(k);
        std::copy(rankings.back().begin(), rankings.back().end(), selected.list(t, head).begin());
      }
    }
    const Stats before = engine_.stats();
    session_.attend(layer_, {.query = query_, .selected = selected.ids_view()}, {.out = out_view()},
                    {}, {.retrieval = &retrieval});
    sums.add(before, engine_.stats(), chunk_.steps);
    judge(sums, selected.heads, rankings);
  }

 private:
  [[nodiscard]] SelectedIds make_ids(const RetrievalConfig& retrieval) const {
    std::int64_t k = 0;
    for (const StepSpans& spans : spans_) {
      k = std::max(k, retrieval.most_selected(spans.visible));
    }
    return {chunk_.steps, engine_.config().model.num_sets(retrieval.selection), k};
  }
  [[nodiscard]] MutableTensorView out_view() {
    return {out_.data(), DType::kFloat32, {chunk_.steps, trace_.query_heads(), trace_.head_dim()}};
  }
  [[nodiscard]] std::span<const float> output(std::int64_t t, std::int64_t head) const {
    const std::int64_t begin = (t * trace_.query_heads() + head) * trace_.head_dim();
    return std::span(out_).subspan(static_cast<std::size_t>(begin),
                                   static_cast<std::size_t>(trace_.head_dim()));
  }
  /// Adds the outcomes of all steps and query heads; `rankings` are `[steps, num_lists]`.
  void judge(MetricSums& sums, std::int64_t num_lists,
             const std::vector<std::vector<std::int32_t>>& rankings) const {
    const std::int64_t served = trace_.query_heads() / num_lists;
    for (std::int64_t t = 0; t < chunk_.steps; ++t) {
      const auto step = static_cast<std::size_t>(t);
      std::vector<std::int32_t> fetched;  // by the heads of one group
      for (std::int64_t head = 0; head < trace_.query_heads(); ++head) {
        const std::vector<std::int32_t>& ranking =
            rankings[static_cast<std::size_t>(t * num_lists + head / served)];
        sums.add(spans_[step], references_[step][static_cast<std::size_t>(head)],
                 {.ranking = ranking, .output = output(t, head)});
        fetched.insert(fetched.end(), ranking.begin(), ranking.end());
        if ((head + 1) % group_ != 0) continue;
        std::sort(fetched.begin(), fetched.end());
        const auto last = std::unique(fetched.begin(), fetched.end());
        sums.add_fetched(last - fetched.begin());
        fetched.clear();
      }
    }
  }

  const Trace& trace_;
  int layer_;
  const TraceLayer& tensors_;
  const ReplayGrid& grid_;
  Engine& engine_;
  Session& session_;
  DenseReference dense_;
  std::int64_t group_;
  int threads_;
  Chunk chunk_;
  TensorView query_;
  std::vector<StepSpans> spans_;
  std::vector<std::vector<HeadReference>> references_;
  std::vector<float> out_;
};

/// Returns the rows of a report: the exact selector at each size and selection, then the grid.
std::vector<ReplayRow> make_rows(const std::vector<RetrievalConfig>& grid_rows) {
  std::vector<ReplayRow> rows;
  for (RetrievalConfig row : grid_rows) {
    // It takes the most tokens that an error target does.
    if (row.sparsity == 0.0) {
      row.top_k = static_cast<int>(row.most_selected(std::numeric_limits<int>::max()));
    }
    row.error_target = 0.0;
    const bool known = std::any_of(rows.begin(), rows.end(), [&](const ReplayRow& other) {
      return other.retrieval.selection == row.selection &&
             other.retrieval.sparsity == row.sparsity && other.retrieval.top_k == row.top_k;
    });
    if (!known) rows.push_back({.exact = true, .retrieval = row, .mean = {}, .layers = {}});
  }
  for (const RetrievalConfig& row : grid_rows) {
    rows.push_back({.exact = false, .retrieval = row, .mean = {}, .layers = {}});
  }
  return rows;
}

}  // namespace

ReplayReport replay(const Trace& trace, const ReplayOptions& options) {
  const std::vector<RetrievalConfig> grid_rows = options.grid.expand(model_of(trace));
  if (options.selected && grid_rows.size() != 1) {
    throw_invalid("--record-ids", "one selector, such as --estimator norm_aware --sparsity 33",
                  grid_rows.size());
  }
  ReplayReport report;
  report.rows = make_rows(grid_rows);
  report.steps = num_steps(trace, options);
  const std::vector<Chunk> chunks = make_chunks(trace, report.steps, options.first_step);

  Engine engine(engine_config(trace, options, grid_rows));
  report.backend = engine.backend();
  Session session = engine.open();
  std::vector<MetricSums> totals(report.rows.size());
  Mean dense_total;
  const auto num_layers = static_cast<int>(trace.layers().size());
  for (int layer = 0; layer < num_layers; ++layer) {
    LayerReplay replay(trace, layer, options.grid, engine, session);
    std::vector<MetricSums> sums(report.rows.size());
    Mean dense;
    double dense_max = 0.0;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      replay.begin(chunks[c]);
      replay.dense(dense, dense_max);
      for (std::size_t r = 0; r < report.rows.size(); ++r) {
        const ReplayRow& row = report.rows[r];
        row.exact ? replay.exact(row.retrieval, sums[r])
                  : replay.estimator(row.retrieval, sums[r], options.selected);
      }
      if (options.progress) {
        options.progress((layer + static_cast<double>(c + 1) / static_cast<double>(chunks.size())) /
                         num_layers);
      }
    }
    for (std::size_t r = 0; r < sums.size(); ++r) {
      report.rows[r].layers.push_back(sums[r].metrics());
      totals[r].add(sums[r]);
    }
    report.dense_layers.push_back({dense.value(), dense_max});
    report.dense.max = std::max(report.dense.max, dense_max);
    dense_total.add(dense);
  }
  for (std::size_t r = 0; r < totals.size(); ++r) report.rows[r].mean = totals[r].metrics();
  report.dense.mean = dense_total.value();
  const Stats stats = engine.stats();
  report.append_seconds = stats.seconds.append;
  report.bytes_device_to_host = static_cast<double>(stats.cumulative.bytes_device_to_host);
  return report;
}

}  // namespace kvtier::services
