#include "services/tools/plan/plan.h"

#include "kvtier/calibration.h"
#include "kvtier/error.h"

#include "tests/services/evaluation/trace_fixture.h"

#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kShape =
    R"({"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64})";

class PlanTest : public FolderTest {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(file(name)) << text;
    return file(name).string();
  }

  /// A context of 64K tokens of a small model.
  PlanCommand command() {
    PlanCommand command;
    command.model = write("config.json", kShape);
    command.gpu_bytes = GiB;
    command.options.backend = Backend::kCpu;
    command.options.top_k = 512;
    return command;
  }

  template <typename Call>
  std::string refusal(ErrorCode code, Call call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.what();
    }
    ADD_FAILURE() << "expected an error";
    return "";
  }
};

TEST_F(PlanTest, ReadsTheShapeOfTheDecoder) {
  StressOptions options;
  read_shape(
      write("nested.json", std::string(R"({"hidden_size": 1, "text_config": )") + kShape + "}"),
      options);
  EXPECT_EQ(options.layers, 4);
  EXPECT_EQ(options.query_heads, 8);
  EXPECT_EQ(options.kv_heads, 2);
  EXPECT_EQ(options.head_dim, 64);

  StressOptions derived;
  read_shape(write("derived.json",
                   R"({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 512,
                       "num_key_value_heads": null, "head_dim": null})"),
             derived);
  EXPECT_EQ(derived.kv_heads, 4);
  EXPECT_EQ(derived.head_dim, 128);
}

TEST_F(PlanTest, FindsTheLayersWithAWindow) {
  const auto windows = [&](const std::string& more) {
    const std::string shape = kShape;  // of 4 layers
    const std::string path =
        write("windows.json", shape.substr(0, shape.size() - 1) + ", " + more + "}");
    const WindowLayers found = read_windows(path);
    return std::pair{found.layers, found.tokens};
  };
  const std::string window = R"("sliding_window": 512)";
  EXPECT_EQ(windows(R"("sliding_window": null)"), std::pair(0, 0));
  EXPECT_EQ(windows(window), std::pair(4, 512));  // Mistral
  EXPECT_EQ(windows(window + R"(, "layer_types": ["sliding_attention", "full_attention",
                                 "full_attention", "sliding_attention"])"),
            std::pair(2, 512));
  // Qwen2, which has a window that it does not use.
  EXPECT_EQ(windows(window + R"(, "use_sliding_window": false, "max_window_layers": 1)"),
            std::pair(0, 0));
  EXPECT_EQ(windows(window + R"(, "use_sliding_window": true, "max_window_layers": 1)"),
            std::pair(3, 512));
  EXPECT_EQ(windows(window + R"(, "use_sliding_window": true, "max_window_layers": 9)"),
            std::pair(0, 512));
  EXPECT_EQ(windows(window + R"(, "model_type": "gemma2")"), std::pair(2, 512));
  EXPECT_EQ(windows(window + R"(, "model_type": "gemma3_text")"), std::pair(4, 512));
  EXPECT_EQ(windows(window + R"(, "sliding_window_pattern": 3)"), std::pair(3, 512));
  EXPECT_THAT(refusal(ErrorCode::kInvalidArgument, [&] { windows(R"("sliding_window": "wide")"); }),
              HasSubstr("sliding_window: expected 1 to 1048576, found \"wide\""));
}

TEST_F(PlanTest, RefusesConfigurationsThatDoNotSay) {
  StressOptions options;
  const auto read = [&](const std::string& text) {
    const std::string path = write("bad.json", text);
    return refusal(ErrorCode::kInvalidArgument, [&] { read_shape(path, options); });
  };
  EXPECT_THAT(read("[]"), HasSubstr("expected an object of JSON"));
  EXPECT_THAT(read("{"), HasSubstr("expected an object of JSON"));
  EXPECT_THAT(read(R"({"num_attention_heads": 4})"), HasSubstr("expected num_hidden_layers"));
  EXPECT_THAT(read(R"({"num_attention_heads": "4"})"),
              HasSubstr("num_attention_heads: expected 1 to 1048576, found \"4\""));
  const std::string shape = kShape;
  const std::string all_but_brace = shape.substr(0, shape.size() - 1);
  EXPECT_THAT(read(all_but_brace + R"(, "kv_lora_rank": 512})"),
              HasSubstr("expected standard attention, found latent attention "
                        "(kv_lora_rank 512)"));
  EXPECT_FALSE(options.layers);
  EXPECT_NO_THROW(
      read_shape(write("standard.json", all_but_brace + R"(, "kv_lora_rank": null})"), options));
  EXPECT_THAT(refusal(ErrorCode::kNotFound, [&] { read_shape(file("none"), options); }),
              HasSubstr("--model: expected a file"));
}

