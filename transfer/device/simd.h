#pragma once

/// Compiles a function for several instruction sets and picks one when the program is loaded. For
/// leaf functions with simple loops, which the compiler vectorises (`#pragma omp simd`). Sanitizers
/// run before the choice can be made, so their builds get one version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KVTIER_SIMD_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVTIER_SIMD_CLONES
#endif
