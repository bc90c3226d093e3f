#include "tests/tree/include_rules.h"

#include <algorithm>
#include <map>
#include <regex>
#include <set>

namespace kvtier::testing {
namespace {

using Modules = std::set<std::string, std::less<>>;

// "api" is include/kvtier. A folder inside a module may be a module of its own. A module may always
// include itself; tests and benchmarks anything.
const std::map<std::string, Modules, std::less<>> kArrows{
    {"api", {}},
    {"transfer/device", {"api"}},
    {"transfer/kv", {"transfer/device", "api"}},
    {"transfer/row_cache", {"transfer/kv", "transfer/device", "api"}},
    {"transfer/tiers", {"api"}},
    {"hashing", {"transfer/kv", "transfer/device", "api"}},
    {"attention", {"transfer/row_cache", "transfer/kv", "transfer/device", "api"}},
    {"scoring",
     {"attention", "hashing", "transfer/row_cache", "transfer/kv", "transfer/device", "api"}},
    {"runtime/paging", {"transfer/tiers", "transfer/kv", "transfer/device", "api"}},
    {"runtime/sequence",
     {"runtime/paging", "hashing", "transfer/row_cache", "transfer/kv", "transfer/device", "api"}},
    {"runtime/engine",
     {"runtime/sequence", "runtime/paging", "attention", "scoring", "hashing", "transfer/row_cache",
      "transfer/kv", "transfer/device", "api"}},
    {"runtime/step",
     {"runtime/engine", "runtime/sequence", "runtime/paging", "attention", "scoring", "hashing",
      "transfer/row_cache", "transfer/kv", "transfer/device", "api"}},
    {"runtime/api",
     {"runtime/step", "runtime/engine", "attention", "scoring", "hashing", "transfer/kv",
      "transfer/device", "api"}},
    {"runtime/c_api", {"api"}},
    {"formats", {"api"}},
    {"proto", {}},
    {"services/wire", {"api", "proto", "transfer/tiers"}},
    {"services/base", {"services/wire", "api", "proto", "transfer/tiers"}},
    {"services/page_cache", {"services/base", "services/wire", "api", "proto", "transfer/tiers"}},
    {"services/core",
     {"services/page_cache", "services/base", "services/wire", "api", "proto", "transfer/tiers"}},
    {"services/dataplane",
     {"services/core", "services/page_cache", "services/base", "services/wire", "api", "proto"}},
    {"services/metrics",
     {"services/dataplane", "services/core", "services/base", "services/wire", "api", "proto"}},
    {"services/server",
     {"services/metrics", "services/dataplane", "services/core", "services/page_cache",
      "services/base", "services/wire", "api", "proto"}},
    {"services/client", {"services/wire", "api", "proto", "transfer/tiers"}},
    {"services/console", {"api", "formats"}},
    {"services/evaluation", {"api", "formats"}},
    {"services/serve",
     {"services/server", "services/metrics", "services/page_cache", "services/base",
      "services/wire", "services/console", "api", "proto", "transfer/tiers"}},
    {"services/tools",
     {"services/metrics", "services/base", "services/wire", "services/console",
      "services/evaluation", "api", "formats", "proto"}},
    {"services/program",
     {"services/console", "services/evaluation", "services/serve", "services/tools", "api"}},
    {"services", {"api", "proto"}},
    {"examples", {"api", "formats", "proto", "services/console"}},
};
const Modules kUnrestricted{"tests", "benchmarks"};

std::string module_of_path(std::string_view path) {
  std::string folder(path);
  while (folder.find('/') != std::string::npos) {
    folder.resize(folder.rfind('/'));
    if (kArrows.contains(folder)) return folder;
  }
  return folder;
}

std::string module_of_file(std::string_view file) {
  std::string first = module_of_path(file);
  return first == "include" ? "api" : first;
}

bool is_module(const std::string& name) { return kArrows.contains(name) && name != "api"; }

std::string module_of_include(std::string_view file, std::string_view target,
                              const Exists& exists) {
  if (target.starts_with("kvtier/v1/")) return "proto";
  std::string first = module_of_path(target);
  if (first == "kvtier" || first == "include") return "api";
  if (is_module(first) || kUnrestricted.contains(first)) return first;
  // Beside the including file, or below one of the folders above it.
  for (std::string folder(file); folder.find('/') != std::string::npos;) {
    folder.resize(folder.rfind('/'));
    if (exists(folder + "/" + std::string(target))) return module_of_file(folder + "/");
  }
  return {};
}

bool is_cuda_header(const std::string& target) {
  static const std::regex pattern(
      R"((cuda|cublas|curand|cufft|cusparse|nvml|nvtx|cooperative_groups)[^/]*(\.h(pp)?)?|)"
      R"((cuda|cub|thrust|nvtx3|cooperative_groups)/.*|mma\.h|device_launch_parameters\.h)");
  return std::regex_match(target, pattern);
}

bool may_see_cuda(const std::string& file) {
  static const std::regex pattern(R"(.*_cuda(_test)?\.[a-z]+|.*\.cuh)");
  return file == "transfer/device/cuda_check.h" || std::regex_match(file, pattern);
}

bool is_tbb_header(std::string_view target) {
  return target.starts_with("tbb/") || target.starts_with("oneapi/");
}

bool is_standard_header(const std::string& target) {
  static const Modules c_headers{"stdbool.h", "stddef.h", "stdint.h"};
  return c_headers.contains(target) || target.find_first_of("/.") == std::string::npos;
}

}  // namespace

std::vector<Include> find_includes(const std::vector<std::string>& lines) {
  static const std::regex pattern(R"re(^\s*#\s*include\s*([<"])([^>"]+)[>"].*)re");
  std::vector<Include> includes;
  for (const std::string& line : lines) {
    std::smatch match;
    if (std::regex_match(line, match, pattern)) {
      includes.push_back({match[2].str(), match[1].str() == "\""});
    }
  }
  return includes;
}

std::string include_problem(std::string_view file, const Include& include, const Exists& exists) {
  const std::string path(file);
  const std::string from = module_of_file(file);
  if (is_cuda_header(include.target)) {
    return may_see_cuda(path) ? "" : "CUDA header outside *_cuda.*: " + include.target;
  }
  if (kUnrestricted.contains(from)) return {};
  if (!kArrows.contains(from)) return "file outside every module: " + path;
  if (is_tbb_header(include.target) && path != "transfer/device/parallel.cc") {
    return "TBB outside transfer/device/parallel.cc: " + include.target;
  }

  const std::string to = module_of_include(file, include.target, exists);
  if (to == from || (!to.empty() && kArrows.at(from).contains(to))) return {};
  if (!to.empty()) return from + " must not include " + to + ": " + include.target;
  if (include.quoted) return "no such file in the repository: " + include.target;
  if (from == "api" && !is_standard_header(include.target)) {
    return "the public API includes the standard library only: " + include.target;
  }
  return {};
}

}  // namespace kvtier::testing
