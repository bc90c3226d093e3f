#include "services/dataplane/connection.h"

#include "kvtier/v1/transfer.pb.h"

#include "services/base/from_message.h"
#include "services/page_cache/page_store.h"

#include <boost/asio/post.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

namespace kvtier::services {
namespace {

constexpr std::size_t kBufferBytes = 64 << 10;
/// Before there is a tenant to count it: a token's frame.
constexpr std::size_t kFirstBufferBytes = kFrameHeaderBytes + kAttachTokenBytes;

Bytes bytes_of(const std::string& text) {
  Bytes bytes(text.size());
  std::ranges::copy(std::as_bytes(std::span(text)), bytes.begin());
  return bytes;
}

Bytes status_of(const ServiceError& error) {
  v1::ItemStatus status;
  set_status(error, status);
  return bytes_of(status.SerializeAsString());
}

iovec piece_of(const void* data, std::size_t size) { return {const_cast<void*>(data), size}; }

constexpr std::int64_t kOutcomeBytes = sizeof(PageOutcome);

/// Charges a frame for what decoding makes of its control, and for the outcomes of its pages.
void charge_pages(const IncomingFrame& frame, std::size_t pages) {
  frame.reservation()->take(frame.header().control_bytes +
                            2 * kOutcomeBytes * static_cast<std::int64_t>(pages));
}

}  // namespace

Outgoing make_outgoing(FrameType type, std::uint32_t flags, std::uint64_t request_id, Bytes control,
                       std::vector<iovec> payload, std::shared_ptr<void> keep) {
  std::uint64_t bytes = 0;
  for (const iovec& piece : payload) bytes += piece.iov_len;
  Outgoing frame;
  frame.header = encode_header(make_header(type, flags, request_id, control, bytes));
  frame.control = std::move(control);
  frame.payload = std::move(payload);
  frame.keep = std::move(keep);
  return frame;
}

DataConnection::DataConnection(ConnectionContext& context, boost::asio::any_io_executor executor,
                               std::unique_ptr<ByteStream> stream,
                               std::function<void(DataConnection&)> ended)
    : context_(context),
      counted_(context),
      executor_(std::move(executor)),
      stream_(std::move(stream)),
      ended_(std::move(ended)),
      timer_(executor_) {}

DataConnection::~DataConnection() = default;

void DataConnection::start() {
  arm(context_.limits.attach_time);
  stream_->start([self = shared_from_this()](const boost::system::error_code& error) {
    if (error) return self->close();
    self->buffer_.resize(kFirstBufferBytes);
    self->read_more();
  });
}

void DataConnection::arm(std::chrono::milliseconds time) {
  timer_.expires_after(time);
  timer_.async_wait([weak = weak_from_this(),
                     number = ++timer_number_](const boost::system::error_code& error) {
    const auto self = weak.lock();
    if (error || !self || number != self->timer_number_) return;
    ++self->context_.counters.timeouts;
    self->go_away(ServiceError::unavailable("STREAM_IDLE", "the client took too long for a frame"));
    self->close();
  });
}

std::shared_ptr<void> DataConnection::hold(std::int64_t bytes) {
  queued_bytes_ += bytes;
  context_.counters.queued_bytes += bytes;
  return {nullptr, [self = shared_from_this(), bytes](void*) {
            self->context_.counters.queued_bytes -= bytes;
            const std::int64_t left = self->queued_bytes_ -= bytes;
            if (left < self->context_.limits.max_queued_bytes && self->paused_.exchange(false)) {
              self->come_back();
            }
          }};
}

void DataConnection::read_more() {
  if (reading_ || ending_) return;
  std::span<std::byte> into;
  if (frame_) {
    into = frame_->room(buffer_);
  } else {
    if (begin_ > 0) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    if (attachment_) buffer_.resize(kBufferBytes);
    into = std::span(buffer_).subspan(end_);
  }
  reading_ = true;
  stream_->read_some(
      into, [self = shared_from_this()](const boost::system::error_code& error, std::size_t bytes) {
        self->reading_ = false;
        if (error || bytes == 0) return self->close();
        self->context_.counters.bytes_read += bytes;
        if (self->frame_) {
          self->frame_->filled(bytes);
        } else {
          self->end_ += bytes;
        }
        self->consume();
      });
}

void DataConnection::consume() {
  // A token that had come by the end would be used with nothing to give its attachment back.
  if (reading_ || closed_) return;
  while (!ending_ && jobs_.empty()) {
    if (!frame_ && !begin_frame()) break;
    if (!frame_->complete()) break;
    end_frame();
  }
  if (ending_) return;
  const bool has_room = queued_bytes_ < context_.limits.max_queued_bytes;
  if (!jobs_.empty() && has_room) return come_back();
  const bool may_read = jobs_.empty() && (frame_ || has_room);
  if (may_read) {
    if ((frame_ || end_ > begin_) && !frame_timed_ && attachment_) {
      frame_timed_ = true;
      arm(context_.limits.frame_time);
    }
    return read_more();
  }
  // A thread that lowers the count after this sees the flag; one that did before is made up for.
  ++context_.counters.pauses;
  paused_ = true;
  if (queued_bytes_ < context_.limits.max_queued_bytes && paused_.exchange(false)) come_back();
}

/// Returns whether there is a header, and enough room in the queue to go on with its frame.
bool DataConnection::begin_frame() {
  if (queued_bytes_ >= context_.limits.max_queued_bytes) return false;
  if (end_ - begin_ < kFrameHeaderBytes) return false;
  try {
    const FrameHeader header =
        decode_header(std::span(buffer_).subspan(begin_).first<kFrameHeaderBytes>());
    if (!attachment_ &&
        (header.type != FrameType::kAttach || header.body_bytes != kAttachTokenBytes)) {
      throw Error(ErrorCode::kInvalidArgument, "frame: expected a token first, found another");
    }
    std::shared_ptr<InflightReservation> reservation;
    std::optional<ServiceError> refusal;
    if (attachment_) {
      refusal = failure_of([&] { reservation = context_.core.admit(attachment_->tenant, 0); });
    }
    frame_ = std::make_shared<IncomingFrame>(header, std::move(reservation), std::move(refusal));
  } catch (...) {
    ++context_.counters.broken_frames;
    go_away(to_service_error(std::current_exception()));
    return false;
  }
  begin_ += kFrameHeaderBytes;
  begin_ += frame_->append(std::span<const std::byte>(buffer_).subspan(begin_, end_ - begin_));
  return true;
}

void DataConnection::end_frame() {
  ++context_.counters.frames_read;
  if (frame_timed_) {
    frame_timed_ = false;
    ++timer_number_;
    timer_.cancel();
  }
  const std::shared_ptr<IncomingFrame> frame = std::move(frame_);
  try {
    if (!frame->refusal()) check_control(frame->header(), frame->control());
    dispatch(frame);
  } catch (...) {
    // What throws here cannot be answered: the frame itself is broken, or out of order.
    ++context_.counters.broken_frames;
    go_away(to_service_error(std::current_exception()));
  }
}

void DataConnection::work() {
  if (jobs_.empty() || ending_ || queued_bytes_ >= context_.limits.max_queued_bytes) return;
  if (jobs_.front().job->step(*this)) jobs_.pop_front();
  if (!jobs_.empty()) come_back();
}

void DataConnection::come_back() {
  if (working_.exchange(true)) return;
  boost::asio::post(executor_, [self = shared_from_this()] {
    self->working_ = false;
    self->work();
    self->consume();
  });
}

void DataConnection::reply_failed(FrameType type, std::uint64_t request_id,
                                  const ServiceError& error) {
  send(make_outgoing(type, kFailed, request_id, status_of(error)));
}

void DataConnection::go_away(const ServiceError& error) {
  Outgoing frame = make_outgoing(FrameType::kGoAway, kFailed, 0, status_of(error));
  frame.is_last = true;
  send(std::move(frame));
  // A client that does not read it is not waited for.
  boost::asio::post(executor_, [self = shared_from_this()] {
    if (!self->closed_) self->arm(self->context_.limits.attach_time);
  });
}

void DataConnection::close_now() {
  boost::asio::post(executor_, [self = shared_from_this()] { self->close(); });
}

void DataConnection::end_if_slow(TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (closed_ || !rate_.too_slow(now, context_.limits.rate)) return;
  ++context_.counters.slow;
  close_now();  // a frame with the reason would wait behind what it does not read
}

void DataConnection::send(Outgoing frame) {
  std::int64_t bytes = static_cast<std::int64_t>(kFrameHeaderBytes + frame.control.size());
  for (const iovec& piece : frame.payload) bytes += static_cast<std::int64_t>(piece.iov_len);
  std::shared_ptr<void> held = hold(bytes);
  const std::lock_guard lock(mutex_);
  if (closed_ || ending_) return;
  ending_ = frame.is_last;
  Queued& queued = queue_.emplace_back();
  queued.frame = std::move(frame);
  queued.held = std::move(held);
  queued.pieces.reserve(2 + queued.frame.payload.size());
  queued.pieces.push_back(piece_of(queued.frame.header.data(), kFrameHeaderBytes));
  if (!queued.frame.control.empty()) {
    queued.pieces.push_back(piece_of(queued.frame.control.data(), queued.frame.control.size()));
  }
  queued.pieces.insert(queued.pieces.end(), queued.frame.payload.begin(),
                       queued.frame.payload.end());
  ++context_.counters.frames_written;
  if (writing_) return;
  const bool broken = !write_now();
  if (broken || (queue_.empty() && ending_)) return close_now();
  if (queue_.empty()) return;
  rate_.wait(context_.now());
  writing_ = true;
  boost::asio::post(executor_, [self = shared_from_this()] { self->await_write(); });
}

std::vector<iovec> DataConnection::gather() const {
  std::vector<iovec> pieces;
  for (const Queued& queued : queue_) {
    for (std::size_t i = queued.first; i < queued.pieces.size(); ++i) {
      if (pieces.size() == kMaxPieces) return pieces;
      pieces.push_back(queued.pieces[i]);
    }
  }
  return pieces;
}

bool DataConnection::write_now() {
  while (!queue_.empty()) {
    const std::vector<int>& descriptors = queue_.front().frame.descriptors;
    const std::ptrdiff_t written = stream_->try_write(gather(), descriptors);
    if (written < 0) return false;
    if (written == 0) return true;
    finish_written(static_cast<std::size_t>(written));
  }
  return true;
}

void DataConnection::finish_written(std::size_t bytes) {
  context_.counters.bytes_written += bytes;
  rate_.moved(static_cast<std::int64_t>(bytes));
  queue_.front().frame.descriptors.clear();
  while (bytes > 0) {
    Queued& queued = queue_.front();
    iovec& piece = queued.pieces[queued.first];
    const std::size_t taken = std::min(bytes, piece.iov_len);
    piece.iov_base = static_cast<char*>(piece.iov_base) + taken;
    piece.iov_len -= taken;
    bytes -= taken;
    if (piece.iov_len > 0) continue;
    if (++queued.first == queued.pieces.size()) queue_.pop_front();
  }
}

void DataConnection::await_write() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    pieces_ = gather();
  }
  stream_->write_some(pieces_, [self = shared_from_this()](const boost::system::error_code& error,
                                                           std::size_t bytes) {
    if (error) return self->close();
    bool done = false;
    bool ends = false;
    {
      const std::lock_guard lock(self->mutex_);
      if (self->closed_) return;
      self->finish_written(bytes);
      done = self->queue_.empty();
      if (done) self->rate_.go_on(self->context_.now());
      ends = done && self->ending_;
      self->writing_ = !done;
    }
    if (ends) return self->close();
    if (!done) self->await_write();
  });
}

