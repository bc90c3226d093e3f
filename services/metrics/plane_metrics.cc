#include "services/metrics/plane_metrics.h"

#include <cstddef>

namespace kvtier::services {

void add_plane_metrics(DataPlane* plane, const Tenants& tenants, Families& families) {
  static const DataPlaneCounters kNone;
  const DataPlaneCounters& counters = plane != nullptr ? plane->counters() : kNone;
  const auto number = [](auto value) { return static_cast<double>(value); };
  families.gauge("kvtier_shm_attachments", "Rights of clients to the data plane, used or not.",
                 plane != nullptr ? number(plane->attachments().size()) : 0);
  families.gauge("kvtier_shm_mapped_bytes", "Staging memory that is shared with clients.",
                 plane != nullptr ? number(plane->attachments().staging_bytes()) : 0);
  std::size_t regions = 0;
  std::size_t bytes = 0;
  for (const auto& tenant : tenants.all()) {
    regions += tenant->regions().size();
    bytes += tenant->regions().bytes();
  }
  families.gauge("kvtier_shm_device_regions",
                 "Allocations of clients' device memory that are open.", number(regions));
  families.gauge("kvtier_shm_device_bytes", "Device memory of clients that is open.",
                 number(bytes));
  families.gauge("kvtier_data_connections", "Connections to the data plane.",
                 number(counters.connections.load()));
  families.gauge("kvtier_data_queued_bytes",
                 "Requests of the data plane that are worked on and replies that are not read.",
                 number(counters.queued_bytes.load()));
  const std::string frames = "Frames of the data plane.";
  const std::string sent = "Bytes of these frames; what lies in shared memory is in none.";
  const auto direction = [&](const char* name, double count, double size) {
    families.counter("kvtier_data_frames_total", frames, count, {{"direction", name}});
    families.counter("kvtier_data_bytes_total", sent, size, {{"direction", name}});
  };
  direction("read", number(counters.frames_read.load()), number(counters.bytes_read.load()));
  direction("write", number(counters.frames_written.load()), number(counters.bytes_written.load()));
  const auto shared = [&](const char* name, double size) {
    families.counter("kvtier_shm_tensor_bytes_total",
                     "Bytes of tensors that calls had in memory shared with their client.", size,
                     {{"direction", name}});
  };
  shared("read", number(counters.shared.read.load()));
  shared("write", number(counters.shared.written.load()));
  const auto ended = [&](const char* reason, double count) {
    families.counter("kvtier_data_connections_ended_total",
                     "Connections to the data plane that the server has ended.", count,
                     {{"reason", reason}});
  };
  ended("token", number(counters.refused.load()));
  ended("broken_frame", number(counters.broken_frames.load()));
  ended("timeout", number(counters.timeouts.load()));
  ended("slow", number(counters.slow.load()));
}

}  // namespace kvtier::services
