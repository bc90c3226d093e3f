#include "services/console/enum_names.h"
#include "services/console/json_report.h"
#include "services/console/text.h"
#include "services/tools/stress/stress.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvtier::services {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double ratio(double part, double whole) { return whole > 0.0 ? part / whole : kNaN; }

/// Figures of steps; rates in bytes per second.
struct StepFigures {
  double wanted = kNaN;  // of the rows, by a share that is imposed
  StepTimes times;
  double tokens_per_second = kNaN;
  double host_to_device = kNaN;
  double device_to_host = kNaN;
  double sketches = kNaN;
  double resident = kNaN;
  double row_cache_share = kNaN;      // of the rows that were looked for
  double row_cache_evictions = kNaN;  // a step
};

StepFigures figures_of(const StressOptions& options, const std::vector<double>& seconds,
                       const Stats::Cumulative& moved) {
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  const auto steps = static_cast<double>(seconds.size());
  const auto rate = [&](std::uint64_t bytes) { return ratio(static_cast<double>(bytes), sum); };
  return {.times = step_times(seconds),
          .tokens_per_second = ratio(steps * options.batch, sum),
          .host_to_device = rate(moved.bytes_host_to_device),
          .device_to_host = rate(moved.bytes_device_to_host),
          .sketches = rate(moved.bytes_sketch_read),
          .resident = rate(moved.bytes_device_resident),
          .row_cache_share = found_share(moved),
          .row_cache_evictions = ratio(static_cast<double>(moved.row_cache_evictions), steps)};
}

double needle_recall(const StressReport& report) {
  return ratio(static_cast<double>(report.needles_found), static_cast<double>(report.needles));
}

double ingest_rate(const StressReport& report) {
  return ratio(report.ingested_bytes, report.append_seconds);
}

nlohmann::json to_json(const StepTimes& t) {
  return {{"mean", number(t.mean)}, {"min", number(t.min)}, {"p50", number(t.p50)},
          {"p90", number(t.p90)},   {"p99", number(t.p99)}, {"max", number(t.max)}};
}

std::string show_times(const StepTimes& t) {
  return format("p50 %.3f ms, p90 %.3f, p99 %.3f, max %.3f, mean %.3f", t.p50 * 1e3, t.p90 * 1e3,
                t.p99 * 1e3, t.max * 1e3, t.mean * 1e3);
}

std::string show_estimator(const StressOptions& options) {
  const RetrievalConfig retrieval = options.retrieval();
  return std::string(name_of(kEstimatorNames, options.estimator)) + " (" +
         std::to_string(retrieval.sketch(*options.head_dim).num_planes) + " bits, " +
         std::string(name_of(kCodeNames, retrieval.code)) + "), " +
         std::string(name_of(kRuleNames, retrieval.rule));
}

/// The measured steps with each share of the selected rows on the device, the real one first; none
/// without a row cache.
std::vector<StepFigures> share_rows(const StressOptions& options, const StressReport& report) {
  std::vector<StepFigures> rows;
  if (report.memory.row_cache_bytes == 0 || report.step_seconds.empty()) return rows;
  rows.push_back(figures_of(options, report.step_seconds, report.moved));
  for (const ImposedShare& imposed : report.imposed) {
    if (imposed.step_seconds.empty()) continue;
    rows.push_back(figures_of(options, imposed.step_seconds, imposed.moved));
    rows.back().wanted = imposed.wanted;
    if (imposed.wanted == 0.0) rows.back().row_cache_share = 0.0;  // nothing is looked for
  }
  return rows;
}

void write_shares(std::ostream& out, const StressOptions& options, const StressReport& report) {
  for (const StepFigures& row : share_rows(options, report)) {
    const std::string name =
        std::isnan(row.wanted) ? "real    " : format("%3.0f %%   ", 100.0 * row.wanted);
    out << format("hits     %s %.3f found: %.1f tokens per second, %.2f GB/s to the device, ",
                  name.c_str(), row.row_cache_share, row.tokens_per_second,
                  row.host_to_device / 1e9)
        << show_times(row.times) << '\n';
  }
}

