#include "services/base/paging.h"

#include "services/base/service_error.h"

#include <charconv>

namespace kvtier::services {

int page_size_of(int asked) {
  constexpr int kDefault = 100;
  constexpr int kMax = 1000;
  check_within("page_size", asked, 0, kMax);
  return asked == 0 ? kDefault : asked;
}

std::uint32_t page_start_of(const std::string& token) {
  std::uint32_t start = 0;
  const char* end = token.data() + token.size();
  const auto [stop, error] = std::from_chars(token.data(), end, start);
  if (!token.empty() && (error != std::errc() || stop != end)) {
    throw ServiceError::invalid("page_token", "next_page_token of the reply before",
                                "something else");
  }
  return start;
}

}  // namespace kvtier::services
