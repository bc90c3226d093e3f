// Replays the tokens that steps of recorded traces select against a cache of rows and its policies,
// the pages of those tokens against the page pool, and both against Belady's
// optimum, as JSON.

#include "benchmarks/quality/origin.h"
#include "benchmarks/quality/page_cache.h"
#include "benchmarks/quality/row_cache.h"
#include "formats/atomic_file.h"
#include "services/console/command_line.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::quality {
namespace {

constexpr std::pair<const char*, RowCachePolicy> kPolicies[] = {{"clock", RowCachePolicy::kClock},
                                                                {"lru", RowCachePolicy::kLru},
                                                                {"score", RowCachePolicy::kScore}};

double share(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

/// Pages in so many frames as are a share of those that calls need.
nlohmann::json replay_pages(const std::vector<SelectedSteps>& selected, int kv_heads,
                            int page_tokens, const std::vector<double>& shares) {
  const std::vector<PageCall> calls = page_calls(selected, kv_heads, page_tokens);
  const PageDemand demand = page_demand(calls);
  nlohmann::json json = {{"page_tokens", page_tokens},
                         {"pages", demand.pages},
                         {"pages_needed", demand.needed},
                         {"most_of_a_call", demand.most}};
  for (const double part : shares) {
    const auto frames = static_cast<std::int64_t>(part * static_cast<double>(demand.pages));
    if (frames < demand.most) continue;  // a call's pages would not fit
    const std::int64_t best = belady_hits(calls, frames);
    const std::int64_t hits = pool_hits(calls, frames);
    const nlohmann::json score = {{"policy", "score"},
                                  {"hit_ratio", number(share(hits, demand.needed))},
                                  {"of_belady", number(share(hits, best))}};
    json["rows"].push_back({{"frames", frames},
                            {"share", part},
                            {"belady_hit_ratio", number(share(best, demand.needed))},
                            {"policies", nlohmann::json::array({score})}});
  }
  return json;
}

struct Settings {
  std::vector<int> capacities = {2048, 8192};
  std::vector<double> frame_shares = {0.25, 0.5, 0.75};
  int page_tokens = 64;
};

/// What is replayed, of a trace or of recorded ids.
struct Decoding {
  std::filesystem::path path;
  std::int64_t query_heads = 0, kv_heads = 0, context = 0;
  std::vector<SelectedSteps> selected;  ///< `[layer * kv_heads + kv_head]`
};

Decoding decoding_of(const std::string& file, const RetrievalConfig& retrieval) {
  if (is_selection_trace(file)) {
    const auto ids = read_selection_trace(file);
    return {.path = file,
            .query_heads = ids.query_heads,
            .kv_heads = ids.kv_heads,
            .context = ids.context,
            .selected = recorded_steps(ids)};
  }
  const services::Trace trace = services::Trace::open(file);
  return {.path = file,
          .query_heads = trace.query_heads(),
          .kv_heads = trace.kv_heads(),
          .context = trace.context(),
          .selected = select_steps(trace, retrieval)};
}

nlohmann::json replay(const Decoding& decoding, const Settings& settings) {
  const std::vector<SelectedSteps>& selected = decoding.selected;
  double overlap = 0.0;
  std::int64_t rows = 0;
  for (const SelectedSteps& steps : selected) {
    overlap += step_overlap(steps) / static_cast<double>(selected.size());
    rows += num_selected(steps);
  }
  const auto heads = static_cast<std::size_t>(decoding.kv_heads);
  nlohmann::json json = {{"file", decoding.path.filename().string()},
                         {"layers", selected.size() / heads},
                         {"kv_heads", decoding.kv_heads},
                         {"context_tokens", decoding.context},
                         {"steps", selected.front().size()},
                         {"rows_selected", rows},
                         {"step_overlap", number(overlap)}};
  const auto group = static_cast<std::uint32_t>(decoding.query_heads / decoding.kv_heads);
  for (const int capacity : settings.capacities) {
    std::int64_t best = 0;
    for (const SelectedSteps& steps : selected) best += belady_hits(steps, capacity);
    nlohmann::json row = {{"capacity", capacity}, {"belady_hit_ratio", number(share(best, rows))}};
    for (const auto& [name, policy] : kPolicies) {
      std::int64_t hits = 0;
      for (const SelectedSteps& steps : selected) {
        hits += policy_hits(steps, capacity, policy, group);
      }
      row["policies"].push_back({{"policy", name},
                                 {"hit_ratio", number(share(hits, rows))},
                                 {"of_belady", number(share(hits, best))}});
    }
    json["rows"].push_back(row);
    std::cout << json["file"].get<std::string>() << " " << row.dump() << "\n";
  }
  json["pages"] = replay_pages(selected, static_cast<int>(decoding.kv_heads), settings.page_tokens,
                               settings.frame_shares);
  std::cout << json["file"].get<std::string>() << " " << json["pages"].dump() << "\n";
  return json;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Replays selected rows against the policies of cached rows and the page pool, as JSON",
      "kvtier-quality-rows");
  std::vector<std::string> files;
  Settings settings;
  std::string json_file, made_by, hardware = this_machine();
  RetrievalConfig retrieval;
  retrieval.sparsity = 33.0;
  app.add_option(
         "TRACE", files,
         "Traces of `kvtier-llama record`, or as `kvtier replay` takes; ids of `kvtier replay "
         "--record-ids`, which are taken as they are")
      ->required();
  app.add_option("--capacity", settings.capacities, "Rows per KV head")
      ->delimiter(',')
      ->check(services::between(1, 65504))
      ->capture_default_str();
  app.add_option("--frames", settings.frame_shares, "Page frames, over the pages needed")
      ->delimiter(',')
      ->check(services::between(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--page-tokens", settings.page_tokens)
      ->check(services::between(1, 256))
      ->capture_default_str();
  app.add_option("--sparsity", retrieval.sparsity, "Visible tokens over selected ones")
      ->check(services::between(1.0, 1e6))
      ->capture_default_str();
  retrieval.num_planes = 256;
  app.add_option("--bits", retrieval.num_planes, "Bits of a key of the norm-aware estimator")
      ->check(services::between(64, 1024))
      ->capture_default_str();
  std::string rule = "priority", code = "scalar";
  app.add_option("--rule", rule, "top_k or priority")
      ->check(services::one_of({"top_k", "priority"}))
      ->capture_default_str();
  app.add_option("--code", code, "sign or scalar")
      ->check(services::one_of({"sign", "scalar"}))
      ->capture_default_str();
  app.add_option("--sink", retrieval.sink_tokens)->capture_default_str();
  app.add_option("--window", retrieval.recent_tokens)->capture_default_str();
  app.add_option("--made-by", made_by, "Commands that made the traces, for the report");
  app.add_option("--hardware", hardware, "Machine, for the report")->capture_default_str();
  app.add_option("--json", json_file, "Write the report to this file")->required();
  if (const auto status =
          services::parse_arguments(app, {argv + 1, argv + argc}, {std::cout, std::cerr})) {
    return *status;
  }
  retrieval.rule = rule == "priority" ? SelectionRule::kPriority : SelectionRule::kTopK;
  retrieval.code = code == "scalar" ? SketchCode::kScalar : SketchCode::kSign;
  formats::AtomicFile out(json_file);
  nlohmann::json json = origin(hardware, command_line("kvtier-quality-rows", argc, argv));
  json.update({{"made_by", made_by},
               {"selection", "per_kv_head"},
               {"estimator", "norm_aware"},
               {"rule", rule},
               {"code", code},
               {"bits", retrieval.num_planes},
               {"sparsity", retrieval.sparsity},
               {"sink_tokens", retrieval.sink_tokens},
               {"recent_tokens", retrieval.recent_tokens}});
  for (const std::string& file : files) {
    json["replays"].push_back(replay(decoding_of(file, retrieval), settings));
  }
  out.commit(json.dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace kvtier::quality

int main(int argc, char** argv) {
  return kvtier::services::with_errors_printed(std::cerr,
                                               [&] { return kvtier::quality::run(argc, argv); });
}
