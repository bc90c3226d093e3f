#include "benchmarks/service/server_process.h"

#include "kvtier/v1/transfer.pb.h"

#include "benchmarks/service/measure.h"
#include "benchmarks/service/pipe_text.h"
#include "services/page_cache/page_store.h"
#include "services/page_cache/tenant_pages.h"
#include "services/server/server.h"

#include <google/protobuf/empty.pb.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/impl/service_type.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace kvtier::bench {
namespace {

using namespace services;  // NOLINT(google-build-using-namespace): this is the service's process

constexpr std::size_t kSmallPage = 64 << 10;
constexpr std::size_t kLargePage = 2 << 20;
constexpr std::size_t kPiecesPerWrite = 62;  // as many pages as the data plane puts in a frame

/// Sends pages as chunks in messages, of 1 MiB as ReadPages does. Like there the client compares
/// their checksums, so there are none here.
class MessageWriter final : public grpc::ServerWriteReactor<v1::ReadPagesResponse> {
 public:
  MessageWriter(PageStore& pages, const Tenant& tenant, const v1::ReadPagesRequest& request)
      : pages_(pages), tenant_(tenant), request_(request) {
    next();
  }
  void OnWriteDone(bool ok) override { ok ? next() : Finish(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }

 private:
  void next() {
    response_.Clear();
    for (std::size_t left = kMaxTransferBytes; left > 0 && index_ < request_.handles_size();) {
      if (!page_) {
        page_.emplace(pages_.read(tenant_, request_.handles(index_), Verify::kNo));
      }
      auto& chunk = *response_.add_chunks();
      const std::span<const std::byte> bytes = page_->bytes().subspan(offset_);
      const std::size_t size = std::min(left, bytes.size());
      chunk.set_index(index_);
      chunk.set_offset(static_cast<std::int64_t>(offset_));
      chunk.set_data(bytes.data(), size);
      left -= size;
      offset_ += size;
      if (size < bytes.size()) break;
      chunk.set_last(true);
      chunk.mutable_page()->set_crc32c(page_->crc());
      page_.reset();
      offset_ = 0;
      ++index_;
    }
    if (response_.chunks().empty()) return Finish(grpc::Status::OK);
    StartWrite(&response_);
  }

  PageStore& pages_;
  const Tenant& tenant_;
  const v1::ReadPagesRequest& request_;
  v1::ReadPagesResponse response_;
  std::optional<PinnedPage> page_;
  std::size_t offset_ = 0;
  int index_ = 0;
};

/// Sends bytes that only gRPC looks at and copies.
class BareWriter final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit BareWriter(const v1::ReadPagesRequest& request) : left_(request.handles_size()) {
    next();
  }
  void OnWriteDone(bool ok) override { ok ? next() : Finish(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }

 private:
  void next() {
    static const grpc::Slice slice(std::string(kMaxTransferBytes, 'x'));
    if (left_-- == 0) return Finish(grpc::Status::OK);
    message_ = grpc::ByteBuffer(&slice, 1);
    StartWrite(&message_);
  }

  int left_;
  grpc::ByteBuffer message_;
};

/// Calls of which nothing but gRPC's own work is left, and one that reads pages in messages.
class EchoService final : public grpc::Service {
 public:
  EchoService() {
    using Empty = google::protobuf::Empty;
    using grpc::internal::RpcMethod;
    using grpc::internal::RpcServiceMethod;
    AddMethod(new RpcServiceMethod(kEchoMethod, RpcMethod::NORMAL_RPC, nullptr));
    MarkMethodCallback(0, new grpc::internal::CallbackUnaryHandler<Empty, Empty>(
                              [](grpc::CallbackServerContext* context, const Empty* /*request*/,
                                 Empty* /*reply*/) {
                                auto* reactor = context->DefaultReactor();
                                reactor->Finish(grpc::Status::OK);
                                return reactor;
                              }));
    AddMethod(new RpcServiceMethod(kMessagesMethod, RpcMethod::SERVER_STREAMING, nullptr));
    MarkMethodCallback(1, new grpc::internal::CallbackServerStreamingHandler<v1::ReadPagesRequest,
                                                                             v1::ReadPagesResponse>(
                              [this](grpc::CallbackServerContext* /*context*/,
                                     const v1::ReadPagesRequest* request) {
                                return new MessageWriter(*pages_, *tenant_, *request);
                              }));
    AddMethod(new RpcServiceMethod(kBareMethod, RpcMethod::SERVER_STREAMING, nullptr));
    MarkMethodCallback(
        2,
        new grpc::internal::CallbackServerStreamingHandler<v1::ReadPagesRequest, grpc::ByteBuffer>(
            [](grpc::CallbackServerContext* /*context*/, const v1::ReadPagesRequest* request) {
              return new BareWriter(*request);
            }));
  }
  /// Before the first call.
  void use(PageStore& pages, const Tenant& tenant) {
    pages_ = &pages;
    tenant_ = &tenant;
  }

