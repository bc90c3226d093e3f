#pragma once

#include "kvtier/error.h"

#include "services/console/console.h"
#include "services/console/options.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// The command line of a program, and what is said of errors.
namespace kvtier::services {

/// What to say of arguments that no command takes.
[[nodiscard]] inline std::string unexpected(const CLI::App& app) {
  std::string found;
  for (const std::string& argument : app.remaining(true)) found += " " + argument;
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  const std::string command = parsed.empty() ? "" : " " + parsed.front()->get_name();
  std::string names;
  for (const CLI::App* child : app.get_subcommands([](const CLI::App*) { return true; })) {
    names += (names.empty() ? "" : ", ") + child->get_name();
  }
  if (!command.empty() || names.empty() || found.starts_with(" -")) {
    return "expected what " + app.get_name() + command + " --help lists, found" + found;
  }
  return "expected one of " + names + ", found" + found;
}

/// Returns what an error of CLI11 means, with what was expected and found.
[[nodiscard]] inline std::string usage_problem(const CLI::App& app, const CLI::ParseError& error) {
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) return unexpected(app);
  const std::string text = error.what();
  const auto around = [&text](std::string_view words) {
    const std::size_t at = text.find(words);
    return at == std::string::npos ? std::pair(std::string(), std::string())
                                   : std::pair(text.substr(0, at), text.substr(at + words.size()));
  };
  if (const auto [option, rest] = around(" is required"); !option.empty()) {
    return "expected " + option + ", found none";
  }
  if (const auto [option, other] = around(" excludes "); !option.empty()) {
    return "expected " + option + " or " + other + ", found both";
  }
  if (const auto [option, other] = around(" requires "); !option.empty()) {
    return "expected " + other + " with " + option + ", found none";
  }
  if (const auto [option, type] = around(": 1 required "); !option.empty()) {
    return option + ": expected a value, found none";
  }
  if (const auto [option, count] = around(": At Most 1 required but received "); !option.empty()) {
    return option + ": expected one value, found " + count;
  }
  if (const auto [none, setting] = around("Could not convert: "); !setting.empty()) {
    const std::size_t equals = setting.find(" = ");
    const std::string found = setting.substr(equals + 3);
    const bool number = found.find_first_not_of("+-,0123456789") == std::string::npos;
    return setting.substr(0, equals) + ": expected " +
           (number ? "a number of 32 bits" : "true or false") + ", found " + found;
  }
  return text;
}

/// Parses `arguments`, without the program's name. Returns the exit code where there is nothing
/// more to do: of --help, --version, and an error.
[[nodiscard]] inline std::optional<int> parse_arguments(CLI::App& app,
                                                        std::vector<std::string> arguments,
                                                        const Console& console) {
  expect_values(app);
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes the last one first
    app.parse(std::move(arguments));
    check_environment(app);
  } catch (const CLI::Success& wanted) {
    return app.exit(wanted, console.out, console.err);
  } catch (const CLI::ParseError& error) {
    console.err << "error: " << usage_problem(app, error) << '\n';
    return kExitUsage;
  }
  return std::nullopt;
}

/// As `parse_arguments`, so that one of the commands of `app` is chosen.
[[nodiscard]] inline std::optional<int> parse_command_line(CLI::App& app,
                                                           std::vector<std::string> arguments,
                                                           const Console& console) {
  app.require_subcommand(0, 1);  // `man serve`: serve is no second command
  if (const auto code = parse_arguments(app, std::move(arguments), console)) return code;
  if (!app.get_subcommands().empty()) return std::nullopt;
  console.err << "error: expected a subcommand, found none\n\n" << app.help();
  return kExitUsage;
}

/// Returns what `program` returns, or an exit code after an exception, printed as "error: CODE:
/// message": `kExitUsage` after `kInvalidArgument` and `kNotFound`, which are values and files that
/// are refused, else `kExitError`.
template <typename Program>
[[nodiscard]] int with_errors_printed(std::ostream& err, Program program) {
  try {
    return program();
  } catch (const Error& error) {
    err << "error: " << error_code_name(error.code()) << ": " << error.what() << '\n';
    const ErrorCode code = error.code();
    if (code == ErrorCode::kInvalidArgument || code == ErrorCode::kNotFound) return kExitUsage;
  } catch (const std::exception& error) {
    err << "error: " << error_code_name(ErrorCode::kInternal) << ": " << error.what() << '\n';
  }
  return kExitError;
}

}  // namespace kvtier::services
