#pragma once

#include "kvtier/page_tier.h"

#include "services/page_cache/page_backing.h"
#include "services/serve/serve.h"

#include <memory>
#include <vector>

/// Options of `serve` for disks and servers that keep copies of pages.
namespace kvtier::services {

void add_remote_tiers(CLI::App& app, ServeCommand& command);
void add_page_tiers(CLI::App& app, ServeCommand& command);

/// Returns copies of what the disk caches hold, on servers that all engines share. Throws `Error`
/// for options that do not go together, as below.
[[nodiscard]] std::vector<std::shared_ptr<PageTier>> remote_tiers(const ServeCommand& command);
/// Returns where the page cache's pages are beside memory; empty: nowhere.
[[nodiscard]] MakeBacking page_backing(const ServeCommand& command);

}  // namespace kvtier::services
