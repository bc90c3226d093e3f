#include "support/device_exporter_cuda.h"

#include "kvtier/error.h"

#include "support/backend_fixture.h"
#include "transfer/device/cuda_check.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace kvtier::testing {
namespace {

constexpr const char* kSocketVariable = "KVTIER_DEVICE_EXPORTER";
constexpr const char* kBytesVariable = "KVTIER_DEVICE_EXPORTER_BYTES";

struct Command {
  char what = 0;  ///< 'w'rite, 'r'ead, 'f'ree.
  std::uint64_t offset = 0, bytes = 0;
};

bool send_all(int socket, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket, from, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    from += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, void* data, std::size_t bytes) {
  return bytes == 0 || ::recv(socket, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

/// Allocates, tells the handle, and does what comes until the socket ends.
void serve(int socket, std::size_t bytes) {
  cudaDeviceProp properties;
  KVTIER_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  void* memory = nullptr;
  KVTIER_CUDA_CHECK(cudaMalloc(&memory, bytes));
  auto* const data = static_cast<std::byte*>(memory);
  KVTIER_CUDA_CHECK(cudaMemset(data, 0, bytes));
  cudaIpcMemHandle_t ipc;
  KVTIER_CUDA_CHECK(cudaIpcGetMemHandle(&ipc, data));
  DeviceMemoryHandle handle;
  std::memcpy(handle.ipc.data(), &ipc, sizeof(ipc));
  std::memcpy(handle.device.data(), properties.uuid.bytes, handle.device.size());
  bool open = send_all(socket, &handle, sizeof(handle));
  Command command;
  while (open && receive_all(socket, &command, sizeof(command))) {
    std::vector<std::byte> moved(command.bytes);
    if (command.what == 'w') {
      open = receive_all(socket, moved.data(), moved.size());
      KVTIER_CUDA_CHECK(
          cudaMemcpy(data + command.offset, moved.data(), moved.size(), cudaMemcpyHostToDevice));
    } else if (command.what == 'r') {
      KVTIER_CUDA_CHECK(
          cudaMemcpy(moved.data(), data + command.offset, moved.size(), cudaMemcpyDeviceToHost));
    } else {
      KVTIER_CUDA_CHECK(cudaFree(data));
    }
    KVTIER_CUDA_CHECK(cudaDeviceSynchronize());
    if (command.what != 'r') moved.assign(1, std::byte{1});
    open = open && send_all(socket, moved.data(), moved.size());
  }
}

/// Either the process itself, or what shows that it can be started.
class DeviceExporterTest : public BackendTest {};
INSTANTIATE_TEST_SUITE_P(, DeviceExporterTest, ::testing::Values(Backend::kCuda), backend_name);

TEST_P(DeviceExporterTest, IsThisProgramStartedAnew) {
  if (const char* const socket = std::getenv(kSocketVariable)) {
    serve(std::stoi(socket), std::stoull(std::getenv(kBytesVariable)));
    std::_Exit(0);
  }
  DeviceExporter other(1 << 20);
  const std::vector<std::byte> bytes(100, std::byte{7});
  other.write(1000, bytes);
  EXPECT_EQ(other.read(1000, 100), bytes);
}

}  // namespace

DeviceExporter::DeviceExporter(std::size_t bytes) {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw std::runtime_error("no socket");
  const std::string socket = std::to_string(ends[1]);
  const std::string size = std::to_string(bytes);
  process_ = ::fork();
  if (process_ == 0) {
    ::fcntl(ends[1], F_SETFD, 0);  // the other end is no other process's
    ::setenv(kSocketVariable, socket.c_str(), 1);
    ::setenv(kBytesVariable, size.c_str(), 1);
    ::unsetenv("GTEST_TOTAL_SHARDS");  // its one test is this one
    ::unsetenv("GTEST_SHARD_INDEX");   // alone it is an error
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, 1);
    ::execl("/proc/self/exe", "device_exporter", "--gtest_filter=*IsThisProgramStartedAnew*",
            static_cast<char*>(nullptr));
    ::_exit(1);
  }
  ::close(ends[1]);
  socket_ = ends[0];
  if (process_ < 0 || !receive_all(socket_, &handle_, sizeof(handle_))) {
    kill();
    throw std::runtime_error("device exporter: expected a process with memory, found none");
  }
}

DeviceExporter::~DeviceExporter() {
  if (socket_ >= 0) ::close(socket_);
  if (process_ > 0) (void)::waitpid(process_, nullptr, 0);
}

void DeviceExporter::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  const Command command{'w', offset, bytes.size()};
  char done = 0;
  if (!send_all(socket_, &command, sizeof(command)) ||
      !send_all(socket_, bytes.data(), bytes.size()) || !receive_all(socket_, &done, 1)) {
    throw std::runtime_error("device exporter: gone");
  }
}

std::vector<std::byte> DeviceExporter::read(std::uint64_t offset, std::size_t bytes) {
  const Command command{'r', offset, bytes};
  std::vector<std::byte> found(bytes);
  if (!send_all(socket_, &command, sizeof(command)) ||
      !receive_all(socket_, found.data(), found.size())) {
    throw std::runtime_error("device exporter: gone");
  }
  return found;
}

void DeviceExporter::free_memory() {
  const Command command{'f', 0, 0};
  char done = 0;
  if (!send_all(socket_, &command, sizeof(command)) || !receive_all(socket_, &done, 1)) {
    throw std::runtime_error("device exporter: gone");
  }
}

void DeviceExporter::kill() {
  if (process_ <= 0) return;
  ::kill(process_, SIGKILL);
  (void)::waitpid(process_, nullptr, 0);
  process_ = -1;
}

}  // namespace kvtier::testing
