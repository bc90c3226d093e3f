#pragma once

#include <cstddef>
#include <cstdint>
#include <nanobind/nanobind.h>

namespace kvtier_engine {

namespace nb = nanobind;

/// As kvtier/memory.h, of the objects that `config_of` takes: the fields of a `SessionMemory`, in
/// its order.
[[nodiscard]] nb::tuple session_memory(nb::handle model, nb::handle memory, nb::handle retrieval,
                                       nb::handle extra_sketches, nb::handle backend,
                                       std::int64_t tokens, int row_cache_rows);

/// As kvtier/memory.h.
[[nodiscard]] std::size_t device_bytes_for(nb::handle model, nb::handle memory,
                                           nb::handle retrieval, nb::handle extra_sketches,
                                           nb::handle backend, std::int64_t tokens, int sessions);

}  // namespace kvtier_engine
