#pragma once

#include "services/base/minimum_rate.h"
#include "services/core/service_core.h"
#include "services/dataplane/attachments.h"
#include "services/dataplane/byte_stream.h"
#include "services/dataplane/calls.h"
#include "services/dataplane/incoming_frame.h"
#include "services/dataplane/page_jobs.h"
#include "services/wire/frame.h"
#include "services/wire/shared_region.h"

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace kvtier::services {

struct ConnectionLimits {
  /// Requests that are worked on and replies that are not written yet, in bytes; beyond, nothing is
  /// read.
  std::int64_t max_queued_bytes = std::int64_t{8} << 20;
  std::chrono::milliseconds attach_time{2'000};  ///< From the first byte to the token.
  std::chrono::milliseconds frame_time{10'000};  ///< From the first byte of a frame to its last.
  /// Connections without a token, at most: one that has sent none when so many more have come ends.
  std::size_t max_unattached = 256;
  MinimumRate rate;  ///< At which a client reads replies, while any wait for it.
};

/// Figures of all connections; they only grow, but for the last two.
struct DataPlaneCounters {
  std::atomic<std::uint64_t> frames_read{0}, bytes_read{0}, frames_written{0}, bytes_written{0};
  std::atomic<std::uint64_t> attached{0}, refused{0}, broken_frames{0}, timeouts{0}, pauses{0};
  std::atomic<std::uint64_t> slow{0};  ///< Connections that were ended by the minimum rate.
  SharedBytes shared;
  std::atomic<std::int64_t> connections{0}, queued_bytes{0};
};

/// What connections share.
struct ConnectionContext {
  ServiceCore& core;
  PageStore& pages;
  Attachments& attachments;
  const ConnectionLimits limits;
  DataPlaneCounters& counters;
  const std::function<TimePoint()> now;
};

/// A frame to be written. `keep` is released when it was, or when the connection has ended.
struct Outgoing {
  HeaderBytes header{};
  Bytes control{};
  std::vector<iovec> payload{};
  std::vector<int> descriptors{};
  std::shared_ptr<void> keep{};
  bool is_last = false;  ///< The connection ends after it.
};
[[nodiscard]] Outgoing make_outgoing(FrameType type, std::uint32_t flags, std::uint64_t request_id,
                                     Bytes control, std::vector<iovec> payload = {},
                                     std::shared_ptr<void> keep = nullptr);

/// One client of the data plane: reads frames, checks them, has them executed and writes the
/// replies. A frame that is none ends the connection, with a reason; a request that cannot be met
/// is answered. Lives until its socket is closed and its requests have ended.
class DataConnection : public std::enable_shared_from_this<DataConnection> {
 public:
  /// `executor` runs one handler at a time.
  DataConnection(ConnectionContext& context, boost::asio::any_io_executor executor,
                 std::unique_ptr<ByteStream> stream, std::function<void(DataConnection&)> ended);
  ~DataConnection();
  DataConnection(const DataConnection&) = delete;  // handlers hold its address
  DataConnection& operator=(const DataConnection&) = delete;

  void start();
  /// Ends it, after a kGoAway with this error. On any thread.
  void go_away(const ServiceError& error);
  /// Ends it without waiting for what is not written yet. On any thread.
  void close_now();
  /// Ends it if its client falls short of the minimum rate. On any thread.
  void end_if_slow(TimePoint now);

  // For those who execute requests. All on any thread.

  /// Queues a frame; writes it at once where that is possible.
  void send(Outgoing frame);
  void reply_failed(FrameType type, std::uint64_t request_id, const ServiceError& error);
  /// Counts a request of `bytes` as worked on, until the returned value is gone.
  [[nodiscard]] std::shared_ptr<void> hold(std::int64_t bytes);
  [[nodiscard]] std::int64_t queued_bytes() const noexcept { return queued_bytes_; }
  [[nodiscard]] bool attached() const noexcept { return attached_; }
  [[nodiscard]] bool closed() const noexcept { return closed_; }

 private:
  struct Queued {
    Outgoing frame;
    std::vector<iovec> pieces;  ///< What is still to be written.
    std::size_t first = 0;
    std::shared_ptr<void> held;
  };

  // All on the executor, but for those that say so.
  void read_more();
  void consume();
  bool begin_frame();
  void end_frame();
  // Of complete frames.
  void dispatch(const std::shared_ptr<IncomingFrame>& frame);
  void attach(const IncomingFrame& frame);
  /// Throws UNAUTHENTICATED when the client's certificate is no longer its tenant's.
  void check_certificate();
  void call(const std::shared_ptr<IncomingFrame>& frame);
  void read_pages(const std::shared_ptr<IncomingFrame>& frame);
  void write_pages(const std::shared_ptr<IncomingFrame>& frame);
  [[nodiscard]] PageRequest page_request(const std::shared_ptr<IncomingFrame>& frame) const;
  /// Does a part of the first job, and comes back for the rest unless the queue is full.
  void work();
  /// Posts `work`, also when it saw a full queue: replies of calls leave on other threads. Then
  /// goes on with reading. On any thread.
  void come_back();
  void arm(std::chrono::milliseconds time);
  void close();
  void await_write();
  // With `mutex_` held, on any thread.
  [[nodiscard]] std::vector<iovec> gather() const;
  /// Writes what can be written now. Returns false on an error.
  bool write_now();
  void finish_written(std::size_t bytes);

  /// Counts the connection for as long as it holds anything.
  struct Counted {
    explicit Counted(ConnectionContext& of) : context(of) { ++context.counters.connections; }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;
    ~Counted() { --context.counters.connections; }
    ConnectionContext& context;
  };

  ConnectionContext& context_;
  const Counted counted_;  ///< Before what has descriptors and memory, so that it ends after them.
  const boost::asio::any_io_executor executor_;
  const std::unique_ptr<ByteStream> stream_;
  const std::function<void(DataConnection&)> ended_;
  boost::asio::steady_timer timer_;
  Bytes buffer_;                          ///< Empty before the handshake, small before the token.
  std::size_t begin_ = 0, end_ = 0;       ///< What of `buffer_` was read and not consumed.
  std::shared_ptr<IncomingFrame> frame_;  ///< Null: between frames.
  struct Job {
    std::unique_ptr<PageJob> job;
    std::shared_ptr<void> held;
  };
  std::deque<Job> jobs_;              ///< While there are any, no frame is taken up.
  std::atomic<bool> working_{false};  ///< `work` is posted.
  bool reading_ = false;
  bool frame_timed_ = false;
  std::uint64_t timer_number_ = 0;  ///< Of the last timer that counts.
  std::vector<iovec> pieces_;       ///< Being written.
  std::shared_ptr<Attachment> attachment_;
  Credentials credentials_;          ///< Of the client's certificate; empty without TLS.
  std::uint64_t authenticated_ = 0;  ///< `Tenants::version` that they were held against.
  std::shared_ptr<SharedRegion> staging_;
  std::atomic<bool> attached_{false}, closed_{false};
  std::atomic<std::int64_t> queued_bytes_{0};
  std::atomic<bool> paused_{false};

  std::atomic<bool> ending_{false};  ///< The last frame is queued, or there will be none.

  std::mutex mutex_;  ///< Guards all below, and writing to the stream.
  std::deque<Queued> queue_;
  bool writing_ = false;  ///< A write waits on the executor.
  RateWindow rate_;       ///< Waits for the client while `queue_` holds anything.
};

}  // namespace kvtier::services
