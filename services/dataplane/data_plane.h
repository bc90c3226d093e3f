#pragma once

#include "kvtier/device_memory.h"

#include "services/base/bound_sockets.h"
#include "services/base/endpoint.h"
#include "services/base/listener.h"
#include "services/base/tls_identity.h"
#include "services/core/service_core.h"
#include "services/dataplane/attachments.h"
#include "services/dataplane/connection.h"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ssl/context.hpp>

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace kvtier::services {

struct DataPlaneOptions {
  std::vector<Endpoint> listen;                 ///< None: no data plane.
  std::shared_ptr<const BoundSockets> bound{};  ///< Has the sockets of `listen`; null: none.
  AttachmentLimits attachments;
  ConnectionLimits limits;
  /// As `kvtier::open_device_memory`, of the engines' backend; empty: no device memory is shared.
  std::function<std::shared_ptr<std::byte>(const DeviceMemoryHandle&, std::size_t)>
      open_device_memory{};
  std::function<TimePoint()> now = [] { return std::chrono::steady_clock::now(); };
};

/// Most bytes that a data plane takes beside what is in flight: staging, and buffers of sockets.
[[nodiscard]] std::int64_t max_memory(const DataPlaneOptions& options) noexcept;

/// The data plane: sockets on which attached clients send tensors and pages, in frames (frame.h),
/// beside memory that they share with the server.
class DataPlane {
 public:
  /// Listens; over TCP with TLS, unless `tls` is empty. `core` and `pages` must outlive this.
  /// Throws as `Server`.
  DataPlane(DataPlaneOptions options, const TlsIdentity& tls, ServiceCore& core, PageStore& pages);
  /// Stops without grace. Neither core nor pages may work on anything any more.
  ~DataPlane() { stop(std::chrono::milliseconds(0)); }
  DataPlane(const DataPlane&) = delete;  // owns sockets and threads
  DataPlane& operator=(const DataPlane&) = delete;

  /// Begins to accept.
  void start() { listener_.start(); }
  /// Accepts no more; waits for requests in progress until `grace` has passed; sends every client
  /// that the server ends, closes all sockets, and waits for the threads.
  void stop(std::chrono::milliseconds grace);
  /// Forgets tokens that were not used, and ends connections of clients that read too slowly, as
  /// seen at `now`. Called every second or so.
  void sweep(TimePoint now);
  /// Shows clients that connect from now on another identity. Throws `kInvalidArgument`, and
  /// changes nothing, unless its parts go together.
  void use_tls(const TlsIdentity& identity);

  /// Where clients connect, with the ports that the system chose.
  [[nodiscard]] const std::vector<Endpoint>& endpoints() const noexcept { return endpoints_; }
  [[nodiscard]] Attachments& attachments() noexcept { return attachments_; }
  [[nodiscard]] const DataPlaneCounters& counters() const noexcept { return counters_; }

  void create_attachment(Tenant& tenant, const v1::CreateAttachmentRequest& request,
                         v1::CreateAttachmentResponse& response);
  /// Maps a client's device memory. Throws `ServiceError`; FAILED_PRECONDITION, with the reason,
  /// where the client must send its tensors through host memory.
  void share_device_memory(Tenant& tenant, const v1::ShareDeviceMemoryRequest& request,
                           v1::ShareDeviceMemoryResponse& response);

 private:
  void accept(Descriptor socket, bool is_unix);
  [[nodiscard]] std::vector<std::shared_ptr<DataConnection>> open();

  const DataPlaneOptions options_;
  DataPlaneCounters counters_;
  Attachments attachments_;
  ConnectionContext context_;
  std::vector<Endpoint> endpoints_;
  boost::asio::io_context loop_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  Listener listener_;
  std::thread thread_;                              ///< Reads and writes sockets.
  std::mutex mutex_;                                ///< Guards all below.
  std::shared_ptr<boost::asio::ssl::context> tls_;  ///< Null: plaintext.
  std::unordered_map<const DataConnection*, std::shared_ptr<DataConnection>> connections_;
  std::deque<std::weak_ptr<DataConnection>> latest_;  ///< That came, at most `max_unattached`.
  bool stopped_ = false;
};

}  // namespace kvtier::services
