// A program outside the tree that uses the client of an installed kvtier: where no server is, it is
// told so.
#include <chrono>
#include <iostream>
#include <kvtier/client.h>

int main() {
  kvtier::Client client(
      {.server = "unix:/nowhere/kvtier.sock", .timeout = std::chrono::seconds(5), .attempts = 1});
  try {
    static_cast<void>(client.open_pages({.model = "model", .page_bytes = 4096}));
  } catch (const kvtier::ClientError& error) {
    std::cout << error.what() << '\n';
    return error.code() == kvtier::ErrorCode::kUnavailable ? 0 : 1;
  }
  return 1;
}
