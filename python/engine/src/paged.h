#pragma once

#include "kvtier/paged.h"

#include "process.h"
#include "session.h"

#include <cstdint>
#include <memory>
#include <nanobind/nanobind.h>

namespace kvtier_engine {

/// `kvtier::PagedSketches` of Python.
class PagedSketches {
 public:
  PagedSketches(nb::handle model, nb::handle retrieval, std::int64_t num_blocks, int block_tokens,
                std::int64_t max_tokens, int max_batch_rows, nb::handle backend);
  PagedSketches(const PagedSketches&) = delete;  // one owner of the sketches
  PagedSketches& operator=(const PagedSketches&) = delete;

  void store(int layer, nb::handle keys, nb::handle values, nb::handle slots, Stream stream);
  void select(int layer, nb::handle blocks, nb::handle lengths, std::int64_t max_length,
              nb::handle query, nb::handle ids, nb::handle bias, Stream stream);
  void attend(int layer, nb::handle blocks, nb::handle lengths, std::int64_t max_length,
              nb::handle query, nb::handle keys, nb::handle values, nb::handle out, nb::handle lse,
              Stream stream);
  [[nodiscard]] std::int64_t attended_bound(std::int64_t length) const;
  void check();
  [[nodiscard]] kvtier::Backend backend() const noexcept { return place_.backend; }
  [[nodiscard]] std::size_t device_bytes() const;
  void close();

 private:
  /// Throws `kFailedPrecondition` for sketches that are closed, and in a fork of the process.
  [[nodiscard]] std::shared_ptr<kvtier::PagedSketches> open() const;

  Process process_;
  std::shared_ptr<kvtier::PagedSketches> sketches_;  // read and replaced with the GIL held
  Place place_;
};

}  // namespace kvtier_engine
