#include "services/console/command_line.h"

#include <gmock/gmock.h>

#include <sstream>

namespace kvtier::services {
namespace {

using ::testing::HasSubstr;

TEST(CommandLine, OfAProgramWithoutCommands) {
  struct Case {
    std::vector<std::string> arguments;
    std::optional<int> code;
    std::string message;
  };
  for (const Case& c : std::vector<Case>{
           {{"TRACE", "--steps", "3"}, {}, ""},
           {{}, 2, "error: expected TRACE, found none\n"},
           {{"TRACE", "--steps", "0"}, 2, "error: --steps: expected 1 to 9, found 0\n"},
           {{"TRACE", "--seed", "x"}, 2, "error: --seed: expected a whole number, found x\n"},
           {{"a", "b"}, 2, "error: expected what bench --help lists, found b\n"},
           {{"a", "--step", "3"},
            2,
            "error: expected what bench --help lists, found --step 3\n"}}) {
    CLI::App app("Measures", "bench");
    std::string trace;
    int steps = 0, seed = 0;
    app.add_option("TRACE", trace)->required();
    app.add_option("--steps", steps)->check(between(1, 9));
    app.add_option("--seed", seed);
    std::ostringstream out, err;
    EXPECT_EQ(parse_arguments(app, c.arguments, {out, err}), c.code) << c.message;
    EXPECT_EQ(err.str(), c.message);
    EXPECT_EQ(out.str(), "");
  }
  CLI::App app("Measures", "bench");
  std::ostringstream out, err;
  EXPECT_EQ(parse_arguments(app, {"--help"}, {out, err}), 0);
  EXPECT_THAT(out.str(), HasSubstr("Usage: bench"));
}

}  // namespace
}  // namespace kvtier::services
