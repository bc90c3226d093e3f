#include "transfer/tiers/key_file.h"

#include "kvtier/error.h"

#include "transfer/tiers/sealed_page.h"

#include <fstream>
#include <span>

namespace kvtier::tiers {
namespace {

constexpr std::size_t kMaxFileBytes = 4096;

}  // namespace

std::string read_small_file(const std::string& what, const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text(kMaxFileBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad() || (in.fail() && !in.eof())) {
    throw Error(ErrorCode::kNotFound, what + ": expected a readable file, found " + path);
  }
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kMaxFileBytes) {
    throw Error(ErrorCode::kInvalidArgument, what + ": expected at most " +
                                                 std::to_string(kMaxFileBytes) +
                                                 " bytes, found more in " + path);
  }
  return text;
}

std::vector<std::byte> read_key_file(const std::string& what, const std::string& path) {
  const std::string text = read_small_file(what, path);
  if (text.size() < PageSealer::kMinSecretBytes) {
    throw Error(ErrorCode::kInvalidArgument,
                what + ": expected " + std::to_string(PageSealer::kMinSecretBytes) + " to " +
                    std::to_string(kMaxFileBytes) + " bytes, found " + std::to_string(text.size()) +
                    " in " + path);
  }
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

}  // namespace kvtier::tiers
