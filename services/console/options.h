#pragma once

#include "kvtier/config.h"

#include "services/console/enum_names.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// Options of several commands. What CLI11 itself says of a wrong number does not name what was
/// expected.
namespace kvtier::services {

/// Whether a number begins with zeros, which CLI11 would read as octal.
[[nodiscard]] inline bool has_leading_zero(std::string_view text) {
  if (text.starts_with('-') || text.starts_with('+')) text.remove_prefix(1);
  return text.size() > 1 && text[0] == '0' && std::isdigit(static_cast<unsigned char>(text[1]));
}

/// Reads a number; false for text that is none, for a whole number with leading zeros, and for one
/// of more than 64 bits, with errno ERANGE.
template <typename Number>
[[nodiscard]] bool read_number(const std::string& text, Number& value) {
  errno = 0;
  if (std::is_integral_v<Number> && has_leading_zero(text)) return false;
  return CLI::detail::lexical_cast(text, value) && (!std::is_integral_v<Number> || errno != ERANGE);
}

/// Takes a number within bounds; refuses NaN, which no comparison finds outside.
template <typename Number>
[[nodiscard]] CLI::Validator between(Number lowest, Number highest) {
  std::ostringstream bounds;
  bounds << lowest << " to " << highest;
  return CLI::Validator(
      [lowest, highest, expected = "expected " + bounds.str()](std::string& text) {
        Number value{};
        const bool within = read_number(text, value) && lowest <= value && value <= highest;
        return within ? std::string() : expected + ", found " + text;
      },
      bounds.str());
}

/// Takes a number from `lowest` on.
template <typename Number>
[[nodiscard]] CLI::Validator at_least(Number lowest) {
  return CLI::Validator(
      [lowest](std::string& text) {
        Number value{};
        const bool good = read_number(text, value) && lowest <= value;
        return good ? std::string()
                    : "expected a number of at least " + std::to_string(lowest) + ", found " + text;
      },
      "");
}

/// Takes one of `names`.
[[nodiscard]] inline CLI::Validator one_of(const std::vector<std::string>& names) {
  return CLI::Validator(
      [names](std::string& text) {
        if (std::ranges::count(names, text) > 0) return std::string();
        return "expected one of " + CLI::detail::join(names, ", ") + ", found " + text;
      },
      "{" + CLI::detail::join(names, ",") + "}");
}

/// Takes what can be read as a `Number`.
template <typename Number>
[[nodiscard]] CLI::Validator number_expected(const std::string& expected) {
  return CLI::Validator(
      [expected](std::string& text) {
        Number value{};
        const bool wraps = std::is_unsigned_v<Number> && text.starts_with('-');
        if (!wraps && read_number(text, value)) return std::string();
        const char* const bits = !wraps && errno == ERANGE ? " of 64 bits" : "";
        return "expected " + expected + bits + ", found " + text;
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
              const bool good = !has_leading_zero(text) && CLI::AsSizeValue(false)(size).empty() &&
                                read_number(size, number) && number >= 0;
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

/// As `add_size`, for bytes of memory. Refuses 1 to 2^20 - 1, a number whose unit was left out.
template <typename Number>
CLI::Option* add_bytes(CLI::App& app, const std::string& flag, Number& to,
                       const std::string& description) {
  return add_size(app, flag, to, description)
      ->check(CLI::Validator(
          [](const std::string& text) {
            const bool fine = text == "0" || std::stoll(text) >= 1 << 20;
            return fine ? "" : "expected a size such as 80G, of at least 1M, found " + text;
          },
          ""));
}

/// Refuses an empty value, which would read as "not given". Before all other checks.
[[nodiscard]] inline CLI::Validator not_empty() {
  return CLI::Validator(
      [](std::string& text) {
        return text.empty() ? "expected a value, found an empty one" : std::string();
      },
      "");
}

/// Makes all options, those of subcommands too, refuse empty values, and those of numbers say what
/// they expect.
inline void expect_values(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() > 0) option->transform(not_empty());
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
    expect_values(*command);
  }
}

/// Returns the names of a table of services/console/enum_names.h.
template <typename Names>
[[nodiscard]] std::vector<std::string> names_in(const Names& names) {
  std::vector<std::string> list;
  for (const auto& entry : names) list.emplace_back(entry.first);
  return list;
}

/// Adds an option whose values are names of a table; the parsed enumerator goes to `to` at once,
/// the only one of a list.
template <typename Names, typename Enum>
CLI::Option* add_named(CLI::App& app, const std::string& flag, const Names& names, Enum& to,
                       const std::string& description) {
  return app
      .add_option_function<std::string>(
          flag,
          [&names, &to](const std::string& text) {
            for (const auto& [name, value] : names) {
              if (name == text) to = {value};
            }
          },
          description)
      ->check(one_of(names_in(names)));
}

/// As `add_named`, for several values; those parsed take the place of all in `to`.
template <typename Names, typename Enum>
CLI::Option* add_named_list(CLI::App& app, const std::string& flag, const Names& names,
                            std::vector<Enum>& to, const std::string& description) {
  return app
      .add_option_function<std::vector<std::string>>(
          flag,
          [&names, &to](const std::vector<std::string>& texts) {
            to.clear();
            for (const std::string& text : texts) {
              for (const auto& [name, value] : names) {
                if (name == text) to.push_back(value);
              }
            }
          },
          description)
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(one_of(names_in(names)));
}

inline constexpr const char* kRuleText =
    "Which tokens are taken by their scores (default: priority with norm_aware, else top_k)";
inline constexpr const char* kCodeText =
    "How bits are made from a key (default: scalar with norm_aware, else sign)";
inline constexpr const char* kErrorTargetText =
    "Of priority: the standard error of the softmax denominator that is aimed at, with no more "
    "rows than --sparsity or --k; 0: none";
inline constexpr const char* kBitsText =
    "Bits of a key of norm_aware (default 256, or the next multiple of head_dim)";

/// Adds the options of the priority rule; `error_target` is a number or several.
template <typename ErrorTarget>
void add_priority(CLI::App& app, ErrorTarget& error_target, int& coarse_bits, int& candidates) {
  CLI::Option* target =
      app.add_option("--error-target", error_target, kErrorTargetText)->capture_default_str();
  if constexpr (!std::is_arithmetic_v<ErrorTarget>) target->delimiter(',');
  CLI::Option* coarse =
      app.add_option("--coarse-bits", coarse_bits,
                     "Of priority over a scalar code: bits of a coordinate that are read of every "
                     "token; 0: all")
          ->capture_default_str();
  add_size(app, "--candidates", candidates,
           "With --coarse-bits: tokens over k whose whole code is read")
      ->check(between(0, 1 << 24))
      ->needs(coarse)
      ->capture_default_str();
}

/// Refuses options that are given and that none of `estimators` reads: those that a command has.
/// To be called once all is parsed.
inline void check_estimator_options(const CLI::App& app, const std::vector<Estimator>& estimators) {
  const auto need = [&](const char* option, std::initializer_list<Estimator> readers,
                        const char* names) {
    const CLI::Option* const given = app.get_option_no_throw(option);
    const auto reads = [&](Estimator each) { return std::ranges::count(readers, each) > 0; };
    if (given == nullptr || given->count() == 0 || std::ranges::any_of(estimators, reads)) return;
    std::string found;
    for (const auto& [name, value] : kEstimatorNames) {
      if (std::ranges::count(estimators, value) == 0) continue;
      found += (found.empty() ? "" : ", ") + std::string(name);
    }
    throw CLI::ValidationError(std::string("expected --estimator ") + names + " with " + option +
                               ", found " + found);
  };
  constexpr Estimator kSoft = Estimator::kSoftCollision;
  constexpr Estimator kHard = Estimator::kHardCollision;
  need("--bits", {Estimator::kNormAware}, "norm_aware");
  need("--query-bits", {Estimator::kNormAware}, "norm_aware");
  need("--tau", {kSoft}, "soft_collision");
  need("--planes-per-table", {kSoft, kHard}, "soft_collision or hard_collision");
  need("--tables", {kSoft, kHard}, "soft_collision or hard_collision");
}

/// Lets the environment give an option: "--max-models" is KVTIER_MAX_MODELS.
inline CLI::Option* with_environment(CLI::Option* option) {
  std::string name = "KVTIER_";
  for (const char c : option->get_name().substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return option->envname(name);
}

/// Refuses variables of `with_environment` that are set and empty, of a program and the commands
/// that were parsed: CLI11 takes them for ones that are not set.
inline void check_environment(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_envname();
    const char* const value = name.empty() ? nullptr : std::getenv(name.c_str());
    if (value != nullptr && *value == '\0') {
      throw CLI::ValidationError(name, "expected a value, found an empty one");
    }
  }
  for (const CLI::App* command : app.get_subcommands()) check_environment(*command);
}

/// Refuses text with white space or control characters.
[[nodiscard]] inline CLI::Validator word() {
  return CLI::Validator(
      [](std::string& text) {
        const bool fine =
            std::ranges::all_of(text, [](unsigned char c) { return c > 0x20 && c != 0x7F; });
        return fine ? std::string() : "expected text without white space, found \"" + text + '"';
      },
      "TEXT");
}

}  // namespace kvtier::services