TEST_F(PlanTest, CountsTheWeightsBesideTheConfiguration) {
  const std::string config = write("config.json", kShape);
  EXPECT_EQ(weight_bytes_beside(config), 0U);
  write("a.safetensors", std::string(1000, 'x'));
  write("b.safetensors", std::string(500, 'x'));
  EXPECT_EQ(weight_bytes_beside(config), 1500U);
  write("model.safetensors.index.json", R"({"metadata": {"total_size": 1234}})");
  EXPECT_EQ(weight_bytes_beside(config), 1234U);
}

TEST_F(PlanTest, FollowsTheFormulasOfTheManual) {
  PlanCommand wanted = command();
  wanted.weight_bytes = 100 * MiB;
  const Plan plan = make_plan(wanted);
  // docs/memory.md: tokens with the steps of a run, in whole pages and blocks.
  constexpr std::size_t kTokens = 65536 + kWarmupSteps + 1;
  EXPECT_EQ(plan.need.pages, 4U * 2 * 4 * 64 * ((kTokens + 63) / 64 * 64));
  EXPECT_EQ(plan.need.sketches, 4U * 2 * 36 * 1024 * (kTokens / 1024 + 1));
  const auto regions = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  EXPECT_EQ(plan.need.tables, 4 * (256 + regions(8 * ((kTokens + 63) / 64)) +
                                   regions(8 * ((kTokens + 1023) / 1024)) + 2 * 256 * 129));
  constexpr std::size_t kCachedRows = 4 * 512;  // four times those of a step
  EXPECT_EQ(plan.row_cache, 4U * 2 * (kCachedRows / 32) * (32 * (4 * 64 + 8) + 16));
  EXPECT_TRUE(plan.fits_gpu);
  EXPECT_TRUE(plan.fits_host);
  EXPECT_FALSE(plan.fetch_seconds || plan.read_seconds);
}

TEST_F(PlanTest, FindsTheLargestContext) {
  PlanCommand wanted = command();
  wanted.weight_bytes = 900 * MiB;
  const std::int64_t largest = make_plan(wanted).largest_tokens;
  EXPECT_GT(largest, 0);
  wanted.options.tokens = largest;
  EXPECT_TRUE(make_plan(wanted).fits_gpu);
  wanted.options.tokens = largest + 1024;
  EXPECT_FALSE(make_plan(wanted).fits_gpu);

  wanted.host_bytes = 64 * MiB;  // pages of 2 KiB a token
  wanted.options.tokens = 65536;
  EXPECT_FALSE(make_plan(wanted).fits_host);
  EXPECT_TRUE(make_plan(wanted).fits_gpu);
  EXPECT_EQ(make_plan(wanted).largest_tokens, 31 * 1024);
  wanted.weight_bytes = 2 * GiB;
  EXPECT_EQ(make_plan(wanted).largest_tokens, 0);
}

TEST_F(PlanTest, TakesRatesFromTheCalibration) {
  Calibration calibration;
  calibration.device = "a GPU";
  calibration.region_bytes = GiB;
  calibration.best = HostAllocation::kRegistered;
  calibration.entries = {{.allocation = HostAllocation::kManaged, .gb_per_s = {90, 90, 90}},
                         {.allocation = HostAllocation::kRegistered, .gb_per_s = {20, 30, 40}}};
  PlanCommand wanted = command();
  wanted.calibration = write("calibration", to_text(calibration));
  wanted.options.top_k = 4096;  // 8,192 rows a gather: nearest in ratio to 4,096
  wanted.hits = 0.25;           // 6,144
  wanted.device_gb_per_s = 1000.0;
  wanted.weight_bytes = 500'000'000;
  const Plan plan = make_plan(wanted);
  ASSERT_TRUE(plan.fetch_seconds && plan.read_seconds);
  EXPECT_NEAR(*plan.fetch_seconds, 4 * 6144 * 256 / 20e9, 1e-12);
  const auto read = static_cast<double>(500'000'000 + plan.need.sketches);
  EXPECT_NEAR(*plan.read_seconds, read / 1e12, 1e-12);

  wanted.options.page_format = PageFormat::kInt8;
  EXPECT_NEAR(*make_plan(wanted).fetch_seconds, 4 * 6144 * 136 / 20e9, 1e-12);
}