 private:
  PageStore* pages_ = nullptr;
  const Tenant* tenant_ = nullptr;
};

/// Reads lists of page numbers, and answers with nothing but the bytes of these pages, by sendmsg.
void serve_bare(int listener, const std::vector<std::span<const std::byte>>& pages) {
  const int client = ::accept(listener, nullptr, nullptr);
  constexpr int kBufferBytes = 4 << 20;
  (void)::setsockopt(client, SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof(kBufferBytes));
  std::uint64_t count = 0;
  while (::recv(client, &count, sizeof(count), MSG_WAITALL) == sizeof(count)) {
    std::vector<std::uint32_t> order(count);
    const std::size_t order_bytes = count * sizeof(std::uint32_t);
    const ssize_t received = ::recv(client, order.data(), order_bytes, MSG_WAITALL);
    if (received != static_cast<ssize_t>(order_bytes)) break;
    for (std::size_t first = 0; first < count;) {
      std::vector<iovec> pieces;
      for (; first < count && pieces.size() < kPiecesPerWrite; ++first) {
        const auto page = pages[order[first]];
        pieces.push_back({const_cast<std::byte*>(page.data()), page.size()});
      }
      std::span<iovec> left = pieces;
      while (!left.empty()) {
        msghdr message{};
        message.msg_iov = left.data();
        message.msg_iovlen = left.size();
        ssize_t bytes = ::sendmsg(client, &message, MSG_NOSIGNAL);
        if (bytes < 0) return;
        while (!left.empty() && bytes >= static_cast<ssize_t>(left[0].iov_len)) {
          bytes -= static_cast<ssize_t>(left[0].iov_len);
          left = left.subspan(1);
        }
        if (left.empty()) break;
        left[0].iov_base = static_cast<char*>(left[0].iov_base) + bytes;
        left[0].iov_len -= static_cast<std::size_t>(bytes);
      }
    }
  }
  ::close(client);
}

int listen_on(const std::string& path) {
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener, 4) != 0) {
    throw std::runtime_error("expected a socket to listen on: " + path);
  }
  return listener;
}

PageSet store(PageStore& store, Tenant& tenant, std::size_t page_bytes, std::size_t count) {
  const auto lease = store.open(
      tenant, {.model = "benchmark", .page_bytes = static_cast<std::int64_t>(page_bytes)});
  PageSet set{page_bytes, lease->name, {}};
  std::vector<std::byte> page(page_bytes);
  for (std::size_t i = 0; i < count; ++i) {
    fill_page(i, page.data(), page_bytes);
    const PageInfo reserved = lease->pages.reserve(*lease, {});
    set.handles.push_back(lease->pages.commit(*lease, reserved.handle, page).handle);
  }
  return set;
}

