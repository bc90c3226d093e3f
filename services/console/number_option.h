#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>

/// Options that take numbers. What CLI11 itself says of other text does not name what was expected.
namespace kvtier::services {

/// Takes a number within bounds; refuses NaN, which no comparison finds outside.
template <typename Number>
[[nodiscard]] CLI::Validator between(Number lowest, Number highest) {
  std::ostringstream bounds;
  bounds << lowest << " to " << highest;
  return CLI::Validator(
      [lowest, highest, expected = "expected " + bounds.str()](std::string& text) {
        Number value{};
        const bool within =
            CLI::detail::lexical_cast(text, value) && lowest <= value && value <= highest;
        return within ? std::string() : expected + ", found " + text;
      },
      bounds.str());
}

/// Takes what can be read as a `Number`.
template <typename Number>
[[nodiscard]] CLI::Validator number_expected(const std::string& expected) {
  return CLI::Validator(
      [expected](std::string& text) {
        Number value{};
        const bool wraps = std::is_unsigned_v<Number> && text.starts_with('-');
        const bool good = !wraps && CLI::detail::lexical_cast(text, value);
        return good ? std::string() : "expected " + expected + ", found " + text;
      },
      "");
}

/// Adds an option that takes sizes such as 64K or 1G (2^10, 2^30), in any case.
template <typename Number>
CLI::Option* add_size(CLI::App& app, const std::string& flag, Number& to,
                      const std::string& description) {
  return app.add_option(flag, to, description)
      ->transform(CLI::Validator(
          [](std::string& text) {
            std::string size = text;
            std::int64_t number = -1;
            try {
              const bool good = CLI::AsSizeValue(false)(size).empty() &&
                                CLI::detail::lexical_cast(size, number) && number >= 0;
              if (!good) number = -1;
            } catch (const CLI::ValidationError&) {
              number = -1;
            }
            if (number < 0) return "expected a size such as 64K, found " + text;
            text = size;
            return std::string();
          },
          ""))
      ->type_name("SIZE");
}

/// Makes all options of numbers, those of subcommands too, say what they expect.
inline void expect_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type.starts_with("INT")) {
      option->check(number_expected<std::int64_t>("a whole number"));
    } else if (type.starts_with("UINT")) {
      option->check(number_expected<std::uint64_t>("a whole number of 0 or more"));
    } else if (type.starts_with("FLOAT")) {
      option->check(number_expected<double>("a number"));
    }
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    expect_numbers(*command);
  }
}

}  // namespace kvtier::services
