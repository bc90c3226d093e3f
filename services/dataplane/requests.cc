#include "services/dataplane/calls.h"
#include "services/dataplane/connection.h"
#include "services/page_cache/page_store.h"

#include <tuple>
#include <utility>

namespace kvtier::services {
namespace {

constexpr std::int64_t kOutcomeBytes = sizeof(PageOutcome);

/// What answers a request.
FrameType reply_type(FrameType request) {
  switch (request) {
    case FrameType::kCall:
      return FrameType::kReply;
    case FrameType::kReadPages:
      return FrameType::kPages;
    case FrameType::kWritePages:
      return FrameType::kWritten;
    default:
      throw ServiceError::invalid("frame.type", "a request",
                                  std::to_string(static_cast<int>(request)));
  }
}

/// Charges a frame for what decoding makes of its control, and for the outcomes of its pages.
void charge_pages(const IncomingFrame& frame, std::size_t pages) {
  frame.grant()->take(frame.header().control_bytes +
                      2 * kOutcomeBytes * static_cast<std::int64_t>(pages));
}

}  // namespace

void DataConnection::dispatch(const std::shared_ptr<IncomingFrame>& frame) {
  if (!attachment_ && frame->refusal()) throw *frame->refusal();
  if (!attachment_) return attach(*frame);
  const FrameHeader& header = frame->header();
  const FrameType reply = reply_type(header.type);
  try {
    check_certificate();
  } catch (const ServiceError& error) {
    return go_away(error);
  }
  try {
    if (frame->refusal()) throw *frame->refusal();
    if (header.type == FrameType::kCall) return call(frame);
    if (header.type == FrameType::kReadPages) return read_pages(frame);
    write_pages(frame);
  } catch (const ServiceError& error) {
    reply_failed(reply, header.request_id, error);
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
    try {
      staging_ = std::make_shared<SharedRegion>(
          SharedRegion::create(static_cast<std::size_t>(attachment_->staging_bytes)));
    } catch (...) {
      go_away(to_service_error(std::current_exception()));
      return;
    }
    attached.regions.push_back({RegionKind::kStaging, staging_->bytes().size()});
    descriptors.push_back(staging_->descriptor());
  }
  if (staging_ && context_.pages != nullptr) {
    try {
      const ArenaFile arena = context_.pages->arena(attachment_->tenant);
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
  const std::shared_ptr<InflightReservation>& grant = frame->grant();
  grant->take(header.control_bytes);  // for what decoding copies
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
            .grant = grant};
  if (request.timeout_ms > 0) {
    call.deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(request.timeout_ms);
  }
  run_call(
      context_.core, call, request, std::move(memory),
      [self = shared_from_this(), id = header.request_id, is_inline, grant](CallOutcome outcome) {
        if (outcome.error) return self->reply_failed(FrameType::kReply, id, *outcome.error);
        using Reply = std::pair<std::string, std::shared_ptr<InflightReservation>>;
        auto reply = std::make_shared<Reply>(std::move(outcome.output), grant);
        std::vector<iovec> payload;
        if (!reply->first.empty()) {
          payload.push_back({reply->first.data(), reply->first.size()});
        }
        self->send(make_outgoing(FrameType::kReply, is_inline ? kInline : 0, id,
                                 encode(outcome.reply), std::move(payload), reply));
      });
}

PageRequest DataConnection::page_request(const std::shared_ptr<IncomingFrame>& frame) const {
  if (context_.pages == nullptr) {
    throw ServiceError(Code::kFailedPrecondition, "FAILED_PRECONDITION",
                       "this server stores no pages");
  }
  return {*context_.pages, attachment_->tenant, frame->header(), frame, staging_ != nullptr};
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
