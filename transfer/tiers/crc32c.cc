#include "transfer/tiers/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

// A CRC is a polynomial over GF(2) modulo this one; bit 31 is the coefficient of x^0.
constexpr std::uint32_t kPolynomial = 0x82F63B78;

constexpr std::uint32_t times_x(std::uint32_t a) {
  return (a & 1U) != 0 ? a >> 1U ^ kPolynomial : a >> 1U;
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 1U << 31U; bit != 0; bit >>= 1U) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

/// x to the powers 1, 2, 4, 8 and so on.
constexpr std::array<std::uint32_t, 64> kSquares = [] {
  std::array<std::uint32_t, 64> squares{1U << 30U};
  for (std::size_t i = 1; i < squares.size(); ++i) {
    squares[i] = multiply(squares[i - 1], squares[i - 1]);
  }
  return squares;
}();

constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
  std::uint32_t power = 1U << 31U;
  for (std::size_t i = 0; exponent >> i != 0; ++i) {
    if ((exponent >> i & 1U) != 0) power = multiply(power, kSquares[i]);
  }
  return power;
}

constexpr std::array<std::uint32_t, 256> make_byte_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[i] = value;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kByteTable = make_byte_table();

std::uint32_t update_by_bytes(std::uint32_t state, const std::byte* data, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) {
    state = state >> 8U ^ kByteTable[(state ^ std::to_integer<std::uint32_t>(data[i])) & 255U];
  }
  return state;
}

/// Bytes copied before their CRC is taken, where that is a pass of its own: from the nearest cache.
constexpr std::size_t kPieceBytes = 6 << 10;

/// Copies piece by piece, where there is a `to`, and updates a state by `update(state, data,
/// size)`.
template <typename Update>
std::uint32_t by_pieces(std::uint32_t crc, const std::byte* from, std::size_t size, std::byte* to,
                        Update update) {
  std::uint32_t state = ~crc;
  if (to == nullptr) return ~update(state, from, size);
  while (size > 0) {
    const std::size_t count = std::min(size, kPieceBytes);
    std::memcpy(to, from, count);
    state = update(state, to, count);
    from += count;
    to += count;
    size -= count;
  }
  return ~state;
}

std::uint32_t run_by_bytes(std::uint32_t crc, const std::byte* from, std::size_t size,
                           std::byte* to) {
  return by_pieces(crc, from, size, to, update_by_bytes);
}

#if defined(__x86_64__)

// The instruction takes one operand a cycle and answers after three: three lanes keep it busy. A
// lane's state is moved over the bytes of another by multiplying it with x^(8 * bytes).
constexpr std::size_t kLaneBytes = 1024;

using ShiftTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTable make_shift_table() {
  const std::uint32_t power = power_of_x(8 * kLaneBytes);
  ShiftTable table{};
  for (std::uint32_t byte = 0; byte < 4; ++byte) {
    for (std::uint32_t value = 0; value < 256; ++value) {
      table[byte][value] = multiply(value << 8U * byte, power);
    }
  }
  return table;
}

constexpr ShiftTable kShift = make_shift_table();

std::uint32_t over_a_lane(std::uint32_t state) {
  return kShift[0][state & 255U] ^ kShift[1][state >> 8U & 255U] ^ kShift[2][state >> 16U & 255U] ^
         kShift[3][state >> 24U];
}

std::uint64_t load(const std::byte* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) std::uint32_t update_by_lanes(std::uint32_t state,
                                                                const std::byte* data,
                                                                std::size_t size) {
  while (size >= 3 * kLaneBytes) {
    std::uint64_t first = state;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      first = _mm_crc32_u64(first, load(data + i));
      second = _mm_crc32_u64(second, load(data + kLaneBytes + i));
      third = _mm_crc32_u64(third, load(data + 2 * kLaneBytes + i));
    }
    state = over_a_lane(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    state = over_a_lane(state) ^ static_cast<std::uint32_t>(third);
    data += 3 * kLaneBytes;
    size -= 3 * kLaneBytes;
  }
  std::uint64_t wide = state;
  for (; size >= 8; data += 8, size -= 8) wide = _mm_crc32_u64(wide, load(data));
  return update_by_bytes(static_cast<std::uint32_t>(wide), data, size);
}

std::uint32_t run_by_lanes(std::uint32_t crc, const std::byte* from, std::size_t size,
                           std::byte* to) {
  return by_pieces(crc, from, size, to, update_by_lanes);
}

