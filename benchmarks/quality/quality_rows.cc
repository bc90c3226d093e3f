// Replays the tokens that steps of recorded traces select against a cache of rows and its policies,
// and against Belady's optimum, as JSON.

#include "benchmarks/quality/origin.h"
#include "benchmarks/quality/program.h"
#include "benchmarks/quality/row_cache.h"
#include "services/atomic_file.h"

#include <CLI/CLI.hpp>

#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::quality {
namespace {

constexpr std::pair<const char*, HotPolicy> kPolicies[] = {
    {"clock", HotPolicy::kClock}, {"lru", HotPolicy::kLru}, {"score", HotPolicy::kScore}};

double share(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

nlohmann::json replay(const services::Trace& trace, const RetrievalConfig& retrieval,
                      const std::vector<int>& capacities) {
  const std::vector<SelectedSteps> selected = select_steps(trace, retrieval);
  double overlap = 0.0;
  std::int64_t rows = 0;
  for (const SelectedSteps& steps : selected) {
    overlap += step_overlap(steps) / static_cast<double>(selected.size());
    rows += num_selected(steps);
  }
  nlohmann::json json = {{"file", trace.path().filename().string()},
                         {"layers", trace.layers().size()},
                         {"kv_heads", trace.kv_heads()},
                         {"context_tokens", trace.context()},
                         {"steps", trace.steps()},
                         {"rows_selected", rows},
                         {"step_overlap", number(overlap)}};
  const auto group = static_cast<std::uint32_t>(trace.query_heads() / trace.kv_heads());
  for (const int capacity : capacities) {
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
  return json;
}

int run(int argc, char** argv) {
  CLI::App app("Replays selected rows against the policies of hot rows, as JSON");
  std::vector<std::string> files;
  std::vector<int> capacities = {2048, 8192};
  std::string json_file, made_by, hardware = this_machine();
  RetrievalConfig retrieval;
  retrieval.estimator = Estimator::kNormAware;
  retrieval.selection = Selection::kPerKvHead;
  retrieval.sparsity = 33.0;
  app.add_option("TRACE", files, "Traces of `kvtier-llama record`, or as `kvtier replay` takes")
      ->required();
  app.add_option("--capacity", capacities, "Rows per KV head")
      ->delimiter(',')
      ->check(CLI::Range(1, 65504))
      ->capture_default_str();
  app.add_option("--sparsity", retrieval.sparsity, "Visible tokens over selected ones")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  app.add_option("--bits", retrieval.num_planes, "Planes of the norm-aware estimator")
      ->check(CLI::Range(64, 1024))
      ->capture_default_str();
  app.add_option("--made-by", made_by, "Commands that made the traces, for the report");
  app.add_option("--hardware", hardware, "Machine, for the report")->capture_default_str();
  app.add_option("--json", json_file, "Write the report to this file")->required();
  CLI11_PARSE(app, argc, argv);
  services::AtomicFile out(json_file);
  nlohmann::json json = origin(hardware, command_line("kvtier-quality-rows", argc, argv));
  json.update({{"made_by", made_by},
               {"selection", "per_kv_head"},
               {"estimator", "norm_aware"},
               {"bits", retrieval.num_planes},
               {"sparsity", retrieval.sparsity},
               {"sink_tokens", retrieval.sink_tokens},
               {"recent_tokens", retrieval.recent_tokens}});
  for (const std::string& file : files) {
    json["replays"].push_back(replay(services::Trace::open(file), retrieval, capacities));
  }
  out.commit(json.dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace kvtier::quality

int main(int argc, char** argv) {
  return kvtier::quality::run_program(kvtier::quality::run, argc, argv);
}
