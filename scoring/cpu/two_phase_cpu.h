#pragma once

#include "scoring/selector_kernels.h"

namespace kvtier::scoring::cpu {

/// `select` of a request with `coarse_bits`.
void select_in_two_phases(const SelectRequest& request, const SelectorWorkspace& workspace);

}  // namespace kvtier::scoring::cpu