// Carry-less products fold what has been read onto the bytes that follow it: 64 bits times
// x^distance, which is 64 bits more of a polynomial with the same remainder (Gopal et al., "Fast
// CRC computation for generic polynomials using PCLMULQDQ instruction", Intel 2009). The first 64
// of 128 bits stand 64 further from the end. A product of reflected operands lacks one bit,
// hence 1.
constexpr long long fold_by(std::uint64_t distance) {
  return static_cast<long long>(std::uint64_t{power_of_x(distance)} << 1U);
}

/// What is left of folded bytes, a polynomial with their remainder, and the bytes after them.
std::uint32_t finish(std::span<const std::byte> folded, const std::byte* from, std::size_t size,
                     std::byte* to) {
  return run_by_lanes(~update_by_lanes(0, folded.data(), folded.size()), from, size, to);
}

/// Moves on by the bytes of a round.
struct Rest {
  const std::byte* from;
  std::size_t size;
  std::byte* to;

  void skip(std::size_t bytes) {
    from += bytes;
    size -= bytes;
    if (to != nullptr) to += bytes;
  }
};

/// A copy of so many bytes goes past the caches, when its place is aligned: a page is read later,
/// and elsewhere, and lines that are written whole need not be read before. What is read is asked
/// for early, which those stores do not hold up, and is not kept either. On an AMD EPYC pages of 64
/// KiB in a random order take 5 to 9 % longer so than memcpy without a checksum; 3 % more with 2048
/// or 5120 bytes ahead, 7 % more with nothing asked for or with stores by way of the caches.
constexpr std::size_t kLeastStreamed = 32 << 10;
constexpr std::size_t kAhead = 3584;

/// Asks for the round of `kStep` bytes that lies `kAhead` further, when it is one of these bytes.
template <std::size_t kStep>
void ask_ahead(const Rest& rest) {
  if (rest.size < kStep + kAhead) return;
  const char* const at = reinterpret_cast<const char*>(rest.from) + kAhead;
  for (std::size_t i = 0; i < kStep; i += 64) _mm_prefetch(at + i, _MM_HINT_NTA);
}

bool streams(const std::byte* to, std::size_t size) {
  return size >= kLeastStreamed && reinterpret_cast<std::uintptr_t>(to) % 64 == 0;
}

enum class Copy : std::uint8_t { kNone, kCached, kStreamed };

#define KVTIER_FOLDS_512 __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))
#define KVTIER_FOLDS_256 __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))

template <int kBytes>
KVTIER_FOLDS_512 __m512i fold(__m512i past, __m512i next) {
  const __m512i by = _mm512_set4_epi64(fold_by(8 * kBytes - 32), fold_by(8 * kBytes + 32),
                                       fold_by(8 * kBytes - 32), fold_by(8 * kBytes + 32));
  constexpr int kXor = 0x96;  // of three
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(past, by, 0x00),
                                   _mm512_clmulepi64_epi128(past, by, 0x11), next, kXor);
}

template <int kBytes>
KVTIER_FOLDS_256 __m256i fold(__m256i past, __m256i next) {
  const __m256i by = _mm256_set_epi64x(fold_by(8 * kBytes - 32), fold_by(8 * kBytes + 32),
                                       fold_by(8 * kBytes - 32), fold_by(8 * kBytes + 32));
  const __m256i low = _mm256_clmulepi64_epi128(past, by, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(past, by, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

template <Copy kCopy>
KVTIER_FOLDS_512 std::uint32_t run_by_folding_512(std::uint32_t crc, Rest rest) {
  constexpr std::size_t kWidth = 64;
  constexpr std::size_t kStep = 4 * kWidth;
  const auto next = [&](std::size_t i) KVTIER_FOLDS_512 {
    const std::byte* const at = rest.from + i * kWidth;
    const __m512i data = _mm512_loadu_si512(at);
    if constexpr (kCopy == Copy::kCached) _mm512_storeu_si512(rest.to + i * kWidth, data);
    if constexpr (kCopy == Copy::kStreamed) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(rest.to + i * kWidth), data);
    }
    return data;
  };
  const __m512i state = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc)));
  __m512i first = _mm512_xor_si512(next(0), state);
  __m512i second = next(1);
  __m512i third = next(2);
  __m512i fourth = next(3);
  rest.skip(kStep);
  while (rest.size >= kStep) {
    if constexpr (kCopy == Copy::kStreamed) ask_ahead<kStep>(rest);
    first = fold<kStep>(first, next(0));
    second = fold<kStep>(second, next(1));
    third = fold<kStep>(third, next(2));
    fourth = fold<kStep>(fourth, next(3));
    rest.skip(kStep);
  }
  const __m512i last = fold<kWidth>(fold<kWidth>(fold<kWidth>(first, second), third), fourth);
  if constexpr (kCopy == Copy::kStreamed) _mm_sfence();
  alignas(kWidth) std::array<std::byte, kWidth> folded{};
  _mm512_store_si512(folded.data(), last);
  return finish(folded, rest.from, rest.size, rest.to);
}

