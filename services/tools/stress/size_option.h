#pragma once

#include "services/tools/stress/options.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace kvtier::services {

/// Adds an option that takes a size such as 64K; `store` gets the number.
inline CLI::Option* add_size(CLI::App& app, const std::string& flag, const std::string& description,
                             std::function<void(std::int64_t)> store) {
  return app.add_option_function<std::string>(
      flag,
      [flag, store = std::move(store)](const std::string& text) {
        const std::optional<std::int64_t> size = parse_size(text);
        if (!size) {
          throw CLI::ValidationError(
              flag, "expected a whole number, or one with K, M or G, found " + text);
        }
        store(*size);
      },
      description);
}

}  // namespace kvtier::services