void DataConnection::close() {
  std::deque<Queued> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (closed_.exchange(true)) return;
    stream_->close();
    // What an unfinished write names stays until its handler has run.
    if (!writing_) dropped.swap(queue_);
  }
  ++timer_number_;
  timer_.cancel();
  if (attachment_) context_.attachments.detach(attachment_->name);
  jobs_.clear();
  if (writing_) {
    boost::asio::post(executor_, [self = shared_from_this()] { self->queue_.clear(); });
  }
  ended_(*this);
}

// ---- requests

void DataConnection::dispatch(const std::shared_ptr<IncomingFrame>& frame) {
  if (!attachment_ && frame->refusal()) throw *frame->refusal();
  if (!attachment_) return attach(*frame);
  struct Request {
    FrameType type, reply;
    std::string_view method;  // that it counts as when it is refused before it was a call
    void (DataConnection::*act)(const std::shared_ptr<IncomingFrame>& frame);
  };
  // The frame of a call does not say which, before it is read.
  static const std::array<Request, 3> requests{
      {{FrameType::kCall, FrameType::kReply, "other", &DataConnection::call},
       {FrameType::kReadPages, FrameType::kPages, rpc_name<v1::ReadPagesRequest>(),
        &DataConnection::read_pages},
       {FrameType::kWritePages, FrameType::kWritten, rpc_name<v1::WritePagesRequest>(),
        &DataConnection::write_pages}}};
  const FrameHeader& header = frame->header();
  const auto* const request = std::ranges::find(requests, header.type, &Request::type);
  if (request == requests.end()) {
    throw ServiceError::invalid("frame.type", "a request",
                                std::to_string(static_cast<int>(header.type)));
  }
  try {
    check_certificate();
  } catch (const ServiceError& error) {
    return go_away(error);
  }
  try {
    if (frame->refusal()) throw *frame->refusal();
    (this->*request->act)(frame);
  } catch (const ServiceError& error) {
    context_.core.refused({.tenant = &attachment_->tenant}, request->method, error);
    reply_failed(request->reply, header.request_id, error);
  }
}

