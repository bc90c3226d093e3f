#include "benchmarks/service/raw_load.h"

#include "benchmarks/service/measure.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <nghttp2/nghttp2.h>
#include <optional>
#include <poll.h>
#include <stdexcept>
#include <string_view>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>

namespace kvtier::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kFrameHead = 9;
constexpr std::uint32_t kOwnWindow = std::uint32_t{1} << 30;  // for replies that are not counted
constexpr std::int64_t kFirstWindow = 65535;
constexpr std::size_t kMostStreams = 100;  ///< Of a connection: below the server's limit.
constexpr std::chrono::milliseconds kGather{1};
constexpr char kEndStream = 0x1, kEndHeaders = 0x4, kAck = 0x1;
enum FrameType : char {
  kData = 0,
  kHeaders = 1,
  kReset = 3,
  kSettings = 4,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8
};

std::string number_of(std::uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
  return bytes;
}

std::uint32_t number_in(std::string_view bytes) {
  std::uint32_t value = 0;
  for (const char byte : bytes.substr(0, 4)) value = value << 8U | static_cast<unsigned char>(byte);
  return value;
}

std::string frame(char type, char flags, std::uint32_t stream, const std::string& payload) {
  const std::string size = number_of(static_cast<std::uint32_t>(payload.size()));
  return size.substr(1) + type + flags + number_of(stream) + payload;
}

/// Fields that the first request of a connection sends, to be named by the others.
std::string first_fields(const std::string& method) {
  std::string block = "\x83\x86";  // POST, http
  for (const auto& [name, value] : {std::pair<std::string, std::string>{":path", method},
                                    {":authority", "localhost"},
                                    {"te", "trailers"},
                                    {"content-type", "application/grpc"},
                                    {"grpc-timeout", "30S"}}) {
    block += '\x40';
    block += static_cast<char>(name.size()) + name + static_cast<char>(value.size()) + value;
  }
  return block;
}
/// The same: entries 66 down to 62 of the table.
const std::string kLaterFields = "\x83\x86\xC2\xC1\xC0\xBF\xBE";

}  // namespace

/// One connection; sends and receives what there is without waiting.
class RawLoad::Connection {
 public:
  Connection(const std::string& path, std::string fields)
      : fields_(std::move(fields)), fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      ::close(fd_);
      throw std::runtime_error("expected a server at " + path);
    }
    out_ = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" +
           frame(kSettings, 0, 0, std::string("\0\x04", 2) + number_of(kOwnWindow)) +
           frame(kWindowUpdate, 0, 0, number_of(kOwnWindow));
  }
  ~Connection() { ::close(fd_); }
  Connection(const Connection&) = delete;  // owns a socket
  Connection& operator=(const Connection&) = delete;

  /// `body`: the payload of a DATA frame.
  void call(const std::string& body, Clock::time_point due) { waiting_.push_back({&body, due}); }
  [[nodiscard]] bool idle() const { return calls_.empty() && waiting_.empty(); }
  [[nodiscard]] pollfd polled() const {
    return {fd_, static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT), 0};
  }

  void send() {
    while (!waiting_.empty() && calls_.size() < kMostStreams &&
           window_ >= static_cast<std::int64_t>(waiting_.front().body->size())) {
      start(waiting_.front());
      waiting_.pop_front();
    }
    if (out_.empty()) return;
    const ssize_t sent = ::send(fd_, out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) throw std::runtime_error("expected a connection, found none");
    if (sent > 0) out_.erase(0, static_cast<std::size_t>(sent));
  }
  void receive(Outcomes& outcomes) {
    char buffer[1 << 16];
    const ssize_t bytes = ::recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (bytes == 0) throw std::runtime_error("expected a connection, found its end");
    if (bytes < 0) return;
    in_.append(buffer, static_cast<std::size_t>(bytes));
    std::size_t at = 0;
    while (in_.size() - at >= kFrameHead) {
      const std::string_view head(in_.data() + at, kFrameHead);
      const std::size_t size = number_in(std::string(1, '\0') + in_.substr(at, 3));
      if (in_.size() - at < kFrameHead + size) break;
      take(head, std::string_view(in_).substr(at + kFrameHead, size), outcomes);
      at += kFrameHead + size;
    }
    in_.erase(0, at);
  }

 private:
  struct Waiting {
    const std::string* body;
    Clock::time_point due;
  };
  struct Call {
    Clock::time_point due;
    bool has_data = false;
  };

  void start(const Waiting& call) {
    const std::string& fields = stream_ == 1 ? fields_ : kLaterFields;
    out_ += frame(kHeaders, kEndHeaders, stream_, fields);
    out_ += frame(kData, kEndStream, stream_, *call.body);
    window_ -= static_cast<std::int64_t>(call.body->size());
    calls_.emplace(stream_, Call{call.due});
    stream_ += 2;
  }
  void take(std::string_view head, std::string_view payload, Outcomes& outcomes) {
    const char flags = head[4];
    const std::uint32_t stream = number_in(head.substr(5));
    switch (head[3]) {
      case kSettings:
        if ((flags & kAck) == 0) out_ += frame(kSettings, kAck, 0, "");
        break;
      case kPing:
        if ((flags & kAck) == 0) out_ += frame(kPing, kAck, 0, std::string(payload));
        break;
      case kWindowUpdate:
        if (stream == 0) window_ += number_in(payload);
        break;
      case kData:
        if (const auto call = calls_.find(stream); call != calls_.end()) {
          call->second.has_data = true;
        }
        break;
      case kHeaders:
        end(stream, find_status(payload), (flags & kEndStream) != 0, outcomes);
        break;
      case kReset:
        if (calls_.erase(stream) > 0) outcomes.failure = "a stream that was reset";
        break;
      case kGoAway:
        throw std::runtime_error("expected a server that goes on, found one that sends GOAWAY");
      default:
        break;
    }
  }
  void end(std::uint32_t stream, const std::optional<std::string>& status, bool is_end,
           Outcomes& outcomes) {
    const auto call = calls_.find(stream);
    if (!is_end || call == calls_.end()) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - call->second.due).count();
    if (status == "0" && call->second.has_data) {
      outcomes.admitted.push_back(seconds);
    } else if (status == "8") {
      outcomes.rejected.push_back(seconds);
    } else {
      outcomes.failure = "code " + status.value_or("none");
    }
    calls_.erase(call);
  }

  static std::unique_ptr<nghttp2_hd_inflater, decltype(&nghttp2_hd_inflate_del)> make_inflater() {
    nghttp2_hd_inflater* inflater = nullptr;
    if (nghttp2_hd_inflate_new(&inflater) != 0) throw std::bad_alloc();
    return {inflater, &nghttp2_hd_inflate_del};
  }
  /// Reads a block of header fields, as every one of a connection must be, and returns grpc-status.
  std::optional<std::string> find_status(std::string_view block) {
    std::optional<std::string> status;
    const auto* data = reinterpret_cast<const std::uint8_t*>(block.data());
    std::size_t left = block.size();
    for (int flags = 0; (flags & NGHTTP2_HD_INFLATE_FINAL) == 0;) {
      nghttp2_nv field{};
      const auto read = nghttp2_hd_inflate_hd2(inflater_.get(), &field, &flags, data, left, 1);
      if (read < 0) throw std::runtime_error("header fields: expected HPACK, found none");
      data += read;
      left -= static_cast<std::size_t>(read);
      if ((flags & NGHTTP2_HD_INFLATE_EMIT) == 0) continue;
      const std::string_view name(reinterpret_cast<const char*>(field.name), field.namelen);
      if (name != "grpc-status") continue;
      status.emplace(reinterpret_cast<const char*>(field.value), field.valuelen);
    }
    nghttp2_hd_inflate_end_headers(inflater_.get());
    return status;
  }

  const std::string fields_;
  const int fd_;
  const std::unique_ptr<nghttp2_hd_inflater, decltype(&nghttp2_hd_inflate_del)> inflater_ =
      make_inflater();
  std::string out_, in_;
  std::int64_t window_ = kFirstWindow;
  std::uint32_t stream_ = 1;
  std::deque<Waiting> waiting_;
  std::unordered_map<std::uint32_t, Call> calls_;
};

