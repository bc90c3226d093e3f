#include "tests/tree/include_rules.h"
#include "tests/tree/source_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace kvtier::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

bool nothing_exists(const std::string&) { return false; }

std::string problem(std::string_view file, const std::string& target, bool quoted = true) {
  return include_problem(file, {target, quoted}, nothing_exists);
}

TEST(IncludeRules, AcceptTheArrowsOfTheArchitecture) {
  EXPECT_THAT(problem("transfer/kv/rows.cc", "transfer/kv/rows.h"), IsEmpty());
  EXPECT_THAT(problem("transfer/kv/rows.cc", "kvtier/error.h"), IsEmpty());
  EXPECT_THAT(problem("hashing/sketch.h", "transfer/device/device.h"), IsEmpty());
  EXPECT_THAT(problem("services/serve/serve.cc", "transfer/tiers/page_tier.h"), IsEmpty());
  EXPECT_THAT(problem("services/tools/stress/stress.h", "services/evaluation/synthetic.h"),
              IsEmpty());
  EXPECT_THAT(problem("services/program/cli.cc", "services/tools/top/top.h"), IsEmpty());
  EXPECT_THAT(problem("scoring/selector.h", "hashing/sketch.h"), IsEmpty());
  EXPECT_THAT(problem("runtime/step/step.cc", "attention/flash_decode.h"), IsEmpty());
  EXPECT_THAT(problem("services/wire.cc", "kvtier/v1/session.pb.h"), IsEmpty());
  EXPECT_THAT(problem("examples/llama/weights.cc", "formats/safetensors.h"), IsEmpty());
  EXPECT_THAT(problem("tests/runtime/step_test.cc", "runtime/step/step.h"), IsEmpty());
  EXPECT_THAT(problem("benchmarks/attention.cc", "attention/flash_decode.h"), IsEmpty());
}

TEST(IncludeRules, FindAPlantedUpwardInclude) {
  EXPECT_THAT(problem("transfer/kv/rows.cc", "hashing/sketch.h"),
              HasSubstr("transfer/kv must not include hashing"));
  EXPECT_THAT(problem("transfer/tiers/page_tier.cc", "transfer/kv/rows.h"),
              HasSubstr("transfer/tiers must not include transfer/kv"));
  EXPECT_THAT(problem("transfer/kv/rows.cc", "transfer/tiers/page_tier.h"),
              HasSubstr("transfer/kv must not include transfer/tiers"));
  EXPECT_THAT(problem("transfer/kv/rows.cc", "transfer/row_cache/row_cache.h"),
              HasSubstr("transfer/kv must not include transfer/row_cache"));
  EXPECT_THAT(problem("transfer/device/device.cc", "transfer/kv/rows.h"),
              HasSubstr("transfer/device must not include transfer/kv"));
  EXPECT_THAT(problem("hashing/sketch.cc", "scoring/selector.h"),
              HasSubstr("hashing must not include scoring"));
  EXPECT_THAT(problem("attention/flash_decode.cc", "scoring/selector.h"),
              HasSubstr("attention must not include scoring"));
  EXPECT_THAT(problem("services/server.cc", "runtime/engine/session.h"),
              HasSubstr("services must not include runtime"));
  EXPECT_THAT(problem("services/server.cc", "runtime/engine/session.h", false),
              HasSubstr("services must not include runtime"));
  EXPECT_THAT(problem("services/serve/serve.cc", "services/evaluation/trace.h"),
              HasSubstr("services/serve must not include services/evaluation"));
  EXPECT_THAT(problem("services/server/server.cc", "services/tools/plan/plan.h"),
              HasSubstr("services/server must not include services/tools"));
  EXPECT_THAT(problem("services/evaluation/trace.cc", "services/tools/replay/replay.h"),
              HasSubstr("services/evaluation must not include services/tools"));
  EXPECT_THAT(problem("services/core/service_core.cc", "services/server/server.h"),
              HasSubstr("services/core must not include services/server"));
  EXPECT_THAT(problem("services/client/client.cc", "services/base/tenants.h"),
              HasSubstr("services/client must not include services/base"));
  EXPECT_THAT(problem("examples/llama/model.cc", "transfer/device/parallel.h"),
              HasSubstr("examples must not include transfer/device"));
  EXPECT_THAT(problem("formats/safetensors.cc", "transfer/device/device.h"),
              HasSubstr("formats must not include transfer/device"));
  EXPECT_THAT(problem("include/kvtier/engine.h", "transfer/device/device.h"),
              HasSubstr("api must not include transfer/device"));
  EXPECT_THAT(problem("runtime/sequence/pools.cc", "runtime/engine/engine_state.h"),
              HasSubstr("runtime/sequence must not include runtime/engine"));
  EXPECT_THAT(problem("runtime/engine/session.cc", "runtime/step/step.h"),
              HasSubstr("runtime/engine must not include runtime/step"));
  EXPECT_THAT(problem("runtime/c_api/c_api.cc", "runtime/engine/session.h"),
              HasSubstr("runtime/c_api must not include runtime/engine"));
  EXPECT_THAT(problem("runtime/api/engine.cc", "tests/support/oracle.h"),
              HasSubstr("runtime/api must not include tests"));
}