void write_set(int fd, const PageSet& set) {
  write_text(fd, set.lease);
  write_text(fd, std::to_string(set.handles.size()));
  for (const std::string& handle : set.handles) write_text(fd, handle);
}

PageSet read_set(int fd, std::size_t page_bytes) {
  PageSet set{page_bytes, read_text(fd), {}};
  const std::size_t count = std::stoul(read_text(fd));
  for (std::size_t i = 0; i < count; ++i) set.handles.push_back(read_text(fd));
  return set;
}

void run_server(const std::filesystem::path& folder, std::size_t bytes, int ready, int stop) {
  EchoService echo;
  ServerOptions options;
  options.core.models.backend = Backend::kCpu;
  options.core.models.memory.host_bytes = 512 * MiB;
  options.core.models.memory.device_bytes = 256 * MiB;
  options.core.models.memory.max_session_tokens = 16384;
  options.core.lease_ttl = std::chrono::hours(1);
  options.core.pages.arena_bytes = static_cast<std::int64_t>(bytes + bytes / 4);
  options.listen = {parse_endpoint("unix:" + (folder / "kvtier.sock").string())};
  options.data.listen = {parse_endpoint("unix:" + (folder / "kvtier.sock.data").string())};
  options.more_services = {&echo};
  Server server(std::move(options));
  Tenant& tenant = *server.core().tenants().all()[0];
  PageStore& pages = server.core().pages();
  echo.use(pages, tenant);
  const PageSet large = store(pages, tenant, kLargePage, bytes / 8 / kLargePage);
  const PageSet small = store(pages, tenant, kSmallPage, bytes / 8 * 7 / kSmallPage);
  std::vector<PinnedPage> pins;
  std::vector<std::span<const std::byte>> spans;
  for (const std::string& handle : small.handles) {
    pins.push_back(pages.read(tenant, handle));
    spans.push_back(pins.back().bytes());
  }
  const int listener = listen_on(folder / "bare.sock");
  std::thread([&] { serve_bare(listener, spans); }).detach();  // ends with the process
  write_set(ready, small);
  write_set(ready, large);
  ::close(ready);
  char byte = 0;
  (void)!::read(stop, &byte, 1);
}

}  // namespace

void fill_page(std::size_t index, std::byte* page, std::size_t bytes) {
  std::minstd_rand random(static_cast<unsigned>(index + 1));
  for (std::size_t i = 0; i + 4 <= bytes; i += 4) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(page + i, &word, 4);
  }
}

ServerProcess::ServerProcess(std::size_t bytes) {
  std::string pattern = "/tmp/kvtier-bench-XXXXXX";
  folder_ = ::mkdtemp(pattern.data());
  int ready[2], stop[2];
  if (::pipe2(ready, O_CLOEXEC) != 0 || ::pipe2(stop, O_CLOEXEC) != 0) {
    throw std::runtime_error("expected two pipes");
  }
  child_ = ::fork();
  if (child_ == 0) {
    ::close(ready[0]);
    ::close(stop[1]);
    try {
      run_server(folder_, bytes, ready[1], stop[0]);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "server: %s\n", error.what());
    }
    ::_exit(0);
  }
  ::close(ready[1]);
  ::close(stop[0]);
  stop_ = stop[1];
  small_ = read_set(ready[0], kSmallPage);
  large_ = read_set(ready[0], kLargePage);
  ::close(ready[0]);
  for (int i = 0; i < kMaxStreams; ++i) {
    messages_.push_back(std::make_unique<MessageReader>(endpoint()));
  }
}

double ServerProcess::cpu_seconds() const { return cpu_seconds_of(child_); }

ServerProcess::~ServerProcess() {
  // They have copies of `stop_`, and a later one of an earlier one's end.
  while (!messages_.empty()) messages_.pop_back();
  ::close(stop_);
  ::waitpid(child_, nullptr, 0);
  std::filesystem::remove_all(folder_);
}

}  // namespace kvtier::bench