void write_decode(std::ostream& out, const StressOptions& options, const StressReport& report) {
  const StepFigures f = figures_of(options, report.step_seconds, report.moved);
  const auto steps = report.step_seconds.size();
  if (steps == 0) {
    out << "decode   no step was measured\n";
    return;
  }
  out << "decode   " << steps << " step" << (steps == 1 ? "" : "s") << " of "
      << options.layers.value() << " layer(s): " << show_times(f.times) << '\n'
      << format("         %.1f tokens per second, %.3f ms per layer", f.tokens_per_second,
                f.times.p50 * 1e3 / *options.layers)
      << '\n'
      << format(
             "links    rows to the device %.2f GB/s, new rows to the host %.4f GB/s, sketches "
             "read %.2f GB/s, rows on the device %.2f GB/s",
             f.host_to_device / 1e9, f.device_to_host / 1e9, f.sketches / 1e9, f.resident / 1e9)
      << '\n';
  if (report.memory.row_cache_bytes > 0) {
    out << format(
               "cache    %.3f of the selected rows were on the device, %.0f more a step were put "
               "there in the place of others",
               f.row_cache_share, f.row_cache_evictions)
        << '\n';
  }
  write_shares(out, options, report);
  if (report.needles > 0) {
    out << format("needles  %lld of %lld selected (%.4f)",
                  static_cast<long long>(report.needles_found),
                  static_cast<long long>(report.needles), needle_recall(report))
        << '\n';
  }
  if (!std::isnan(report.selected_overlap)) {
    out << format("overlap  %.3f of the selected tokens were selected in the step before",
                  report.selected_overlap)
        << '\n';
  }
  if (!report.dense) return;
  const StepTimes dense = step_times(report.dense->step_seconds);
  out << "dense    one layer, KV on the device: " << show_times(dense) << '\n'
      << format("         %.2f times a sparse layer; sparse output differs by %.4f",
                dense.p50 * *options.layers / f.times.p50, report.dense->output_error)
      << '\n';
}

}  // namespace

StepTimes step_times(std::vector<double> seconds) {
  if (seconds.empty()) return {kNaN, kNaN, kNaN, kNaN, kNaN, kNaN};
  std::ranges::sort(seconds);
  const auto at = [&](double share) {
    const double rank = std::ceil(share * static_cast<double>(seconds.size()));
    return seconds[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
  };
  return {.mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) /
                  static_cast<double>(seconds.size()),
          .min = seconds.front(),
          .p50 = at(0.5),
          .p90 = at(0.9),
          .p99 = at(0.99),
          .max = seconds.back()};
}

void write_report(std::ostream& out, const StressOptions& options, const StressReport& report) {
  const DriftFit& calibration = report.calibration;
  if (report.interrupted) out << "interrupted: what was measured until then\n";
  out << "shape    " << (options.preset.empty() ? "" : options.preset + ": ") << options.tokens
      << " tokens, " << *options.layers << " layer(s), " << *options.query_heads << " query heads, "
      << *options.kv_heads << " KV heads, head_dim " << *options.head_dim << ", batch "
      << options.batch << '\n'
      << "select   " << show_estimator(options) << ", k " << options.top_k
      << " per KV head, backend " << name_of(kBackendNames, report.need.backend) << '\n';
  if (report.ingested_tokens > 0) {
    const std::string drift(name_of(kDriftNames, options.drift));
    out << format(
               "data     step-to-step overlap of the exact best tokens %.3f at N/100, %.3f at "
               "N/33 (%s %.2f, %.2f); query correlation %.3f",
               calibration.overlap.per_100, calibration.overlap.per_33, drift.c_str(),
               overlap_of(options.drift).per_100, overlap_of(options.drift).per_33,
               calibration.drift.correlation)
        << '\n'
        << format("ingest   %.2f s (%.2f GB/s while appending), memory ready in %.2f s",
                  report.ingest_seconds, ingest_rate(report) / 1e9, report.engine_seconds)
        << '\n';
  }
  const Stats::Snapshot& memory = report.memory;
  out << "memory   host pages " << show_bytes(static_cast<double>(memory.host_page_bytes_used))
      << " of " << show_bytes(static_cast<double>(memory.host_page_bytes)) << ", device "
      << show_bytes(static_cast<double>(memory.device_bytes)) << " (sketches "
      << show_bytes(static_cast<double>(memory.sketch_bytes_used)) << ")\n";
  write_decode(out, options, report);
  out << std::flush;
}