TEST_F(PlanTest, LayersWithAWindowReadThatAlone) {
  Calibration calibration;
  calibration.device = "a GPU";
  calibration.region_bytes = GiB;
  calibration.best = HostAllocation::kRegistered;
  calibration.entries = {{.allocation = HostAllocation::kRegistered, .gb_per_s = {20, 30, 40}}};
  PlanCommand wanted = command();
  wanted.calibration = write("calibration", to_text(calibration));
  wanted.options.top_k = 4096;
  wanted.device_gb_per_s = 1000.0;
  wanted.weight_bytes = 0;
  const Plan full = make_plan(wanted);
  const std::string shape = kShape;
  wanted.model = write("windows.json", shape.substr(0, shape.size() - 1) + R"(,
    "sliding_window": 1088, "layer_types": ["sliding_attention", "sliding_attention",
    "sliding_attention", "full_attention"]})");
  const Plan plan = make_plan(wanted);
  EXPECT_EQ(plan.need.pages, full.need.pages);
  EXPECT_EQ(plan.need.sketches, full.need.sketches);
  // 64 of the window are on the GPU.
  EXPECT_NEAR(*plan.fetch_seconds, 256 * (8192 / 20e9 + 3 * 2048 / 20e9), 1e-12);
  EXPECT_NEAR(*plan.read_seconds, *full.read_seconds / 4, 1e-12);
  wanted.options.tokens = 1024;
  wanted.options.top_k = 512;
  EXPECT_NEAR(*make_plan(wanted).fetch_seconds, 256 * (1024 / 20e9 + 3 * 1920 / 20e9), 1e-12);
}

