#pragma once

#include "services/console/log.h"

#include <string>
#include <utility>
#include <vector>

namespace kvtier::services {

/// Warns of files {option, path} with a key or a password that others than their owner and its
/// group may read or write. An empty path is none.
void warn_of_open_secrets(const std::vector<std::pair<std::string, std::string>>& files, Log& log);

}  // namespace kvtier::services
