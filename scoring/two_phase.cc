#include "scoring/two_phase.h"

#include "hashing/scalar_code.h"
#include "scoring/score_math.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <limits>

namespace kvtier::scoring {

ScoreParams coarse_phase(const ScoreParams& params) {
  assert(params.coarse_bits > 0 && params.coarse_bits < params.code_bits);
  ScoreParams coarse = params;
  const int head_dim = params.projections;
  coarse.coarse_bits = 0;
  coarse.code_bits = params.coarse_bits;
  // A level of the first bits is as wide as those of all that begin with them.
  const double width = static_cast<double>(1 << (params.code_bits - params.coarse_bits)) *
                       hashing::scalar_step(params.code_bits);
  coarse.sign_scale = static_cast<float>(
      width / (2.0 * head_dim) * hashing::coarse_gain(params.code_bits, params.coarse_bits));
  const std::int64_t most = std::int64_t{params.top_k} * params.candidates;
  coarse.top_k = static_cast<int>(std::min<std::int64_t>(most, std::numeric_limits<int>::max()));
  coarse.sparsity = params.sparsity / params.candidates;
  return coarse;
}

ScoreParams fine_phase(const ScoreParams& params) {
  constexpr std::uint32_t kSecond = 0x85EBCA6BU;
  ScoreParams fine = params;
  fine.coarse_bits = 0;
  fine.priority_key = mix_bits(params.priority_key ^ kSecond);
  return fine;
}

}  // namespace kvtier::scoring
