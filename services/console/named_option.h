#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace kvtier::services {

/// Returns the names of a table of services/console/enum_names.h.
template <typename Names>
[[nodiscard]] std::vector<std::string> names_in(const Names& names) {
  std::vector<std::string> list;
  for (const auto& entry : names) list.emplace_back(entry.first);
  return list;
}

/// Adds an option whose values are names of a table; the parsed enumerators go to `to` at once.
template <typename Names, typename Enum>
CLI::Option* add_named(CLI::App& app, const std::string& flag, const Names& names, Enum& to,
                       const std::string& description) {
  return app
      .add_option_function<std::string>(
          flag,
          [&names, &to](const std::string& text) {
            for (const auto& [name, value] : names) {
              if (name == text) to = value;
            }
          },
          description)
      ->check(CLI::IsMember(names_in(names)));
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
      ->check(CLI::IsMember(names_in(names)));
}

}  // namespace kvtier::services
