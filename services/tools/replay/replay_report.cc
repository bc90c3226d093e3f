#include "services/console/enum_names.h"
#include "services/console/json_report.h"
#include "services/console/text.h"
#include "services/tools/replay/replay.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <vector>

namespace kvtier::services {
namespace {

std::string fixed(double value, int digits) {
  return std::isnan(value) ? "-" : format("%.*f", digits, value);
}

std::string size_name(const RetrievalConfig& retrieval) {
  const double target = retrieval.error_in_force();
  const std::string error = target > 0.0 ? format("e=%g", target) : "";
  if (retrieval.sparsity == 0.0 && retrieval.top_k == 0) return error;
  const std::string most = retrieval.sparsity > 0.0 ? format("%gx", retrieval.sparsity)
                                                    : "k=" + std::to_string(retrieval.top_k);
  return error.empty() ? most : error + " " + most;
}

std::string_view estimator_name(const ReplayRow& row) {
  return row.exact ? "exact" : name_of(kEstimatorNames, row.retrieval.estimator);
}

std::string_view weighting_name(const ReplayRow& row) {
  return row.exact ? "-" : name_of(kWeightingNames, row.retrieval.weighting());
}

std::string bits_name(const ReplayRow& row, int head_dim) {
  if (row.exact) return "-";
  return std::to_string(row.retrieval.sketch(head_dim).num_planes) + " " +
         std::string(name_of(kCodeNames, row.retrieval.code));
}

using Cells = std::vector<std::string>;

Cells heading() {
  return {"estimator", "weighting",  "selection", "rule",     "bits",     "size",      "mass",
          "precision", "jaccard",    "ndcg",      "out err",  "rows",     "effective", "host KiB",
          "dev KiB",   "sketch KiB", "score ms",  "fetch ms", "attend ms"};
}

Cells cells_of(const ReplayRow& row, int head_dim) {
  const ReplayMetrics& m = row.mean;
  return {std::string(estimator_name(row)),
          std::string(weighting_name(row)),
          std::string(name_of(kSelectionNames, row.retrieval.selection)),
          row.exact ? "-" : std::string(name_of(kRuleNames, row.retrieval.rule)),
          bits_name(row, head_dim),
          size_name(row.retrieval),
          fixed(m.attention_mass, 4),
          fixed(m.precision, 3),
          fixed(m.jaccard, 3),
          fixed(m.ndcg, 3),
          fixed(m.output_error, 4),
          fixed(m.attended_rows, 0),
          fixed(m.effective_sparsity, 1) + "x",
          fixed(m.bytes_host_to_device / 1024, 0),
          fixed(m.bytes_device_resident / 1024, 0),
          fixed(m.bytes_sketch_read / 1024, 0),
          fixed(m.score_seconds * 1e3, 3),
          fixed(m.fetch_seconds * 1e3, 3),
          fixed(m.attend_seconds * 1e3, 3)};
}

nlohmann::json to_json(const ReplayMetrics& m) {
  return {{"attention_mass", number(m.attention_mass)},
          {"precision", number(m.precision)},
          {"jaccard", number(m.jaccard)},
          {"ndcg", number(m.ndcg)},
          {"output_error", number(m.output_error)},
          {"attended_rows", number(m.attended_rows)},
          {"effective_sparsity", number(m.effective_sparsity)},
          {"selected_rows_per_kv_head", number(m.selected_rows_per_kv_head)},
          {"bytes_host_to_device", number(m.bytes_host_to_device)},
          {"bytes_device_resident", number(m.bytes_device_resident)},
          {"bytes_sketch_read", number(m.bytes_sketch_read)},
          {"score_seconds", number(m.score_seconds)},
          {"fetch_seconds", number(m.fetch_seconds)},
          {"attend_seconds", number(m.attend_seconds)}};
}

nlohmann::json to_json(const DenseError& error) {
  return {{"mean_relative_error", number(error.mean)}, {"max_relative_error", number(error.max)}};
}

nlohmann::json selector_json(const ReplayRow& row, int head_dim) {
  const RetrievalConfig& r = row.retrieval;
  nlohmann::json json = {{"estimator", estimator_name(row)},
                         {"selection", name_of(kSelectionNames, r.selection)}};
  if (r.sparsity > 0.0) {
    json["sparsity"] = r.sparsity;
  } else {
    json["k"] = r.top_k;
  }
  if (row.exact) return json;
  json["value_weighting"] = weighting_name(row);
  json["rule"] = name_of(kRuleNames, r.rule);
  json["code"] = name_of(kCodeNames, r.code);
  if (r.error_in_force() > 0.0) json["error_target"] = r.error_in_force();
  if (r.coarse_bits > 0) {
    json["coarse_bits"] = r.coarse_bits;
    json["candidates"] = r.candidates;
  }
  json["plane_kind"] = name_of(kPlaneKindNames, r.planes());
  if (r.estimator == Estimator::kNormAware) {
    json["bits"] = r.sketch(head_dim).num_planes;
    json["query_bits"] = r.query_bits;
  } else {
    json["planes_per_table"] = r.planes_per_table;
    json["tables"] = r.tables;
    if (r.estimator == Estimator::kSoftCollision) json["tau"] = r.tau;
  }
  return json;
}

}  // namespace

void write_table(std::ostream& out, const Trace& trace, const ReplayReport& report) {
  const RetrievalConfig& any = report.rows.front().retrieval;
  out << trace.path().filename().string() << ": " << trace.layers().size() << " layer(s), "
      << trace.context() << " context tokens, " << report.steps << " of " << trace.steps()
      << " steps, " << trace.query_heads() << " query heads, " << trace.kv_heads()
      << " KV heads, head_dim " << trace.head_dim() << '\n'
      << "backend " << name_of(kBackendNames, report.backend) << ", sink " << any.sink_tokens
      << ", window " << any.recent_tokens << "; bytes and times per step and layer\n"
      << "dense output against the trace: relative error mean " << format("%.2e", report.dense.mean)
      << ", max " << format("%.2e", report.dense.max) << "\n\n";
  std::vector<Cells> lines = {heading()};
  for (const ReplayRow& row : report.rows)
    lines.push_back(cells_of(row, static_cast<int>(trace.head_dim())));
  constexpr std::size_t kTextColumns = 5;
  for (const std::string& line : aligned(lines, kTextColumns)) out << line << '\n';
}

std::string to_json(const Trace& trace, const ReplayOptions& options, const ReplayReport& report) {
  nlohmann::json layers = nlohmann::json::array();
  for (const TraceLayer& layer : trace.layers()) layers.push_back(layer.name);
  nlohmann::json json = {{"trace",
                          {{"file", trace.path().filename().string()},
                           {"layers", layers},
                           {"context_tokens", trace.context()},
                           {"steps", trace.steps()},
                           {"query_heads", trace.query_heads()},
                           {"kv_heads", trace.kv_heads()},
                           {"head_dim", trace.head_dim()}}},
                         {"backend", name_of(kBackendNames, report.backend)},
                         {"kv_dtype", name_of(kPageFormatNames, options.page_format)},
                         {"steps_replayed", report.steps},
                         {"sink_tokens", options.grid.sink},
                         {"recent_tokens", options.grid.window},
                         {"seed", options.grid.seed},
                         {"append",
                          {{"seconds", number(report.append_seconds)},
                           {"bytes_device_to_host", number(report.bytes_device_to_host)}}}};
  json["dense"]["mean"] = to_json(report.dense);
  for (std::size_t i = 0; i < trace.layers().size(); ++i) {
    json["dense"]["layers"][trace.layers()[i].name] = to_json(report.dense_layers[i]);
  }
  json["rows"] = nlohmann::json::array();
  for (const ReplayRow& row : report.rows) {
    nlohmann::json entry = selector_json(row, static_cast<int>(trace.head_dim()));
    entry["mean"] = to_json(row.mean);
    for (std::size_t i = 0; i < trace.layers().size(); ++i) {
      entry["layers"][trace.layers()[i].name] = to_json(row.layers[i]);
    }
    json["rows"].push_back(std::move(entry));
  }
  return json.dump(2) + "\n";
}

}  // namespace kvtier::services
