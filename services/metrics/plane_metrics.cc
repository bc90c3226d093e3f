#include "services/metrics/plane_metrics.h"

#include <cstddef>

namespace kvtier::services {

void add_plane_metrics(DataPlane* plane, const Tenants& tenants, Families& families) {
  static const DataPlaneCounters kNone;
  const DataPlaneCounters& counters = plane != nullptr ? plane->counters() : kNone;
  families.gauge("kvtier_shm_attachments", "Rights of clients to the data plane, used or not.",
                 plane != nullptr ? plane->attachments().size() : 0);
  families.gauge("kvtier_shm_mapped_bytes", "Staging memory that is shared with clients.",
                 plane != nullptr ? plane->attachments().staging_bytes() : 0);
  std::size_t regions = 0;
  std::size_t bytes = 0;
  for (const auto& tenant : tenants.all()) {
    regions += tenant->regions().size();
    bytes += tenant->regions().bytes();
  }
  families.gauge("kvtier_shm_device_regions",
                 "Allocations of clients' device memory that are open.", regions);
  families.gauge("kvtier_shm_device_bytes", "Device memory of clients that is open.", bytes);
  families.gauge("kvtier_data_connections", "Connections to the data plane.",
                 counters.connections.load());
  families.gauge("kvtier_data_queued_bytes",
                 "Requests of the data plane that are worked on and replies that are not read.",
                 counters.queued_bytes.load());
  families.counters("kvtier_data_frames_total", "Frames of the data plane.", "direction",
                    {{"read", counters.frames_read}, {"write", counters.frames_written}});
  families.counters("kvtier_data_bytes_total",
                    "Bytes of these frames; what lies in shared memory is in none.", "direction",
                    {{"read", counters.bytes_read}, {"write", counters.bytes_written}});
  families.counters("kvtier_shm_tensor_bytes_total",
                    "Bytes of tensors that calls had in memory shared with their client.",
                    "direction",
                    {{"read", counters.shared.read}, {"write", counters.shared.written}});
  families.counters("kvtier_data_connections_ended_total",
                    "Connections to the data plane that the server has ended.", "reason",
                    {{"token", counters.refused},
                     {"broken_frame", counters.broken_frames},
                     {"timeout", counters.timeouts},
                     {"slow", counters.slow}});
}

}  // namespace kvtier::services
