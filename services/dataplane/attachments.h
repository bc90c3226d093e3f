#pragma once

#include "kvtier/v1/shared_memory.pb.h"

#include "services/base/handle.h"
#include "services/base/tenants.h"
#include "services/core/session_table.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace kvtier::services {

struct AttachmentLimits {
  std::size_t max_attachments = 256;
  std::int64_t default_staging_bytes = std::int64_t{8} << 20;
  std::int64_t max_staging_bytes = std::int64_t{64} << 20;
  std::int64_t max_total_staging_bytes = std::int64_t{2} << 30;
  std::size_t max_regions = 16;  ///< Of device memory, of one attachment; 0: none is shared.
  std::chrono::milliseconds token_life{5'000};
};

/// Who is at the other end of a connection, as the system has it.
struct Peer {
  std::optional<uid_t> user;     ///< Of a Unix socket.
  std::optional<pid_t> process;  ///< As `user`.
  Tenant* tenant = nullptr;      ///< Of a certificate, where the connection has one.
};

/// The right of one client to a connection of the data plane and to a staging region.
struct Attachment {
  Tenant& tenant;
  const std::string name;
  const std::int64_t process_id;
  const std::int64_t staging_bytes;
  const TimePoint token_end;
  std::string token_digest;            ///< SHA-256; empty once the token was used.
  std::function<void()> close{};       ///< Ends the connection, while there is one.
  bool is_local = false;               ///< Connected over a Unix socket.
  std::vector<std::string> regions{};  ///< Device memory that is shared through it.
  std::int64_t device_bytes = 0;
};

/// Attachments by name and by token. A token is good once, for a few seconds, for one process and
/// one tenant. Thread-safe.
class Attachments {
 public:
  Attachments(AttachmentLimits limits, std::function<TimePoint()> now)
      : limits_(limits), now_(std::move(now)), codec_("attachment") {}

  struct Created {
    std::string name, token;
    std::int64_t staging_bytes = 0;
  };
  /// `staging_bytes` 0: the default. Throws INVALID_ARGUMENT, RESOURCE_EXHAUSTED.
  [[nodiscard]] Created create(Tenant& tenant, std::int64_t process_id, std::int64_t staging_bytes);

  /// Uses a token up. Throws UNAUTHENTICATED, with no hint, for one that is unknown, used, expired
  /// or another's. `close` is called at most once, when the attachment is deleted; it must not
  /// block.
  [[nodiscard]] std::shared_ptr<Attachment> redeem(std::string_view token, const Peer& peer,
                                                   std::function<void()> close);
  /// Shares what `open` maps through a connected attachment, until it ends; returns the region's
  /// name. Throws NOT_FOUND, FAILED_PRECONDITION (NOT_LOCAL) for a client on TCP,
  /// RESOURCE_EXHAUSTED, and what `open` throws.
  [[nodiscard]] std::string share(Tenant& tenant, const std::string& name,
                                  const std::function<DeviceRegion()>& open);
  /// The connection has ended: forgets the attachment.
  void detach(const std::string& name);
  /// Throws NOT_FOUND.
  void remove(const Tenant& tenant, const std::string& name);
  void list(const Tenant& tenant, const v1::ListAttachmentsRequest& request,
            v1::ListAttachmentsResponse& response) const;
  /// Forgets attachments whose token was not used in time.
  void sweep();

  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::int64_t staging_bytes() const;
  [[nodiscard]] const AttachmentLimits& limits() const noexcept { return limits_; }

 private:
  void forget(const std::string& name);
  /// Returns the tenant's own, if it may share memory. Throws as `share`.
  [[nodiscard]] Attachment& sharing(const Tenant& tenant, const std::string& name) const;

  const AttachmentLimits limits_;
  const std::function<TimePoint()> now_;
  HandleCodec codec_;
  mutable std::mutex mutex_;  ///< Guards all below.
  std::uint32_t last_slot_ = 0;
  std::int64_t staging_bytes_ = 0;
  std::map<std::string, std::shared_ptr<Attachment>> by_name_;
};

}  // namespace kvtier::services
