#pragma once

namespace kvtier::llama {

/// Starts the program anew with OPENBLAS_CORETYPE set, when OpenBLAS did not recognise the CPU and
/// fell back on its oldest kernels (SSE3, four times slower) although AVX-512 or AVX2 is there: it
/// chooses once, when it is loaded. Returns when nothing is to be done, which is so when the
/// variable is set already. Called first in `main`.
void use_fitting_blas_kernels(char** argv);

}  // namespace kvtier::llama
