#include "memory.h"

#include "kvtier/memory.h"

#include "config.h"

namespace kvtier_engine {

nb::tuple session_memory(nb::handle model, nb::handle memory, nb::handle retrieval,
                         nb::handle extra_sketches, nb::handle backend, std::int64_t tokens,
                         int row_cache_rows) {
  const kvtier::Config config = config_of(model, memory, retrieval, extra_sketches, backend);
  const kvtier::SessionMemory m = kvtier::session_memory(config, tokens, row_cache_rows);
  return nb::make_tuple(m.tokens, m.pages, m.sketches, m.tables, m.row_cache);
}

std::size_t device_bytes_for(nb::handle model, nb::handle memory, nb::handle retrieval,
                             nb::handle extra_sketches, nb::handle backend, std::int64_t tokens,
                             int sessions) {
  const kvtier::Config config = config_of(model, memory, retrieval, extra_sketches, backend);
  return kvtier::device_bytes_for(config, config.backend, tokens, sessions);
}

}  // namespace kvtier_engine
