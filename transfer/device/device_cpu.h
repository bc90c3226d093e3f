#pragma once

#include "transfer/device/device.h"

#include <memory>

namespace kvtier::transfer::cpu {

/// Makes the CPU device. Each stream is a queue with a worker thread of its own, so work of two
/// streams overlaps and only events order it. A task that throws stops its stream: later tasks are
/// dropped until `synchronize` has thrown what it threw; events still complete.
[[nodiscard]] std::unique_ptr<Device> make_cpu_device();

}  // namespace kvtier::transfer::cpu
