#pragma once

#include "kvtier/engine.h"

#include "process.h"
#include "session.h"

#include <cstdint>
#include <memory>
#include <nanobind/nanobind.h>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier_engine {

/// Hands a message to Python's logging, from whichever thread.
void log_to_python(kvtier::LogLevel level, std::string_view message);

/// An engine of Python. Messages of the library go to the logger "kvtier.engine" of `logging`.
class Engine {
 public:
  Engine(nb::handle model, nb::handle memory, nb::handle retrieval, nb::handle extra_sketches,
         nb::handle backend, bool reject_nonfinite, bool time_stages, bool dense_when_faster);
  Engine(const Engine&) = delete;  // one owner of the library's engine
  Engine& operator=(const Engine&) = delete;

  /// `max_page_bytes` 0: no limit.
  Session* open(std::int64_t capacity_tokens, const std::vector<std::int32_t>& token_ids,
                const nb::bytes& tenant_secret, const std::string& model_fingerprint,
                std::size_t max_page_bytes, const std::string& tenant, bool whole);
  /// `page_bytes` None: no limit.
  void set_quota(const std::string& tenant, std::optional<std::size_t> page_bytes);
  /// `items`: tuples of the arguments of `Session::decode` after `layer` and without `stream`, each
  /// behind its session.
  void decode(int layer, const nb::list& items, Stream stream);
  /// `query`, `key`, `value`: (address, number of `DType`, shape, strides) of tensors [batch,
  /// heads, tokens, head_dim], a row for each session. `out`: address of a dense [batch, tokens,
  /// query_heads, head_dim] of the query's dtype. `gpu`: which all are on; below 0: on the host.
  void decode_rows(int layer, const nb::list& sessions, const nb::tuple& query,
                   const nb::tuple& key, const nb::tuple& value, std::uintptr_t out, int gpu,
                   Stream stream, const Options& options);
  /// `parts`: tuples (out, lse).
  void merge(const nb::list& parts, nb::handle out, nb::handle lse, Stream stream);
  [[nodiscard]] kvtier::Backend backend() const noexcept { return place_.backend; }
  nb::dict stats();
  void close();

 private:
  /// Throws `kFailedPrecondition` for a closed engine, and in a fork of the process.
  [[nodiscard]] std::shared_ptr<kvtier::Engine> open_engine() const;

  Process process_;
  std::shared_ptr<kvtier::Engine> engine_;  // read and replaced with the GIL held
  Place place_;
};

}  // namespace kvtier_engine
