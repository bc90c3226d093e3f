// A program outside the tree that uses the clients of an installed kvtier: where no server is, they
// are told so.
#include <chrono>
#include <functional>
#include <iostream>
#include <kvtier/admin.h>
#include <kvtier/client.h>

namespace {

bool finds_none(const std::function<void()>& call) {
  try {
    call();
  } catch (const kvtier::ClientError& error) {
    std::cout << error.what() << '\n';
    return error.code() == kvtier::ErrorCode::kUnavailable;
  }
  return false;
}

}  // namespace

int main() {
  const kvtier::ClientOptions options{
      .server = "unix:/nowhere/kvtier.sock", .timeout = std::chrono::seconds(5), .attempts = 1};
  kvtier::Client client(options);
  kvtier::AdminClient admin(options);
  const bool none = finds_none([&] {
                      static_cast<void>(client.open_pages({.model = "model", .page_bytes = 4096}));
                    }) &&
                    finds_none([&] { static_cast<void>(admin.stats()); });
  return none ? 0 : 1;
}
