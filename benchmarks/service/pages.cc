#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"
#include "benchmarks/service/page_reader.h"
#include "services/client/page_plane.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvtier::bench {
namespace {

using services::DataChannel;
using services::FrameType;
using services::PageDescriptor;
using services::PageOutcome;

/// The bare end of the socket on which pages come with nothing about them.
class BareSocket {
 public:
  explicit BareSocket(const std::string& path)
      : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      throw std::runtime_error("expected the bare socket");
    }
  }
  ~BareSocket() { ::close(fd_); }
  BareSocket(const BareSocket&) = delete;  // owns a socket
  BareSocket& operator=(const BareSocket&) = delete;

  void read(PageReader& reader, std::size_t page_bytes) {
    const std::uint64_t count = reader.order().size();
    (void)::send(fd_, &count, sizeof(count), MSG_NOSIGNAL);
    (void)::send(fd_, reader.order().data(), count * sizeof(std::uint32_t), MSG_NOSIGNAL);
    for (std::size_t i = 0; i < count; i += PageReader::kBatch) {
      const std::size_t pages = std::min(PageReader::kBatch, count - i);
      std::span<std::byte> to(reader.destination(i).data(), pages * page_bytes);
      while (!to.empty()) {
        const ssize_t bytes = ::recv(fd_, to.data(), to.size(), 0);
        if (bytes <= 0) throw std::runtime_error("expected pages from the bare socket");
        to = to.subspan(static_cast<std::size_t>(bytes));
      }
    }
  }

 private:
  int fd_;
};

nlohmann::json row(const char* what, const Comparison& comparison, std::size_t bytes,
                   std::size_t page_bytes) {
  return {{"what", what},
          {"page_bytes", page_bytes},
          {"gbps", static_cast<double>(bytes) / comparison.second / 1e9},
          {"baseline_gbps", static_cast<double>(bytes) / comparison.first / 1e9},
          {"share", comparison.ratio},
          {"share_least", comparison.least},
          {"share_most", comparison.most}};
}

void expect_right(const PageReader& reader) {
  if (!reader.last_batch_is_right()) throw std::runtime_error("a page has other bytes than stored");
}

}  // namespace

PageReader::PageReader(DataChannel& channel, const PageSet& pages, std::size_t count,
                       std::uint64_t seed)
    : channel_(channel), pages_(pages), buffer_(kBatch * pages.page_bytes) {
  std::mt19937_64 random(seed);
  order_.resize(count);
  for (std::uint32_t& page : order_) {
    page = static_cast<std::uint32_t>(random() % pages.handles.size());
  }
}

std::span<std::byte> PageReader::destination(std::size_t i) {
  return std::span(buffer_).subspan(i % kBatch * pages_.page_bytes, pages_.page_bytes);
}

std::uint64_t PageReader::ask(std::size_t first, std::uint32_t flags) {
  std::vector<PageDescriptor> wanted(std::min(kBatch, order_.size() - first));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::string& handle = pages_.handles[order_[first + i]];
    handle.copy(wanted[i].handle.data(), wanted[i].handle.size());
    wanted[i].bytes = pages_.page_bytes;
  }
  return channel_.send(FrameType::kReadPages, flags, services::encode(wanted));
}

void PageReader::read_shared() {
  std::vector<services::PageRead> reads;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    reads.push_back({.handle = pages_.handles[order_[i]], .to = destination(i)});
  }
  services::read_shared(channel_, reads, false);
  if (!std::ranges::all_of(reads, &services::PageRead::done)) {
    throw std::runtime_error("expected every page to be there");
  }
}

void PageReader::read_framed() {
  std::uint64_t id = ask(0, services::kInline);
  for (std::size_t first = 0; first < order_.size(); first += kBatch) {
    const std::uint64_t current = id;
    if (first + kBatch < order_.size()) id = ask(first + kBatch, services::kInline);
    std::size_t at = 0;
    for (bool more = true; more;) {
      const DataChannel::Frame frame = channel_.reply_to(current, std::span(buffer_).subspan(at));
      at += frame.header.payload_bytes();
      more = (frame.header.flags & services::kMore) != 0;
    }
    if (at != std::min(kBatch, order_.size() - first) * pages_.page_bytes) {
      throw std::runtime_error("expected every page to be there");
    }
  }
}

bool PageReader::last_batch_is_right() const {
  const std::size_t first = (order_.size() - 1) / kBatch * kBatch;
  std::vector<std::byte> expected(pages_.page_bytes);
  for (std::size_t i = first; i < order_.size(); ++i) {
    fill_page(order_[i], expected.data(), expected.size());
    if (std::memcmp(buffer_.data() + (i - first) * expected.size(), expected.data(),
                    expected.size()) != 0) {
      return false;
    }
  }
  return true;
}

nlohmann::json page_rows(const ServerProcess& server, const Settings& settings) {
  nlohmann::json rows = nlohmann::json::array();
  const auto channel = attach(server);
  const PageSet& pages = server.small();
  PageReader reader(*channel, pages, 4096, 1);

  std::vector<std::byte> memory(pages.handles.size() * pages.page_bytes);
  for (std::size_t i = 0; i < pages.handles.size(); ++i) {
    fill_page(i, memory.data() + i * pages.page_bytes, pages.page_bytes);
  }
  const auto copy = [&] {
    for (std::size_t i = 0; i < reader.order().size(); ++i) {
      std::memcpy(reader.destination(i).data(),
                  memory.data() + reader.order()[i] * pages.page_bytes, pages.page_bytes);
    }
  };
  rows.push_back(row("shared_memory_over_memcpy",
                     compare(settings.rounds, copy, [&] { reader.read_shared(); }), reader.bytes(),
                     pages.page_bytes));
  expect_right(reader);

  BareSocket bare(server.bare_socket());
  rows.push_back(row("frames_over_sendmsg",
                     compare(
                         settings.rounds, [&] { bare.read(reader, pages.page_bytes); },
                         [&] { reader.read_framed(); }),
                     reader.bytes(), pages.page_bytes));
  expect_right(reader);
  return rows;
}

}  // namespace kvtier::bench