std::string to_json(const StressOptions& options, const StressReport& report) {
  const StepFigures f = figures_of(options, report.step_seconds, report.moved);
  const RetrievalConfig retrieval = options.retrieval();
  const Stats::Snapshot& memory = report.memory;
  const DriftFit& calibration = report.calibration;
  nlohmann::json json = {
      {"options",
       {{"preset", options.preset.empty() ? nlohmann::json() : nlohmann::json(options.preset)},
        {"tokens", options.tokens},
        {"layers", *options.layers},
        {"query_heads", *options.query_heads},
        {"kv_heads", *options.kv_heads},
        {"head_dim", *options.head_dim},
        {"batch", options.batch},
        {"steps", options.steps},
        {"k", options.top_k},
        {"estimator", name_of(kEstimatorNames, options.estimator)},
        {"bits", retrieval.sketch(*options.head_dim).num_planes},
        {"rule", name_of(kRuleNames, retrieval.rule)},
        {"code", name_of(kCodeNames, retrieval.code)},
        {"error_target", options.error_target},
        {"coarse_bits", options.coarse_bits},
        {"candidates", options.candidates},
        {"kv_dtype", name_of(kPageFormatNames, options.page_format)},
        {"seed", options.seed}}},
      {"backend", name_of(kBackendNames, report.need.backend)},
      {"interrupted", report.interrupted},
      {"steps_measured", report.step_seconds.size()},
      {"step_seconds", to_json(f.times)},
      {"tokens_per_second", number(f.tokens_per_second)},
      {"needle_recall", number(needle_recall(report))},
      {"needles", report.needles},
      {"device_bytes", memory.device_bytes},
      {"sketch_bytes", memory.sketch_bytes_used},
      {"host_bytes", memory.host_page_bytes},
      {"host_bytes_used", memory.host_page_bytes_used},
      {"links",
       {{"host_to_device_bytes_per_second", number(f.host_to_device)},
        {"device_to_host_bytes_per_second", number(f.device_to_host)},
        {"sketch_bytes_per_second", number(f.sketches)},
        {"device_resident_bytes_per_second", number(f.resident)}}},
      {"rows_selected", report.moved.rows_selected},
      {"rows_attended", report.moved.rows_attended},
      {"selected_overlap", number(report.selected_overlap)},
      {"row_cache",
       {{"rows", options.rows_kept(report.need.backend)},
        {"share", number(f.row_cache_share)},
        {"hits", report.moved.row_cache_hits},
        {"misses", report.moved.row_cache_misses},
        {"evictions", report.moved.row_cache_evictions},
        {"bytes", memory.row_cache_bytes}}},
      {"drift",
       {{"model", name_of(kDriftNames, options.drift)},
        {"query_correlation", calibration.drift.correlation},
        {"query_norm", calibration.drift.norm},
        {"overlap_n_100", calibration.overlap.per_100},
        {"overlap_n_33", calibration.overlap.per_33}}},
      {"ingest",
       {{"seconds", report.ingest_seconds},
        {"append_seconds", report.append_seconds},
        {"memory_seconds", report.engine_seconds},
        {"tokens", report.ingested_tokens},
        {"bytes_per_second", number(ingest_rate(report))}}}};
  json["hit_ratios"] = nlohmann::json::array();
  for (const StepFigures& row : share_rows(options, report)) {
    json["hit_ratios"].push_back({{"imposed", number(row.wanted)},
                                  {"found", number(row.row_cache_share)},
                                  {"step_seconds", to_json(row.times)},
                                  {"tokens_per_second", number(row.tokens_per_second)},
                                  {"host_to_device_bytes_per_second", number(row.host_to_device)}});
  }
  if (report.dense) {
    const StepTimes dense = step_times(report.dense->step_seconds);
    json["dense"] = {{"layer_seconds", to_json(dense)},
                     {"dense_over_sparse", number(dense.p50 * *options.layers / f.times.p50)},
                     {"output_error", number(report.dense->output_error)}};
  }
  return json.dump(2) + "\n";
}

}  // namespace kvtier::services
