#pragma once

#include <CLI/CLI.hpp>

/// Options of a selection that several commands have.
namespace kvtier::services {

inline constexpr const char* kRuleText =
    "Which tokens are taken by their scores (default: priority with norm_aware, else top_k)";
inline constexpr const char* kCodeText =
    "How bits are made from a key (default: scalar with norm_aware, else sign)";
inline constexpr const char* kBitsText =
    "Bits of a key of norm_aware (default 256, or the next multiple of head_dim)";

/// Adds the options of the priority rule, of a structure with fields as in `RetrievalConfig`.
template <typename Options>
void add_priority(CLI::App& app, Options& options) {
  app.add_option("--error-target", options.error_target,
                 "Of priority: the standard error of the softmax denominator that is aimed at; 0: "
                 "none")
      ->capture_default_str();
  app.add_option("--coarse-bits", options.coarse_bits,
                 "Of priority over a scalar code: bits of a coordinate that are read of every "
                 "token; 0: all")
      ->capture_default_str();
  app.add_option("--candidates", options.candidates,
                 "With --coarse-bits: tokens over k whose whole code is read")
      ->capture_default_str();
}

}  // namespace kvtier::services
