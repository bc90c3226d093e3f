#pragma once

#include "kvtier/engine.h"
#include "kvtier/paged.h"

#include <cstdint>
#include <nanobind/nanobind.h>
#include <optional>

namespace kvtier_engine {

namespace nb = nanobind;

/// Returns the configuration that these objects describe: `kvtier.ModelConfig`,
/// `kvtier.MemoryConfig`, `kvtier.RetrievalConfig`, a sequence of `kvtier.SketchConfig`,
/// `kvtier.Backend`. Throws `kInvalidArgument` for a field of another type.
[[nodiscard]] kvtier::Config config_of(nb::handle model, nb::handle memory, nb::handle retrieval,
                                       nb::handle extra_sketches, nb::handle backend);

/// The same of `PagedSketches`, but for the sizes.
[[nodiscard]] kvtier::PagedConfig paged_config_of(nb::handle model, nb::handle retrieval,
                                                  nb::handle backend);

/// Options of a call, with the retrieval options that they point to.
class Options {
 public:
  /// `options`: a `kvtier.AttendOptions`. `tokens_after` as in `kvtier::AttendOptions`.
  Options(nb::handle options, std::int64_t tokens_after);
  Options(const Options&) = delete;  // what `options_` points to stays here
  Options& operator=(const Options&) = delete;

  [[nodiscard]] const kvtier::AttendOptions& get() const noexcept { return options_; }

 private:
  std::optional<kvtier::RetrievalConfig> retrieval_;
  kvtier::AttendOptions options_;
};

}  // namespace kvtier_engine