RawLoad::RawLoad(const std::string& socket, int connections, const std::string& method,
                 const std::vector<std::string>& requests) {
  for (int i = 0; i < connections; ++i) {
    connections_.push_back(std::make_unique<Connection>(socket, first_fields(method)));
  }
  for (const std::string& request : requests) {
    const std::string size = number_of(static_cast<std::uint32_t>(request.size()));
    bodies_.push_back(std::string(1, '\0') + size + request);  // not compressed
  }
}

RawLoad::~RawLoad() = default;

template <typename Due>
Outcomes RawLoad::run(Clock::time_point end, std::chrono::nanoseconds pause, Due due) {
  Outcomes outcomes;
  const double cpu_before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
  std::size_t made = 0;
  std::vector<pollfd> polled;
  for (;;) {
    Clock::time_point next = due(made, outcomes);
    for (; next <= Clock::now() && next < end; next = due(++made, outcomes)) {
      // Every request over every connection.
      Connection& connection = *connections_[next_ / bodies_.size() % connections_.size()];
      connection.call(bodies_[next_ % bodies_.size()], next);
      ++next_;
    }
    polled.clear();
    bool idle = true;
    for (const auto& connection : connections_) {
      connection->send();
      polled.push_back(connection->polled());
      idle = idle && connection->idle();
    }
    if (idle && Clock::now() >= end) break;
    if (pause > Clock::duration(0)) std::this_thread::sleep_for(pause);
    const auto wait = std::clamp<Clock::duration>(std::min(next, end) - Clock::now(),
                                                  Clock::duration(0), std::chrono::seconds(1));
    const timespec timeout{
        .tv_sec = 0,
        .tv_nsec = std::min<long>(std::chrono::nanoseconds(wait).count(), 999'999'999)};
    const timespec longest{.tv_sec = 1, .tv_nsec = 0};
    (void)::ppoll(polled.data(), polled.size(), Clock::now() < end ? &timeout : &longest, nullptr);
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if ((polled[i].revents & ~POLLOUT) != 0) connections_[i]->receive(outcomes);
    }
    if (Clock::now() < end) outcomes.in_time = outcomes.admitted.size();
  }
  outcomes.client_cpu_seconds = cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
  return outcomes;
}

Outcomes RawLoad::closed(int outstanding, std::chrono::nanoseconds time) {
  return run(Clock::now() + time, Clock::duration(0),
             [outstanding](std::size_t made, const Outcomes& outcomes) {
               const std::size_t ended = outcomes.admitted.size() + outcomes.rejected.size();
               const bool enough = made - ended >= static_cast<std::size_t>(outstanding);
               return enough ? Clock::time_point::max() : Clock::now();
             });
}

Outcomes RawLoad::open(double per_second, std::chrono::nanoseconds time) {
  const Clock::time_point start = Clock::now();
  const std::chrono::duration<double> interval(1 / per_second);
  return run(start + time, kGather, [&](std::size_t made, const Outcomes& /*outcomes*/) {
    return start +
           std::chrono::duration_cast<Clock::duration>(interval * static_cast<double>(made));
  });
}

}  // namespace kvtier::bench
