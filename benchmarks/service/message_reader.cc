#include "benchmarks/service/message_reader.h"

#include "kvtier/v1/transfer.pb.h"

#include "benchmarks/service/measure.h"
#include "benchmarks/service/pipe_text.h"
#include "benchmarks/service/server_process.h"
#include "transfer/tiers/crc32c.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace kvtier::bench {
namespace {

constexpr const char* kRead = "read";

/// Does what the client library does of it: pages to their places, checksums compared.
void read_messages(grpc::Channel& channel, const v1::ReadPagesRequest& request,
                   std::size_t page_bytes, std::span<std::byte> memory) {
  const auto count = static_cast<std::size_t>(request.handles_size());
  std::vector<std::uint32_t> sums(count);
  std::size_t arrived = 0;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const grpc::internal::RpcMethod method(kMessagesMethod,
                                         grpc::internal::RpcMethod::SERVER_STREAMING);
  const std::unique_ptr<grpc::ClientReader<v1::ReadPagesResponse>> stream(
      grpc::internal::ClientReaderFactory<v1::ReadPagesResponse>::Create(&channel, method, &context,
                                                                         request));
  for (v1::ReadPagesResponse response; stream->Read(&response);) {
    for (const auto& chunk : response.chunks()) {
      const auto i = static_cast<std::size_t>(chunk.index());
      const std::span<std::byte> to =
          memory.subspan(i * page_bytes, page_bytes)
              .subspan(static_cast<std::size_t>(chunk.offset()), chunk.data().size());
      std::memcpy(to.data(), chunk.data().data(), to.size());
      sums[i] = crc32c(to, sums[i]);
      if (chunk.last() && sums[i] == chunk.page().crc32c()) ++arrived;
    }
  }
  if (!stream->Finish().ok() || arrived != count) {
    throw std::runtime_error("expected every page to be there");
  }
}

/// Answers until the other process closes its end.
void serve(int fd, const std::string& endpoint) {
  const auto channel = grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials());
  std::vector<std::byte> memory;
  for (;;) {
    const std::size_t page_bytes = std::stoul(read_text(fd));
    v1::ReadPagesRequest request;
    if (!request.ParseFromString(read_text(fd))) throw std::runtime_error("expected a request");
    memory.resize(
        std::max(memory.size(), page_bytes * static_cast<std::size_t>(request.handles_size())));
    read_messages(*channel, request, page_bytes, memory);
    write_text(fd, kRead);
  }
}

}  // namespace

MessageReader::MessageReader(const std::string& endpoint) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw std::runtime_error("expected two sockets");
  }
  child_ = ::fork();
  if (child_ == 0) {
    ::close(ends[0]);
    try {
      serve(ends[1], endpoint);
    } catch (const std::exception&) {
      // At the end, or the other process finds no answer.
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  fd_ = ends[0];
}

MessageReader::~MessageReader() {
  ::close(fd_);
  ::waitpid(child_, nullptr, 0);
}

void MessageReader::read(const std::string& lease, std::size_t page_bytes,
                         const std::vector<std::string>& handles) const {
  v1::ReadPagesRequest request;
  request.set_lease(lease);
  for (const std::string& handle : handles) request.add_handles(handle);
  write_text(fd_, std::to_string(page_bytes));
  write_text(fd_, request.SerializeAsString());
  if (read_text(fd_) != kRead) throw std::runtime_error("expected pages to be read");
}

double MessageReader::cpu_seconds() const { return cpu_seconds_of(child_); }

}  // namespace kvtier::bench
