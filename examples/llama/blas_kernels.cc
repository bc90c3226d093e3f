#include "llama/blas_kernels.h"

#include <cblas.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <unistd.h>

namespace kvtier::llama {

void use_fitting_blas_kernels([[maybe_unused]] char** argv) {
#if defined(__x86_64__)
  constexpr const char* kVariable = "OPENBLAS_CORETYPE";
  if (std::string_view(openblas_get_corename()) != "Prescott") return;
  if (std::getenv(kVariable) != nullptr) return;
  __builtin_cpu_init();
  const char* core = nullptr;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) core = "Haswell";
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    core = "SkylakeX";
  }
  if (core == nullptr || setenv(kVariable, core, 1) != 0) return;
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) execv(program.c_str(), argv);  // Returns on failure: go on, slowly.
#endif
}

}  // namespace kvtier::llama
