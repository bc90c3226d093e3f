#pragma once

#include <cstdlib>

namespace kvtier::testing {

/// Random calls of a test against a model: as many as usual, or as the environment wants for a
/// soak.
inline int num_model_calls(int usual) {
  const char* text = std::getenv("KVTIER_MODEL_CALLS");
  return text == nullptr ? usual : std::atoi(text);
}

}  // namespace kvtier::testing
