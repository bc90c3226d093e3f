#pragma once

#include "services/console/console.h"
#include "services/tools/replay/replay.h"

#include <string>

namespace CLI {
class App;
}

namespace kvtier::services {

/// The subcommand `replay`.
struct ReplayCommand {
  std::string trace;
  std::string json;
  std::string record_ids;
  ReplayOptions options;
};

/// Adds the subcommand and its options to a program.
void add_replay(CLI::App& program, ReplayCommand& command);

/// Replays, and writes the table and what else was asked for. Throws what `Trace::open`, `replay`
/// and `AtomicFile` throw.
void run_replay(ReplayCommand& command, const Console& console);

}  // namespace kvtier::services