TEST_F(PlanTest, TakesTheShapeOfAPreset) {
  const CliResult result =
      run_kvtier({"plan", "--preset", "qwen3-8b", "--backend", "cpu", "--gpu", "80G"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith("36 layers, 32 query heads, 8 KV heads, head_dim 128; 65536"));
  EXPECT_THAT(result.out, HasSubstr("not counted"));

  const CliResult neither = run_kvtier({"plan", "--gpu", "80G"});
  EXPECT_EQ(neither.code, 2);
  EXPECT_THAT(neither.err, HasSubstr("error: expected --model or --preset, found none"));
  const CliResult both =
      run_kvtier({"plan", "--preset", "qwen3-8b", "--model", "config.json", "--gpu", "80G"});
  EXPECT_EQ(both.code, 2);
  EXPECT_THAT(both.err, HasSubstr("found both"));
}

/// Splits a command line at its spaces.
std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

TEST(MemoryManual, ShowsWhatTheProgramPrints) {
  const std::filesystem::path manual =
      recorded_trace().parent_path().parent_path().parent_path() / "docs" / "memory.md";
  if (!exists(manual)) GTEST_SKIP() << "no source tree on this machine";
  const std::string text = read_text(manual);
  const std::string begin = "```sh\nbuild/current/services/kvtier ";
  const std::string between = "\n```\n```\n";
  int examples = 0;
  for (std::size_t at = text.find(begin); at != std::string::npos; at = text.find(begin, at + 1)) {
    const std::size_t command = at + begin.size();
    const std::size_t end = text.find(between, command);
    ASSERT_NE(end, std::string::npos);
    const std::size_t output = end + between.size();
    const CliResult result = run_kvtier(words(text.substr(command, end - command)));
    EXPECT_EQ(result.out + result.err, text.substr(output, text.find("```\n", output) - output));
    ++examples;
  }
  EXPECT_EQ(examples, 2);
}

TEST_F(PlanTest, SaysWhichMemoryDoesNotFit) {
  const auto plan = [&](const char* gpu, const char* host) {
    return run_kvtier({"plan", "--model", write("config.json", kShape), "--backend", "cpu", "--gpu",
                       gpu, "--host", host});
  };
  const CliResult fits = plan("1G", "1G");
  EXPECT_EQ(fits.code, 0) << fits.err;
  EXPECT_THAT(fits.out, HasSubstr("of 1.0 GiB  host memory: fits\n"));
  EXPECT_THAT(fits.out, HasSubstr("of 1.0 GiB  fits, without weights\n"));

  const CliResult host = plan("1G", "1M");
  EXPECT_EQ(host.code, 3);
  EXPECT_THAT(host.out, HasSubstr("of 1.0 MiB  host memory: does not fit\n"));
  EXPECT_THAT(host.out, HasSubstr("of 1.0 GiB  fits, without weights\n"));

  const CliResult gpu = plan("1M", "1G");
  EXPECT_EQ(gpu.code, 3);
  EXPECT_THAT(gpu.out, HasSubstr("of 1.0 GiB  host memory: fits\n"));
  EXPECT_THAT(gpu.out, HasSubstr("of 1.0 MiB  does not fit, without weights\n"));
}

TEST_F(PlanTest, IsACommand) {
  const std::string config = write("config.json", kShape);
  const CliResult result =
      run_kvtier({"plan", "--model", file("").string(), "--tokens", "16K", "--gpu", "1G"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("4 layers, 8 query heads, 2 KV heads, head_dim 64; 16384"));
  EXPECT_THAT(result.out, HasSubstr("256 bits\n"));
  EXPECT_THAT(result.out, HasSubstr("not counted"));
  EXPECT_THAT(result.out, HasSubstr("largest context"));

  EXPECT_EQ(run_kvtier({"plan", "--model", config}).code, 2);
  const CliResult size = run_kvtier({"plan", "--model", config, "--gpu", "80 apples"});
  EXPECT_EQ(size.code, 2);
  EXPECT_THAT(size.err, HasSubstr("--gpu: expected a size such as 64K, found 80 apples"));
  const CliResult k = run_kvtier({"plan", "--model", config, "--gpu", "1G", "--k", "0"});
  EXPECT_EQ(k.code, 2);
  EXPECT_THAT(k.err, HasSubstr("--k: expected a number of at least 1, found 0"));
}

TEST_F(PlanTest, RefusesValuesOfOptionsWithOneExitCode) {
  const auto plan = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"plan", "--model", write("config.json", kShape), "--gpu", "1G"};
    all.insert(all.end(), more.begin(), more.end());
    return run_kvtier(all);
  };
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--batch", "0"}, "error: --batch: expected 1 to 64, found 0\n"},
      {{"--tokens", "100"}, "error: --tokens: expected 1024 to 536870912, found 100\n"},
      {{"--k", "128K"}, "--k: expected a number of at least 1, found 128K"},
      {{"--tokens", "1K", "--k", "2000"}, "--k: expected 1..1024, found 2000"},
      {{"--bits", "100"}, "--bits: expected "},
      {{"--calibration", file("none").string()},
       "NOT_FOUND: --calibration: expected one that can be read, found "},
      {{"--hits", "2"}, "--hits: "}};
  for (const auto& [arguments, message] : cases) {
    const CliResult result = plan(arguments);
    EXPECT_EQ(result.code, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "");
  }
  EXPECT_EQ(plan({"--tokens", "1K"}).code, 0) << "the default k is above";
}

TEST_F(PlanTest, PromisesNoSpeedWithoutWeights) {
  const auto plan = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"plan",
                                    "--model",
                                    write("config.json", kShape),
                                    "--backend",
                                    "cpu",
                                    "--gpu",
                                    "1G",
                                    "--host",
                                    "1G",
                                    "--device-gbps",
                                    "1000"};
    all.insert(all.end(), more.begin(), more.end());
    return run_kvtier(all).out;
  };
  const std::string unknown = plan({});
  EXPECT_THAT(unknown, HasSubstr("0 B  not counted: no files, no --weights\n"));
  EXPECT_THAT(unknown, HasSubstr(" fits, without weights\n"));
  EXPECT_THAT(unknown, HasSubstr(" tokens  without weights\n"));
  EXPECT_THAT(unknown, HasSubstr("unknown  without weights: --weights, or their files"));
  EXPECT_THAT(unknown, ::testing::Not(HasSubstr("tokens/s")));
  for (const std::string& known : {plan({"--weights", "0"}), plan({"--weights", "8M"})}) {
    EXPECT_THAT(known, HasSubstr("  on the GPU\n"));
    EXPECT_THAT(known, HasSubstr("tokens/s"));
    EXPECT_THAT(known, ::testing::Not(HasSubstr("without weights")));
  }
}

}  // namespace
}  // namespace kvtier::services
