#include "llama/report.h"

#include "kvtier/memory.h"

#include "formats/atomic_file.h"
#include "formats/safetensors.h"
#include "include/types/failure.h"
#include "services/console/text.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <set>

namespace kvtier::llama {
namespace {

using services::format;

std::string bytes_text(double bytes) {
  if (bytes >= static_cast<double>(GiB))
    return format("%.2f GiB", bytes / static_cast<double>(GiB));
  if (bytes >= static_cast<double>(MiB))
    return format("%.2f MiB", bytes / static_cast<double>(MiB));
  return format("%.1f KiB", bytes / static_cast<double>(KiB));
}

/// Divergences span many magnitudes: fixed-point where that says something. Six characters.
std::string divergence_text(double kl) {
  if (kl >= 10.0) return format("%.3g", kl);
  return kl >= 1e-4 || kl == 0.0 ? format("%.4f", kl) : format("%.0e", kl);
}

std::string grouped(double value) {
  std::string digits = format("%.0f", value);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

bool is_needle_llama(const EvalRow& row) { return row.kind == "needle-llama"; }

void print_header(std::ostream& out, const EvalRow& row, const std::string& place) {
  const bool several = row.sequences > 1;
  out << format("%s   %s tokens of context, then %lld tokens of %s, ", row.task.c_str(),
                grouped(static_cast<double>(row.context)).c_str(), static_cast<long long>(row.tail),
                is_needle_llama(row) ? "questions and answers" : row.kind.c_str())
      << row.sequences << (several ? " sequences" : " sequence") << ", backend " << place << "\n\n";
  if (!is_needle_llama(row)) {
    out << format("  %-40s %8s %6s %7s %6s %6s %6s %6s %7s %6s\n", "method", "sparsity", "exact",
                  "ppl", "KL", "KL p99", "KL max", "same", "rows", "tok/s");
    out << "  " << std::string(107, '-') << '\n';
    return;
  }
  out << format("  %-26s %-14s %8s %6s %6s %6s %6s %6s %7s %6s %6s\n", "estimator, value weighting",
                "selection", "sparsity", "exact", "first", "fwe", "KL", "KL ans", "rows", "eff.",
                "tok/s");
  out << "  " << std::string(107, '-') << '\n';
}

/// How a method that is not dense takes tokens, and from which bits.
std::string how_of(const Method& method, int head_dim) {
  const RetrievalConfig& retrieval = method.retrieval;
  return format("%s, %d bits, %s", rule_name(retrieval.rule).c_str(),
                retrieval.sketch(head_dim).num_planes, code_name(retrieval.code).c_str());
}

void print_row(std::ostream& out, const EvalRow& row) {
  const bool dense = row.method.dense;
  const std::string selection = dense ? "-" : selection_name(row.method.retrieval.selection);
  const std::string sparsity = size_text(row.method);
  const std::string rows = row.measured() ? grouped(row.rows_attended) : "-";
  const std::string speed = grouped(row.tokens_per_second);
  if (!is_needle_llama(row)) {
    const std::string name = row.method.label + (dense ? "" : ", " + selection);
    out << format(
        "  %-40s %8s %6.3f %7s %6s %6s %6s %6.3f %7s %6s\n", name.c_str(), sparsity.c_str(),
        row.exact, format(row.perplexity < 1000.0 ? "%.3f" : "%.3g", row.perplexity).c_str(),
        divergence_text(row.kl).c_str(), divergence_text(row.kl_p99).c_str(),
        divergence_text(row.kl_max).c_str(), row.same_argmax, rows.c_str(), speed.c_str());
    return;
  }
  out << format(
      "  %-26s %-14s %8s %6.3f %6.3f %6.3f %6s %6s %7s %6s %6s\n", row.method.label.c_str(),
      selection.c_str(), sparsity.c_str(), row.exact, row.first_token, row.fwe,
      divergence_text(row.kl).c_str(), divergence_text(row.kl_answers).c_str(), rows.c_str(),
      row.measured() ? format("%.1fx", row.effective_sparsity).c_str() : "-", speed.c_str());
}

void print_legend(std::ostream& out, const EvalRow& row) {
  if (!is_needle_llama(row)) {
    out << "\n  exact: share of answers wholly right; ppl: perplexity of the tokens after the "
           "context\n"
           "  KL: divergence of the next-token distribution from dense, nats: mean, 99th "
           "percentile, largest\n"
           "  same: share of positions whose likeliest token is that of dense\n"
           "  rows: keys and values attended per query token, KV head and layer, sink and window"
           " included\n";
    return;
  }
  out << "\n  exact, first, fwe: shares of answers wholly right, of first tokens right, of frequent"
         " words right\n"
         "  KL: divergence of the next-token distribution from dense, nats (all positions; answer"
         " positions)\n"
         "  rows: keys and values attended per query token, KV head and layer, sink and window"
         " included;\n"
         "  eff.: rows visible over rows attended\n";
}

/// Returns what the sketches of one method take of a session as long as `row`'s.
std::size_t sketch_bytes(const ModelConfig& model, const EvalRow& row) {
  Config config;
  config.model.layers = model.layers;
  config.model.query_heads = model.query_heads;
  config.model.kv_heads = model.kv_heads;
  config.model.head_dim = model.head_dim;
  config.retrieval = row.method.retrieval;
  config.memory.max_session_tokens = row.context + row.tail;
  return session_memory(config, row.context + row.tail).sketches;
}

void print_placement(std::ostream& out, const ModelConfig& model, const EvalResult& result) {
  const EvalRow& row =
      *std::max_element(result.rows.begin(), result.rows.end(),
                        [](const EvalRow& a, const EvalRow& b) { return a.context < b.context; });
  const bool on_cuda = result.place == backend_name(Backend::kCuda);
  const auto host = static_cast<double>(row.host_bytes);
  out << "Where the KV lives (" << row.task << ", backend " << result.place << ")\n\n";
  out << format("  %-18s %10s   %s\n", "keys and values", bytes_text(host).c_str(),
                on_cuda ? "pages in pinned host memory" : "pages in host memory");
  std::set<std::string> listed;
  for (const EvalRow& other : result.rows) {
    if (other.method.dense || other.task != row.task) continue;
    const std::string how = how_of(other.method, model.head_dim);
    if (!listed.insert(how).second) continue;
    const auto bytes = static_cast<double>(sketch_bytes(model, other));
    out << format("  %-18s %10s   %s: %.1f %% of the keys and values%s\n", "sketches",
                  bytes_text(bytes).c_str(), how.c_str(), 100.0 * bytes / host,
                  on_cuda ? ", in device memory" : "");
  }
  const auto row_bytes = static_cast<double>(result.row_bytes);
  double fewest = row.rows_attended;
  for (const EvalRow& other : result.rows) {
    if (other.task == row.task) fewest = std::min(fewest, other.rows_attended);
  }
  const double visible = static_cast<double>(row.context) + (static_cast<double>(row.tail) + 1) / 2;
  out << format("  %-18s %10s   of %s visible, in the sparsest case: %s read per token and layer\n",
                "rows attended", grouped(fewest).c_str(), grouped(visible).c_str(),
                bytes_text(fewest * row_bytes * model.kv_heads).c_str());
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::string text(20, '\0');
  std::strftime(text.data(), text.size() + 1, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

nlohmann::json row_json(const EvalRow& row, const std::string& place, int head_dim) {
  nlohmann::json json;
  const RetrievalConfig& retrieval = row.method.retrieval;
  const bool dense = row.method.dense;
  json["case"] = row.task;
  json["kind"] = row.kind;
  json["method"] = row.method.label;
  const bool sized = dense || row.method.sparsity > 0.0;
  json["sparsity"] = sized ? nlohmann::json(dense ? 0.0 : row.method.sparsity) : nlohmann::json();
  json["estimator"] = dense ? "dense" : estimator_name(retrieval.estimator);
  json["value_weighting"] = dense ? "none" : weighting_name(retrieval.weighting());
  json["selection"] = dense ? "none" : selection_name(retrieval.selection);
  json["sequences"] = row.sequences;
  json["backend"] = place;
  json["exact"] = row.exact;
  json["first_token"] = row.first_token;
  json["fwe"] = row.fwe;
  json["kl"] = row.kl;
  json["kl_answers"] = row.kl_answers;
  json["kl_p99"] = row.kl_p99;
  json["kl_max"] = row.kl_max;
  json["same_argmax"] = row.same_argmax;
  json["perplexity"] = row.perplexity;
  json["tokens_per_second"] = row.tokens_per_second;
  if (row.measured()) {
    json["rows_attended"] = row.rows_attended;
    json["effective_sparsity"] = row.effective_sparsity;
    json["device_bytes"] = row.device_bytes;
    json["host_bytes"] = row.host_bytes;
    json["pages_restored"] = row.pages_restored;
    json["sketch_bytes_read"] = row.sketch_bytes_read;
  }
  if (dense) return json;
  const SketchConfig sketch = retrieval.sketch(head_dim);
  json["rule"] = rule_name(retrieval.rule);
  json["code"] = code_name(retrieval.code);
  json["error_target"] = sized ? retrieval.error_target : retrieval.error_in_force();
  if (retrieval.coarse_bits > 0) {
    json["coarse_bits"] = retrieval.coarse_bits;
    json["candidates"] = retrieval.candidates;
  }
  json["top_k"] = retrieval.top_k;
  json["sketch_bits"] = sketch.num_planes;
  json["plane_kind"] = sketch.kind == PlaneKind::kGaussian ? "gaussian" : "orthogonal";
  json["seed"] = retrieval.seed;
  return json;
}

}  // namespace

std::string size_text(const Method& method) {
  if (method.dense) return "-";
  return method.sparsity > 0.0 ? format("%gx", method.sparsity)
                               : format("e=%g", method.retrieval.error_in_force());
}

void print_report(std::ostream& out, const ModelConfig& model, const EvalResult& result) {
  const EvalRow* previous = nullptr;
  std::string heading;
  for (const EvalRow& row : result.rows) {
    if (previous == nullptr || previous->task != row.task) {
      if (previous != nullptr) out << '\n';
      print_header(out, row, result.place);
      heading.clear();
    }
    const std::string how = row.method.dense ? "" : how_of(row.method, model.head_dim);
    if (!how.empty() && how != heading) out << "  " << how << ":\n";
    heading = how;
    print_row(out, row);
    previous = &row;
  }
  if (previous == nullptr) return;
  print_legend(out, *previous);
  out << '\n';
  if (previous->measured()) {
    print_placement(out, model, result);
  } else {
    out << "The KV lives in the server at " << result.place << ", which counts rows and bytes.\n";
  }
  for (const std::string& note : result.left_out) out << "\nleft out: " << note << '\n';
}

void check_writable(const std::filesystem::path& path, const std::string& option) {
  if (path.empty()) return;
  if (path == "-") {
    throw_invalid(option, "a file", "- (./- for a file of this name)");
  }
  try {
    const formats::AtomicFile file(path);
  } catch (const Error& error) {
    throw Error(error.code(), option + ": " + error.what());
  }
}

void write_json(const std::filesystem::path& path, const RunInfo& info, const EvalResult& result) {
  nlohmann::json root;
  root["model"] = info.model;
  root["command"] = info.command;
  root["date"] = utc_now();
  root["threads"] = info.threads;
  root["prefill_seconds"] = result.prefill_seconds;
  root["cases"] = nlohmann::json::array();
  for (const EvalRow& row : result.rows)
    root["cases"].push_back(row_json(row, result.place, result.head_dim));

  formats::AtomicFile(path).commit(root.dump(1) + "\n");
}

void write_json(const std::filesystem::path& path, const std::string& command,
                const ModelConfig& model, const std::vector<BenchRow>& rows) {
  nlohmann::json root;
  root["command"] = command;
  root["date"] = utc_now();
  root["rows"] = nlohmann::json::array();
  for (const BenchRow& row : rows) {
    root["rows"].push_back({{"what", "model"},
                            {"tokens", row.context},
                            {"attention", row.attention},
                            {"layers", model.layers},
                            {"hidden", model.hidden_size},
                            {"inner", model.intermediate_size},
                            {"query_heads", model.query_heads},
                            {"kv_heads", model.kv_heads},
                            {"head_dim", model.head_dim},
                            {"vocabulary", model.vocab_size},
                            {"us", row.us},
                            {"us_min", row.us_min},
                            {"us_max", row.us_max},
                            {"us_p99", row.us_p99},
                            {"batch", row.batch},
                            {"tokens_per_second", row.tokens_per_second}});
    if (row.over_dense > 0.0) root["rows"].back()["over_dense"] = row.over_dense;
  }
  formats::AtomicFile(path).commit(root.dump(1) + "\n");
}

void write_logits(const std::filesystem::path& path, std::int64_t vocab_size,
                  const EvalResult& result) {
  std::map<std::string, formats::Tensor> tensors;
  for (const TailLogits& tail : result.logits) {
    const std::string name =
        tail.task + "." + std::to_string(tail.sequence) + "." + std::to_string(tail.row);
    const auto count = static_cast<std::int64_t>(tail.logits.size());
    tensors[name] = {.dtype = DType::kFloat32,
                     .shape = {count / vocab_size, vocab_size},
                     .data = reinterpret_cast<const std::byte*>(tail.logits.data()),
                     .bytes = tail.logits.size() * sizeof(float)};
  }
  formats::write_safetensors(path, tensors);
}

}  // namespace kvtier::llama