void DataConnection::attach(const IncomingFrame& frame) {
  const std::span<const std::byte> control = frame.control();
  Peer peer = stream_->peer();
  try {
    const Tenants& tenants = context_.core.tenants();
    authenticated_ = tenants.version();
    credentials_ = {.certificate_names = stream_->certificate_names(),
                    .certificate = stream_->certificate()};
    if (!credentials_.certificate.empty()) peer.tenant = &tenants.authenticate(credentials_);
    attachment_ = context_.attachments.redeem(
        {reinterpret_cast<const char*>(control.data()), control.size()}, peer,
        [weak = weak_from_this()] {
          if (const auto self = weak.lock()) {
            self->go_away(ServiceError::unavailable("DELETED", "the attachment was deleted"));
          }
        });
  } catch (const ServiceError& error) {
    ++context_.counters.refused;
    go_away(error);
    return;
  }
  AttachedBody attached;
  std::vector<int> descriptors;
  if (stream_->shares_memory()) {
    const std::optional<ServiceError> failure = failure_of([&] {
      staging_ = std::make_shared<SharedRegion>(
          SharedRegion::create(static_cast<std::size_t>(attachment_->staging_bytes)));
    });
    if (failure) return go_away(*failure);
    attached.regions.push_back({RegionKind::kStaging, staging_->bytes().size()});
    descriptors.push_back(staging_->descriptor());
    try {
      const ArenaFile arena = context_.pages.arena(attachment_->tenant);
      attached.regions.push_back({RegionKind::kReadArena, arena.bytes});
      descriptors.push_back(arena.fd);
    } catch (const ServiceError&) {
      // The tenant has stored no pages yet.
    }
  }
  ++timer_number_;
  timer_.cancel();
  ++context_.counters.attached;
  attached_ = true;
  Outgoing reply = make_outgoing(FrameType::kAttached, 0, frame.header().request_id,
                                 encode(attached), {}, staging_);
  reply.descriptors = std::move(descriptors);
  send(std::move(reply));
}