template <Copy kCopy>
KVTIER_FOLDS_256 std::uint32_t run_by_folding_256(std::uint32_t crc, Rest rest) {
  constexpr std::size_t kWidth = 32;
  constexpr std::size_t kStep = 4 * kWidth;
  const auto next = [&](std::size_t i) KVTIER_FOLDS_256 {
    const std::byte* const at = rest.from + i * kWidth;
    const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    auto* const to = reinterpret_cast<__m256i*>(rest.to + i * kWidth);
    if constexpr (kCopy == Copy::kCached) _mm256_storeu_si256(to, data);
    if constexpr (kCopy == Copy::kStreamed) _mm256_stream_si256(to, data);
    return data;
  };
  const __m256i state = _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(~crc)));
  __m256i first = _mm256_xor_si256(next(0), state);
  __m256i second = next(1);
  __m256i third = next(2);
  __m256i fourth = next(3);
  rest.skip(kStep);
  while (rest.size >= kStep) {
    if constexpr (kCopy == Copy::kStreamed) ask_ahead<kStep>(rest);
    first = fold<kStep>(first, next(0));
    second = fold<kStep>(second, next(1));
    third = fold<kStep>(third, next(2));
    fourth = fold<kStep>(fourth, next(3));
    rest.skip(kStep);
  }
  const __m256i last = fold<kWidth>(fold<kWidth>(fold<kWidth>(first, second), third), fourth);
  if constexpr (kCopy == Copy::kStreamed) _mm_sfence();
  alignas(kWidth) std::array<std::byte, kWidth> folded{};
  _mm256_store_si256(reinterpret_cast<__m256i*>(folded.data()), last);
  return finish(folded, rest.from, rest.size, rest.to);
}

/// Fewer bytes are not worth a start.
constexpr std::size_t kLeastFolded = 512;

std::uint32_t run_by_folding_512(std::uint32_t crc, const std::byte* from, std::size_t size,
                                 std::byte* to) {
  if (size < kLeastFolded) return run_by_lanes(crc, from, size, to);
  const Rest all{from, size, to};
  if (to == nullptr) return run_by_folding_512<Copy::kNone>(crc, all);
  return streams(to, size) ? run_by_folding_512<Copy::kStreamed>(crc, all)
                           : run_by_folding_512<Copy::kCached>(crc, all);
}

std::uint32_t run_by_folding_256(std::uint32_t crc, const std::byte* from, std::size_t size,
                                 std::byte* to) {
  if (size < kLeastFolded) return run_by_lanes(crc, from, size, to);
  const Rest all{from, size, to};
  if (to == nullptr) return run_by_folding_256<Copy::kNone>(crc, all);
  return streams(to, size) ? run_by_folding_256<Copy::kStreamed>(crc, all)
                           : run_by_folding_256<Copy::kCached>(crc, all);
}

#endif

std::vector<Crc32cPath> find_paths() {
  std::vector<Crc32cPath> paths;
#if defined(__x86_64__)
  const bool folds = __builtin_cpu_supports("vpclmulqdq") != 0;
  if (folds && __builtin_cpu_supports("avx512f") != 0) {
    paths.push_back({"vpclmulqdq of 512 bits", run_by_folding_512});
  }
  if (folds && __builtin_cpu_supports("avx2") != 0) {
    paths.push_back({"vpclmulqdq of 256 bits", run_by_folding_256});
  }
  if (__builtin_cpu_supports("sse4.2") != 0) paths.push_back({"sse4.2", run_by_lanes});
#endif
  paths.push_back({"bytes", run_by_bytes});
  return paths;
}

const Crc32cPath& path() {
  static const Crc32cPath fastest = crc32c_paths().front();
  return fastest;
}

}  // namespace

std::span<const Crc32cPath> crc32c_paths() noexcept {
  static const std::vector<Crc32cPath> paths = find_paths();
  return paths;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
  return path().run(crc, bytes.data(), bytes.size(), nullptr);
}

std::uint32_t crc32c_copy(std::span<std::byte> to, std::span<const std::byte> from,
                          std::uint32_t crc) noexcept {
  return path().run(crc, from.data(), from.size(), to.data());
}

std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second,
                          std::size_t second_size) noexcept {
  return multiply(first, power_of_x(8 * std::uint64_t{second_size})) ^ second;
}

}  // namespace kvtier
