#include "services/serve/option.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace kvtier::services {

CLI::Option* with_environment(CLI::Option* option) {
  std::string name = "KVTIER_";
  for (const char c : option->get_name().substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return option->envname(name);
}

CLI::Validator word() {
  return CLI::Validator(
      [](std::string& text) {
        const bool fine = !text.empty() && std::ranges::all_of(text, [](unsigned char c) {
          return c > 0x20 && c != 0x7F;
        });
        return fine ? std::string() : "expected text without white space, found \"" + text + '"';
      },
      "TEXT");
}

}  // namespace kvtier::services
