#include "services/client/data_channel.h"
#include "services/client/data_socket.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <openssl/crypto.h>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

[[noreturn]] void wait_to_be_killed() {
  std::puts("ready");
  (void)std::fflush(stdout);
  for (;;) ::pause();
}

void send_all(int socket, std::span<const std::byte> bytes) {
  if (::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(bytes.size())) {
    std::perror("send");
    std::exit(1);
  }
}

/// Asks for a batch of pages and reads no reply.
[[noreturn]] void leave_a_reply(const std::string& endpoint, const std::string& token) {
  DataChannel channel({.endpoint = endpoint, .token = token, .tls = {}});
  (void)channel.send(FrameType::kReadPages, 0, std::vector<std::byte>(4));
  wait_to_be_killed();
}

/// Attaches and sends the first `bytes` bytes of a frame: its header, then its control.
[[noreturn]] void leave_a_frame(const std::string& endpoint, const std::string& token,
                                std::size_t bytes) {
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  endpoint.copy(address.sun_path, sizeof(address.sun_path) - 1, std::strlen("unix:"));
  if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    std::perror("connect");
    std::exit(1);
  }
  const auto attach = std::as_bytes(std::span(token));
  send_all(socket, encode_header(make_header(FrameType::kAttach, 0, 1, attach, 0)));
  send_all(socket, attach);
  const std::vector<std::byte> control(100);
  const HeaderBytes header = encode_header(make_header(FrameType::kWritePages, 0, 2, control, 0));
  std::vector<std::byte> frame(header.begin(), header.end());
  frame.insert(frame.end(), control.begin(), control.end());
  send_all(socket, std::span(frame).first(bytes));
  wait_to_be_killed();
}

}  // namespace
}  // namespace kvtier::services

/// plane_client unix:PATH TOKEN_IN_HEX [BYTES_OF_A_FRAME]: a client of the data plane that stops
/// amid its work and waits to be killed.
int main(int argc, char** argv) {
  long size = 0;
  unsigned char* const bytes = argc < 3 ? nullptr : OPENSSL_hexstr2buf(argv[2], &size);
  if (bytes == nullptr) return 2;
  const std::string token(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size));
  if (argc == 3) kvtier::services::leave_a_reply(argv[1], token);
  kvtier::services::leave_a_frame(argv[1], token, std::stoul(argv[3]));
}
