#pragma once

#include "kvtier/client.h"
#include "kvtier/v1/status.pb.h"

#include "services/client/data_socket.h"
#include "services/wire/frame.h"
#include "services/wire/page_layout.h"
#include "services/wire/shared_region.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvtier::services {

struct DataChannelOptions {
  std::string endpoint;
  std::string token;  ///< Of CreateAttachment.
  DataSocket::Tls tls;
  std::chrono::milliseconds timeout{30'000};  ///< Of every exchange.
  /// How long to ask for a reply before the thread sleeps.
  std::chrono::microseconds spin{0};
};

/// What the status of a failed frame, or of a batch's item, says.
[[nodiscard]] ClientError error_of(const v1::ItemStatus& status);

/// An attached connection to the data plane. Used by one thread at a time. Throws `ClientError`;
/// after one that is `kUnavailable` or `kDeadlineExceeded` it is broken, and what was asked may
/// have been done.
class DataChannel {
 public:
  struct Frame {
    FrameHeader header;
    Bytes body;
    [[nodiscard]] std::span<const std::byte> control() const {
      return std::span(body).first(header.control_bytes);
    }
    [[nodiscard]] std::span<const std::byte> payload() const {
      return std::span(body).subspan(header.control_bytes);  // empty where it went elsewhere
    }
  };

  /// Connects and attaches. Throws `kFailedPrecondition` for a token that is not good.
  explicit DataChannel(DataChannelOptions options);

  /// Sends a request and returns its id.
  std::uint64_t send(FrameType type, std::uint32_t flags, std::span<const std::byte> control,
                     std::span<const iovec> payload = {});
  /// Waits for the next frame. Throws what a kGoAway says.
  [[nodiscard]] Frame receive(std::span<std::byte> to = {});
  /// Waits for the frame with this id. Throws what it says when it has kFailed. A payload that `to`
  /// has room for is received there, and is not in the frame.
  [[nodiscard]] Frame reply_to(std::uint64_t request_id, std::span<std::byte> to = {});

  [[nodiscard]] bool broken() const noexcept { return broken_; }
  /// Empty without shared memory.
  [[nodiscard]] std::span<std::byte> staging() const noexcept { return staging_.bytes(); }
  /// Pages that may be read in place; nothing without shared memory, or when the tenant had no
  /// pages at the time.
  [[nodiscard]] const std::optional<ArenaView>& arena() const noexcept { return arena_; }
  [[nodiscard]] const DataChannelOptions& options() const noexcept { return options_; }

 private:
  void attach();
  void fill(std::size_t bytes, std::vector<Descriptor>* descriptors);
  [[nodiscard]] Frame read_frame(std::span<std::byte> to, std::vector<Descriptor>* descriptors);
  void read_part(std::span<std::byte> part, std::vector<Descriptor>* descriptors);

  const DataChannelOptions options_;
  const std::unique_ptr<DataSocket> socket_;
  Bytes buffer_;
  std::size_t begin_ = 0, end_ = 0;  ///< What of `buffer_` was received and not taken.
  DataSocket::Deadline deadline_;
  std::uint64_t last_id_ = 0;
  bool broken_ = false;
  SharedRegion staging_, pages_;
  std::optional<ArenaView> arena_;
};

}  // namespace kvtier::services