void DataConnection::check_certificate() {
  const Tenants& tenants = context_.core.tenants();
  const std::uint64_t version = tenants.version();
  if (version == authenticated_) return;
  if (!credentials_.certificate.empty() &&
      &tenants.authenticate(credentials_) != &attachment_->tenant) {
    throw ServiceError(Code::kUnauthenticated, "UNAUTHENTICATED",
                       "the certificate is another tenant's by now");
  }
  authenticated_ = version;
}

void DataConnection::call(const std::shared_ptr<IncomingFrame>& frame) {
  const FrameHeader& header = frame->header();
  const std::shared_ptr<InflightReservation>& reservation = frame->reservation();
  reservation->take(header.control_bytes);  // for what decoding copies
  CallBody request = decode_call(frame->control());
  const bool is_inline = (header.flags & kInline) != 0;
  if (!is_inline && !staging_) {
    throw Error(ErrorCode::kInvalidArgument,
                "frame.flags: expected kInline without shared memory, found other flags");
  }
  CallMemory memory;
  if (is_inline) {
    memory.input = frame->payload();
    request.output = {};
  } else {
    if (!lies_within(request.output, staging_->bytes().size())) {
      throw ServiceError::invalid(
          "output", "bytes within the staging region",
          std::to_string(request.output.bytes) + " at " + std::to_string(request.output.offset));
    }
    memory.shared = &context_.counters.shared;
    memory.input = staging_->bytes();
    memory.output = staging_->bytes().subspan(request.output.offset, request.output.bytes);
  }
  const auto bytes =
      static_cast<std::int64_t>(header.body_bytes + tensor_bytes_of(request, memory));
  using Kept = std::tuple<std::shared_ptr<IncomingFrame>, std::shared_ptr<SharedRegion>,
                          std::shared_ptr<void>>;
  memory.keep = std::make_shared<Kept>(frame, staging_, hold(bytes));
  Call call{.tenant = &attachment_->tenant,
            .cancelled =
                [weak = weak_from_this()] {
                  const auto self = weak.lock();
                  return !self || self->closed();
                },
            .reservation = reservation};
  if (request.timeout_ms > 0) {
    call.deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(request.timeout_ms);
  }
  run_call(context_.core, call, request, std::move(memory),
           [self = shared_from_this(), id = header.request_id, is_inline,
            reservation](CallOutcome outcome) {
             if (outcome.error) return self->reply_failed(FrameType::kReply, id, *outcome.error);
             using Reply = std::pair<std::string, std::shared_ptr<InflightReservation>>;
             auto reply = std::make_shared<Reply>(std::move(outcome.output), reservation);
             std::vector<iovec> payload;
             if (!reply->first.empty()) {
               payload.push_back({reply->first.data(), reply->first.size()});
             }
             self->send(make_outgoing(FrameType::kReply, is_inline ? kInline : 0, id,
                                      encode(outcome.reply), std::move(payload), reply));
           });
}

PageRequest DataConnection::page_request(const std::shared_ptr<IncomingFrame>& frame) const {
  return {context_.pages, attachment_->tenant, frame->header(), frame, staging_ != nullptr};
}

void DataConnection::read_pages(const std::shared_ptr<IncomingFrame>& frame) {
  std::vector<PageDescriptor> descriptors = decode_descriptors(frame->control());
  charge_pages(*frame, descriptors.size());
  jobs_.push_back({make_read_job(page_request(frame), std::move(descriptors)),
                   hold(static_cast<std::int64_t>(frame->header().body_bytes))});
  work();
}

void DataConnection::write_pages(const std::shared_ptr<IncomingFrame>& frame) {
  WriteBody request = decode_write(frame->control());
  charge_pages(*frame, request.pages.size());
  std::span<const std::byte> source;
  std::shared_ptr<void> keep = frame;
  if ((frame->header().flags & kInline) != 0) {
    source = frame->payload();
  } else if (staging_) {
    source = staging_->bytes();
    keep = staging_;
  }
  jobs_.push_back({make_write_job(page_request(frame), std::move(request), source, std::move(keep)),
                   hold(static_cast<std::int64_t>(frame->header().body_bytes))});
  work();
}

}  // namespace kvtier::services
