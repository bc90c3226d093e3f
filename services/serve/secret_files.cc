#include "services/serve/secret_files.h"

#include <sys/stat.h>

namespace kvtier::services {

void warn_of_open_secrets(const std::vector<std::pair<std::string, std::string>>& files, Log& log) {
  for (const auto& [option, path] : files) {
    struct stat status {};
    if (path.empty() || ::stat(path.c_str(), &status) != 0) continue;  // what reads it will say
    if ((status.st_mode & (S_IROTH | S_IWOTH)) == 0) continue;
    log.write({.level = LogLevel::kWarning,
               .event = "open_secret",
               .message = option + ": expected a file that others cannot read or write, found " +
                          "one that they can; chmod o-rw"});
  }
}

}  // namespace kvtier::services
