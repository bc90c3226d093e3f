#include "services/dataplane/data_plane.h"

#include "services/wire/durations.h"

#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>

#include <algorithm>
#include <array>
#include <span>

namespace kvtier::services {
namespace {

namespace ssl = boost::asio::ssl;

constexpr std::chrono::milliseconds kDrainInterval{2};
/// Of a connection: its buffer, and as much for TLS.
constexpr std::size_t kConnectionBytes = 128 << 10;

/// Copies exactly as many bytes as `to` has.
template <std::size_t N>
void take_bytes(const std::string& from, const char* field, std::array<std::byte, N>& to) {
  if (from.size() != N) {
    throw ServiceError::invalid(field, std::to_string(N) + " bytes", std::to_string(from.size()));
  }
  std::ranges::copy(std::as_bytes(std::span(from)), to.begin());
}

/// What the library says when memory cannot be mapped, as reasons that a client can act on.
ServiceError sharing_error(const Error& error) {
  const auto refused = [&](const char* reason) {
    return ServiceError(Code::kFailedPrecondition, reason, error.what());
  };
  switch (error.code()) {
    case ErrorCode::kUnimplemented:
      return refused("NO_DEVICE");
    case ErrorCode::kNotFound:
      return refused("OTHER_DEVICE");
    case ErrorCode::kFailedPrecondition:
      return refused("HANDLE_REFUSED");
    default:
      return to_service_error(std::make_exception_ptr(error));
  }
}

}  // namespace

std::int64_t max_memory(const DataPlaneOptions& options) noexcept {
  const std::size_t connections =
      options.attachments.max_attachments + options.limits.max_unattached;
  return options.attachments.max_total_staging_bytes +
         static_cast<std::int64_t>(connections * kConnectionBytes);
}

DataPlane::DataPlane(DataPlaneOptions options, const TlsIdentity& tls, ServiceCore& core,
                     PageStore& pages)
    : options_(std::move(options)),
      attachments_(options_.attachments, options_.now),
      context_{core, pages, attachments_, options_.limits, counters_, options_.now},
      endpoints_(options_.listen),
      work_(boost::asio::make_work_guard(loop_)) {
  if (!tls.empty()) tls_ = make_tls_context(tls);
  for (Endpoint& endpoint : endpoints_) {
    listener_.add(endpoint, options_.bound.get(),
                  [this, is_unix = endpoint.is_unix](Descriptor socket) {
                    accept(std::move(socket), is_unix);
                  });
  }
  thread_ = std::thread([this] { loop_.run(); });
}

std::vector<std::shared_ptr<DataConnection>> DataPlane::open() {
  std::vector<std::shared_ptr<DataConnection>> open;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, connection] : connections_) open.push_back(connection);
  return open;
}

void DataPlane::stop(std::chrono::milliseconds grace) {
  listener_.stop();
  const auto end = std::chrono::steady_clock::now() + grace;
  while (counters_.queued_bytes > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kDrainInterval);
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  for (const auto& connection : open()) {
    connection->go_away(ServiceError::draining());
    connection->close_now();
  }
  work_.reset();
  if (thread_.joinable()) thread_.join();
  listener_.leave_paths();
}

void DataPlane::sweep(TimePoint now) {
  attachments_.sweep();
  for (const auto& connection : open()) connection->end_if_slow(now);
}

void DataPlane::use_tls(const TlsIdentity& identity) {
  std::shared_ptr<ssl::context> fresh = make_tls_context(identity);
  const std::lock_guard lock(mutex_);
  if (tls_) tls_.swap(fresh);
}

void DataPlane::accept(Descriptor socket, bool is_unix) {
  const auto strand = boost::asio::make_strand(loop_);
  std::shared_ptr<ssl::context> tls;
  {
    const std::lock_guard lock(mutex_);
    tls = tls_;
  }
  std::unique_ptr<ByteStream> stream =
      is_unix ? make_unix_stream(strand, std::move(socket))
              : make_tcp_stream(strand, std::move(socket), std::move(tls));
  auto connection = std::make_shared<DataConnection>(context_, strand, std::move(stream),
                                                     [this](DataConnection& ended) {
                                                       const std::lock_guard lock(mutex_);
                                                       connections_.erase(&ended);
                                                     });
  std::shared_ptr<DataConnection> outrun;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    latest_.emplace_back(connection);
    connections_.emplace(connection.get(), connection);
    if (latest_.size() > options_.limits.max_unattached) {
      outrun = latest_.front().lock();
      latest_.pop_front();
    }
  }
  if (outrun && !outrun->attached()) outrun->close_now();
  boost::asio::post(strand, [connection] { connection->start(); });
}

void DataPlane::create_attachment(Tenant& tenant, const v1::CreateAttachmentRequest& request,
                                  v1::CreateAttachmentResponse& response) {
  Attachments::Created created =
      attachments_.create(tenant, request.process_id(), request.staging_bytes());
  v1::Attachment& attachment = *response.mutable_attachment();
  attachment.set_name(created.name);
  attachment.set_process_id(request.process_id());
  attachment.set_staging_bytes(created.staging_bytes);
  for (const Endpoint& endpoint : endpoints_) response.add_endpoints(endpoint.text());
  response.set_token(std::move(created.token));
  *response.mutable_token_ttl() = duration_of(options_.attachments.token_life);
}

void DataPlane::share_device_memory(Tenant& tenant, const v1::ShareDeviceMemoryRequest& request,
                                    v1::ShareDeviceMemoryResponse& response) {
  const auto& open = options_.open_device_memory;
  if (!open || options_.attachments.max_regions == 0) {
    throw ServiceError(Code::kFailedPrecondition, "NOT_SHARED",
                       "this server maps no device memory of clients");
  }
  DeviceMemoryHandle handle;
  take_bytes(request.cuda_ipc_handle(), "cuda_ipc_handle", handle.ipc);
  take_bytes(request.device_uuid(), "device_uuid", handle.device);
  check_at_least("bytes", request.bytes(), 1);
  const auto bytes = static_cast<std::size_t>(request.bytes());
  response.set_region(attachments_.share(tenant, request.attachment(), [&] {
    try {
      return DeviceRegion{open(handle, bytes), bytes};
    } catch (const Error& error) {
      throw sharing_error(error);
    }
  }));
}

}  // namespace kvtier::services