TEST(IncludeRules, FindCudaAboveTheSeam) {
  for (const char* header : {"cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda.h",
                             "cub/cub.cuh", "mma.h", "cublas_v2.h", "cuda/std/atomic"}) {
    EXPECT_THAT(problem("runtime/step/step.cc", header, false), HasSubstr("CUDA header")) << header;
    EXPECT_THAT(problem("tests/runtime/step_test.cc", header, false), HasSubstr("CUDA header"));
    EXPECT_THAT(problem("scoring/plan/selector_cuda.cu", header, false), IsEmpty()) << header;
    EXPECT_THAT(problem("transfer/device/device_cuda.cc", header, false), IsEmpty()) << header;
    EXPECT_THAT(problem("attention/row_loads.cuh", header, false), IsEmpty()) << header;
    EXPECT_THAT(problem("transfer/device/cuda_check.h", header, false), IsEmpty()) << header;
    EXPECT_THAT(problem("tests/runtime/graph_cuda_test.cc", header, false), IsEmpty()) << header;
  }
}

TEST(IncludeRules, KeepTbbInOneFile) {
  EXPECT_THAT(problem("hashing/sketch_cpu.cc", "tbb/parallel_for.h", false), HasSubstr("TBB"));
  EXPECT_THAT(problem("transfer/device/parallel.cc", "tbb/parallel_for.h", false), IsEmpty());
}

TEST(IncludeRules, KeepTheApiToTheStandardLibrary) {
  EXPECT_THAT(problem("include/kvtier/engine.h", "memory", false), IsEmpty());
  EXPECT_THAT(problem("include/kvtier/kvtier.h", "stdint.h", false), IsEmpty());
  EXPECT_THAT(problem("include/kvtier/engine.h", "spdlog/spdlog.h", false),
              HasSubstr("standard library only"));
  EXPECT_THAT(problem("include/kvtier/engine.h", "unistd.h", false),
              HasSubstr("standard library only"));
}

TEST(IncludeRules, ResolveNamesBesideTheFileAndReportUnknownOnes) {
  const Exists exists = [](const std::string& path) { return path == "examples/llama/model.h"; };

  EXPECT_THAT(include_problem("examples/llama/main.cc", {"model.h", true}, exists), IsEmpty());
  EXPECT_THAT(include_problem("examples/llama/main.cc", {"llama/model.h", true}, exists),
              IsEmpty());
  EXPECT_THAT(include_problem("examples/llama/main.cc", {"absent.h", true}, exists),
              HasSubstr("no such file"));
  EXPECT_THAT(include_problem("python/module.cc", {"vector", false}, exists),
              HasSubstr("outside every module"));
}

TEST(IncludeRules, ReadIncludeLines) {
  const std::vector<Include> includes =
      find_includes({"#include \"a/b.h\"", "  #  include <vector>  // why", "// #include <map>",
                     "int include = 0;"});

  ASSERT_EQ(includes.size(), 2U);
  EXPECT_EQ(includes[0].target, "a/b.h");
  EXPECT_TRUE(includes[0].quoted);
  EXPECT_EQ(includes[1].target, "vector");
  EXPECT_FALSE(includes[1].quoted);
}

TEST(Layers, EveryIncludeFollowsTheArrows) {
  const std::filesystem::path root = source_root();
  if (!std::filesystem::exists(root)) GTEST_SKIP() << "no source tree on this machine";
  const Exists exists = [&](const std::string& path) {
    return std::filesystem::exists(root / path);
  };

  std::size_t num_includes = 0;
  for (const SourceFile& file : read_tree(root, source_folders(), source_extensions())) {
    for (const Include& include : find_includes(file.lines)) {
      ++num_includes;
      EXPECT_THAT(include_problem(file.path, include, exists), IsEmpty()) << "in " << file.path;
    }
  }
  EXPECT_GT(num_includes, 100U) << "the scan found next to nothing in " << root;
}

TEST(Layers, EachFolderOfTheServiceIsOneTarget) {
  const std::filesystem::path root = source_root();
  if (!std::filesystem::exists(root)) GTEST_SKIP() << "no source tree on this machine";
  const std::regex statement(R"((?:add_library|add_executable|target_sources)\(\s*(\w+)([^)]*)\))");
  const std::regex source(R"([\w./]+\.(?:cc|h)\b)");
  std::map<std::string, std::set<std::string>> targets_of, folders_of;

  for (const SourceFile& file : read_tree(root, {"services"}, {".txt"})) {
    std::string text;
    for (const std::string& line : file.lines) text += line + '\n';
    for (std::sregex_iterator it(text.begin(), text.end(), statement), end; it != end; ++it) {
      const std::string target = (*it)[1], list = (*it)[2];
      for (std::sregex_iterator name(list.begin(), list.end(), source); name != end; ++name) {
        const auto path = std::filesystem::path(file.path).parent_path() / name->str();
        const std::string folder = path.lexically_normal().parent_path();
        if (folder == "services/program") continue;  // main, and the command line as a library
        targets_of[folder].insert(target);
        folders_of[target].insert(folder);
      }
    }
  }

  EXPECT_GT(targets_of.size(), 10U);
  for (const auto& [folder, targets] : targets_of) EXPECT_EQ(targets.size(), 1U) << folder;
  for (const auto& [target, folders] : folders_of) EXPECT_EQ(folders.size(), 1U) << target;
}

}  // namespace
}  // namespace kvtier::testing
