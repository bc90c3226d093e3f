#pragma once

#include "kvtier/v1/status.pb.h"

#include "services/core/service_core.h"
#include "services/wire/frame.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace kvtier::services {

/// How a call of the data plane ended.
struct CallOutcome {
  std::optional<ServiceError> error;
  ReplyBody reply;     ///< Without an error.
  std::string output;  ///< The reply's tensors, where the call named no memory for them.
};

/// Bytes of tensors that calls have taken from memory shared with clients, and put there.
struct SharedBytes {
  std::atomic<std::uint64_t> read{0}, written{0};
};

/// Where the tensors of a call lie. `output` is the memory for those of the reply; without it they
/// are returned. `keep` is held until the call has ended. The other side may change these bytes at
/// any time: they are copied before they are checked. `shared` counts them, where they are shared.
struct CallMemory {
  std::span<const std::byte> input{};
  std::optional<std::span<std::byte>> output{};
  std::shared_ptr<void> keep{};
  SharedBytes* shared = nullptr;
};

/// Returns the bytes of a call's tensors. Throws INVALID_ARGUMENT when they are more than there are
/// in `memory`, be it because they overlap.
[[nodiscard]] std::uint64_t tensor_bytes_of(const CallBody& body, const CallMemory& memory);

/// Calls the core as gRPC would, with tensors from `memory`. `call.reservation`, if there is one,
/// is charged before memory is taken. `done` is called once, on any thread, perhaps before this
/// returns.
void run_call(ServiceCore& core, const Call& call, const CallBody& body, CallMemory memory,
              std::function<void(CallOutcome)> done);

}  // namespace kvtier::services
