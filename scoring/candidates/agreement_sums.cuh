#pragma once

#include "scoring/soft/tables.cuh"

#include <cstdint>

/// Hard collisions for the kernels of the filtered path: the tables in which a token's bucket is
/// the query's. The query's buckets are packed as a sketch is, in shared memory, and a table agrees
/// when none of its bits differs.
namespace kvtier::scoring::cuda {

inline constexpr int kAgreementWords = 1024 / 32 + 1;  // what follows the last is read too

/// Of a (row, KV head), in shared memory.
struct AgreementQuery {
  std::uint32_t words[kAgreementWords][kMaxGroup];
  std::uint32_t starts[kAgreementWords];
};

/// Fills it. All threads; ends with a barrier.
__device__ inline void fill_agreement(const QueryTables& tables, const ScoreParams& params,
                                      std::int64_t first_head, int group, AgreementQuery& query) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x);
  const int planes = params.planes_per_table;
#pragma unroll 1
  for (int i = thread; i < kAgreementWords * kMaxGroup; i += threads) {
    query.words[i / kMaxGroup][i % kMaxGroup] = 0;
  }
#pragma unroll 1
  for (int word = thread; word < kAgreementWords; word += threads) {
    query.starts[word] = table_starts(word, planes, params.tables);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < params.tables * group; i += threads) {
    const int head = i / params.tables;
    const int table = i - head * params.tables;
    const float* buckets = tables.entries + (first_head + head) * tables.entries_per_head;
    const auto bucket = static_cast<std::uint32_t>(__float_as_int(__ldg(buckets + table)));
    const int bit = table * planes;
    const std::uint64_t placed = std::uint64_t{bucket} << (64 - planes - bit % 32);
    atomicOr(&query.words[bit / 32][head], static_cast<std::uint32_t>(placed >> 32));
    if (bit % 32 + planes > 32) {
      atomicOr(&query.words[bit / 32 + 1][head], static_cast<std::uint32_t>(placed));
    }
  }
  __syncthreads();
}

/// Counts the agreeing tables of one token with each head, whatever the shape.
template <int kHeads>
__device__ void any_agreements(const AgreementQuery& query, const ScoreParams& params, int group,
                               const uint4* chunks, float (&sums)[kHeads]) {
  const int planes = params.planes_per_table;
  const int words = (planes * params.tables + 31) / 32;
  int counts[kHeads] = {};
  const auto word_of = [&](int word) {
    const auto* four = reinterpret_cast<const std::uint32_t*>(chunks + word / 4 * kChunkStride);
    return __ldg(four + word % 4);
  };
  std::uint32_t bits = word_of(0);
#pragma unroll 1
  for (int word = 0; word < words; ++word) {
    const std::uint32_t next = word + 1 < words ? word_of(word + 1) : 0;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= group) break;
      counts[h] += agreeing_tables(bits ^ query.words[word][h], next ^ query.words[word + 1][h],
                                   planes, query.starts[word]);
    }
    bits = next;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) sums[h] = static_cast<float>(counts[h]);
}

/// Tables of two planes that fill five chunks, up to four heads: the shape whose sketches wait in
/// registers. Bit 30 - 2 t of an even word, or 31 - 2 t of an odd one, is to tell whether table t
/// of the word differs; so one count serves two words.
struct PairQuery {
  uint4 words[P10L60Code::kChunks * kWordsPerChunk];  // of four heads
  uint4 shifted[P10L60Code::kChunks *
                kWordsPerChunk];  // an even word to the right, an odd to the left
};

__host__ __device__ inline bool pairs_serve(const ScoreParams& params, int group) {
  return params.planes_per_table == 2 && group <= 4 &&
         (2 * params.tables + hashing::kChunkBits - 1) / hashing::kChunkBits == P10L60Code::kChunks;
}

/// Fills it from `query`. All threads; ends with a barrier.
__device__ inline void fill_pair_query(const AgreementQuery& query, PairQuery& pairs) {
  constexpr int kWords = P10L60Code::kChunks * kWordsPerChunk;
  if (const auto word = static_cast<int>(threadIdx.x); word < kWords) {
    const std::uint32_t* of = query.words[word];
    const auto shift = [word](std::uint32_t bits) { return word % 2 == 0 ? bits >> 1 : bits << 1; };
    pairs.words[word] = make_uint4(of[0], of[1], of[2], of[3]);
    pairs.shifted[word] = make_uint4(shift(of[0]), shift(of[1]), shift(of[2]), shift(of[3]));
  }
  __syncthreads();
}

/// All but the first `count` bits of a word.
__device__ __forceinline__ std::uint32_t bits_past(int count) {
  return count >= 32 ? 0U : 0xFFFFFFFFU >> max(count, 0);
}

__device__ __forceinline__ void pair_agreements(const PairQuery& query, int tables,
                                                const P10L60Code& code, float (&sums)[4]) {
  constexpr int kWords = P10L60Code::kChunks * kWordsPerChunk;
  constexpr int kFull = (P10L60Code::kChunks - 1) * kWordsPerChunk;  // words that are all tables
  constexpr std::uint32_t kEvenBits = 0x55555555U;
  std::uint32_t differ[4] = {};
#pragma unroll
  for (int word = 0; word < kWords; word += 2) {
    const auto bits_of = [&](int w) {  // those past the tables agree
      return w < kFull ? code.words[w] : code.words[w] & ~bits_past(2 * tables - 32 * w);
    };
    const std::uint32_t even = bits_of(word);
    const std::uint32_t odd = bits_of(word + 1);
    const std::uint32_t even_shifted = even >> 1;
    const std::uint32_t odd_shifted = odd << 1;
    const uint4 q[4] = {query.words[word], query.shifted[word], query.words[word + 1],
                        query.shifted[word + 1]};
    const std::uint32_t of[4][4] = {{q[0].x, q[1].x, q[2].x, q[3].x},
                                    {q[0].y, q[1].y, q[2].y, q[3].y},
                                    {q[0].z, q[1].z, q[2].z, q[3].z},
                                    {q[0].w, q[1].w, q[2].w, q[3].w}};
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const std::uint32_t first = (even ^ of[h][0]) | (even_shifted ^ of[h][1]);
      const std::uint32_t second = (odd ^ of[h][2]) | (odd_shifted ^ of[h][3]);
      differ[h] += __popc((first & kEvenBits) | (second & ~kEvenBits));
    }
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    sums[h] = static_cast<float>(tables - static_cast<int>(differ[h]));
  }
}

}  // namespace kvtier::scoring::cuda
