#include "kvtier/error.h"

#include "services/base/executor.h"
#include "services/core/service_core.h"
#include "services/dataplane/calls.h"
#include "services/wire/frame.h"
#include "tests/fuzz/fuzz.h"

#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

namespace kvtier::services {
namespace {

/// What decodes must encode to the bytes that it was.
template <typename Decode>
void round_trip(std::span<const std::byte> control, Decode decode) {
  try {
    const auto body = decode(control);
    const Bytes again = encode(body);
    if (!std::equal(again.begin(), again.end(), control.begin(), control.end())) std::abort();
  } catch (const Error&) {
  }
}

/// Runs nothing: no call of a server without sessions comes so far.
class NoExecutor final : public Executor {
 public:
  std::unique_ptr<Strand> make_strand(const Lane& /*lane*/) override {
    return std::make_unique<Line>();
  }
  void finish() override {}

 private:
  class Line final : public Strand {
   public:
    void add(Start /*start*/, Task /*task*/) override { std::abort(); }
  };
};

ServiceCoreOptions options() {
  ServiceCoreOptions options;
  options.models.backend = kvtier::Backend::kCpu;
  options.max_inflight_bytes = std::int64_t{1} << 20;
  return options;
}

/// Runs what is a call on a server that may have 1 MiB in flight, with tensors out of 64 KiB.
void run_as_call(std::span<const std::byte> control, bool is_inline) {
  static NoExecutor executor;
  static ServiceCore core(options(), executor);
  static std::vector<std::byte> shared(64 << 10);
  Tenant& tenant = *core.tenants().all()[0];
  int outcomes = 0;
  try {
    const CallBody body = decode_call(control);
    CallMemory memory{.input = shared};
    if (!is_inline) {
      if (!lies_within(body.output, shared.size())) return;
      memory.output = std::span(shared).subspan(body.output.offset, body.output.bytes);
    }
    run_call(core, {.tenant = &tenant, .reservation = core.admit(tenant, 0)}, body,
             std::move(memory), [&](const CallOutcome&) { ++outcomes; });
  } catch (const Error&) {
    return;
  }
  if (outcomes != 1 || core.inflight_bytes() != 0) std::abort();
}

}  // namespace
}  // namespace kvtier::services

/// The input is a frame: its header, then a body that every decoder reads and that is run as a
/// call.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvtier::services;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  if (bytes.size() >= kFrameHeaderBytes) {
    try {
      const FrameHeader header = decode_header(bytes.first<kFrameHeaderBytes>());
      if (header.control_bytes > kMaxControlBytes || header.payload_bytes() > kMaxPayloadBytes) {
        std::abort();
      }
      check_control(header, bytes.subspan(kFrameHeaderBytes));
    } catch (const kvtier::Error&) {
    }
  }
  const auto control = bytes.size() > kFrameHeaderBytes ? bytes.subspan(kFrameHeaderBytes) : bytes;
  round_trip(control, decode_attached);
  round_trip(control, decode_call);
  round_trip(control, decode_reply);
  round_trip(control, decode_descriptors);
  round_trip(control, decode_write);
  round_trip(control, decode_outcomes);
  run_as_call(control, false);
  run_as_call(control, true);
  return 0;
}
