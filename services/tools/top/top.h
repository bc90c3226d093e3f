#pragma once

#include "services/console/console.h"

#include <string>

namespace CLI {
class App;
}  // namespace CLI

namespace kvtier::services {

/// Options of `kvtier top`.
struct TopCommand {
  std::string server;   ///< An admin socket, unix:PATH; empty: the default one, unless `metrics`.
  std::string metrics;  ///< Where `kvtier serve --metrics` listens.
  double interval_seconds = 1;
  bool once = false;
  bool json = false;  ///< One reading as JSON.
};

/// Adds the subcommand `top` and its options; they are in `command` once the program has parsed.
void add_top(CLI::App& program, TopCommand& command);

/// Shows a server's state, tiers, rates, latencies and tenants in the terminal until the user ends
/// it; with `once`, prints one frame on `out`. Throws `Error` when the server cannot be reached.
void run_top(const TopCommand& command, const Console& console);

}  // namespace kvtier::services
