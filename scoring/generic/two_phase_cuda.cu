#include "scoring/generic/generic_cuda.cuh"
#include "scoring/generic/scores_cuda.cuh"
#include "scoring/two_phase.h"

#include <cstdint>

namespace kvtier::scoring::cuda {
namespace {

struct PhaseArgs {
  GenericArgs fine;
  ScoreParams coarse;
  transfer::StepFlags* flags;
  float* order;               // as `fine.order`, of the first phase, then of the second
  float* exported;            // the same, or where scores of one head are exported from
  std::int64_t coarse_bytes;  // of a token and KV head

  /// Of a KV head.
  [[nodiscard]] __device__ int sets() const { return fine.sets / fine.request.kv.kv_heads; }
  /// Biases of the first phase are made from these, per query head.
  [[nodiscard]] __device__ float* cuts(std::int64_t query_head) const {
    return fine.workspace.rest_logs + query_head;
  }
};

// ln p of one token for each set of a KV head, by the planes that `params` has.
__device__ void score_token(const PhaseArgs& args, const ScoreParams& params,
                            const QueryTables& tables, std::int64_t query_index, int kv_head,
                            std::int64_t token, float (&scores)[kMaxGroup]) {
  const SelectRequest& request = args.fine.request;
  const Scratch& scratch = args.fine.scratch;
  const bool combines = request.params.shared();
  const int group = request.kv.group;
  const std::byte* block = scratch.plans[query_index].blocks[token / hashing::kBlockTokens];
  const int in_block = static_cast<int>(token % hashing::kBlockTokens);
  const Norms norms = load_norms(request.sketch, block, kv_head, in_block);
  const std::int64_t first_head = query_index * request.kv.query_heads() + kv_head * group;
  const float* entries = tables.entries + first_head * tables.entries_per_head;
  float sums[kMaxGroup] = {};
  for (int begin = 0; begin < params.num_planes(); begin += 32) {
    const int word = begin / 32;
    const auto* words = reinterpret_cast<const std::uint32_t*>(
        block + request.sketch.chunk_offset(kv_head, word / kWordsPerChunk, in_block));
    const std::uint32_t bits = __ldg(words + word % kWordsPerChunk);
    const int count = min(32, params.num_planes() - begin);
    for (int i = 0; i < count; ++i) {
      const bool set = ((bits >> (31 - i)) & 1) != 0;
      for (int h = 0; h < group; ++h) {
        const float weight = __ldg(entries + h * tables.entries_per_head + begin + i);
        sums[h] += set ? weight : -weight;
      }
    }
  }
  LogSum exponentials;
  for (int h = 0; h < group; ++h) {
    scores[h] = norms.finite ? weighted_score(params, tables.scalars[first_head + h], sums[h],
                                              norms.key, norms.value)
                             : kLowestScore;
    if (combines && scores[h] > kLowestScore) {
      exponentials.add(scores[h] - scratch.normalisers[first_head + h]);
    }
  }
  if (!combines || group == 1) return;
  const bool finite = exponentials.sum > 0.0F;
  scores[0] =
      finite ? settled_score(exponentials.log() - logf(static_cast<float>(group))) : kLowestScore;
}

// Scores the candidates by the whole code; what orders a set becomes ln p of this phase and the
// bias of the first, and all other tokens are lowest. Grid: tiles x KV heads x queries.
__global__ __launch_bounds__(kTileThreads) void score_candidates(
    const __grid_constant__ PhaseArgs args) {
  const TileWork work(args.fine);
  if (!work.any()) return;
  const SelectRequest& request = args.fine.request;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int sets = args.sets();
  const int first_set = kv_head * sets;
  const std::int64_t first_state = std::int64_t{blockIdx.z} * request.kv.query_heads() + first_set;
  const SetState* states = args.fine.scratch.states + first_state;
  if (static_cast<int>(threadIdx.x) < sets) {
    args.cuts(first_state)[threadIdx.x] = states[threadIdx.x].cut;
  }

  unsigned long long bytes = 0;
  work.visit_tokens([&](std::int64_t token) {
    bytes += static_cast<unsigned long long>(args.coarse_bytes);
    float biases[kMaxGroup];
    unsigned candidate = 0;
    for (int s = 0; s < sets; ++s) {
      const float score = args.fine.row(args.order, work.list * sets + s)[token];
      const std::uint32_t key = priority_key(args.coarse, first_set + s);
      const float u = priority_uniform(key, static_cast<std::uint32_t>(token));
      biases[s] = priority_bias(states[s].cut, score);
      if (score > kLowestScore && score - logf(u) > states[s].cut) candidate |= 1U << s;
    }
    float scores[kMaxGroup];
    if (candidate != 0) {
      score_token(args, request.params, args.fine.workspace.tables, blockIdx.z, kv_head, token,
                  scores);
      bytes += static_cast<unsigned long long>(request.sketch.token_bytes());
    }
    for (int s = 0; s < sets; ++s) {
      const bool kept = ((candidate >> s) & 1) != 0 && scores[s] > kLowestScore;
      const float value = kept ? settled_score(scores[s] + biases[s]) : kLowestScore;
      args.fine.row(args.order, work.list * sets + s)[token] = value;
      // A set of one head is ordered by scores that are not normalised; ln p is exported.
      const bool normalises = request.params.shared() && request.kv.group == 1 && kept;
      const float of_head = normalises ? args.fine.scratch.normalisers[first_state] : 0.0F;
      args.fine.row(args.exported, work.list * sets + s)[token] = settled_score(value - of_head);
    }
  });
  if (args.flags == nullptr || bytes == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&args.flags->sketch_bytes), bytes);
}

// Adds the biases of the first phase to those of the selection. Grid: KV heads x queries.
__global__ __launch_bounds__(kTileThreads) void add_first_biases(
    const __grid_constant__ PhaseArgs args) {
  const int kv_head = static_cast<int>(blockIdx.x);
  const std::int64_t query_index = blockIdx.y;
  const transfer::KvGeometry& kv = args.fine.request.kv;
  const std::int64_t list = query_index * kv.kv_heads + kv_head;
  const transfer::SelectionView& view = args.fine.workspace.selection;
  const int sets = args.sets();
  const float* cuts = args.cuts(query_index * kv.query_heads() + kv_head * sets);
  for (std::int64_t i = threadIdx.x; i < view.counts[list]; i += kTileThreads) {
    const std::int64_t entry = list * view.capacity + i;
    float scores[kMaxGroup];
    score_token(args, args.coarse, args.fine.workspace.coarse_tables, query_index, kv_head,
                view.ids[entry], scores);
    for (int s = 0; s < sets; ++s) {
      if (((view.head_mask[entry] >> s) & 1) == 0) continue;
      view.bias[entry * view.bias_heads + s] += priority_bias(cuts[s], scores[s]);
    }
  }
}

}  // namespace

void enqueue_two_phases(cudaStream_t stream, const SelectRequest& request,
                        const SelectorWorkspace& workspace) {
  SelectRequest first = request, second = request;
  first.params = coarse_phase(request.params);
  second.params = fine_phase(request.params);
  first.flags = second.flags = nullptr;  // tokens are not read as a whole: `sketch_bytes` counts
  SelectorWorkspace with_coarse = workspace;
  with_coarse.tables = workspace.coarse_tables;
  const Scratch scratch = scratch_layout(workspace.limits, workspace.scratch);
  const Stage coarse{
      .stream = stream, .request = first, .workspace = with_coarse, .scratch = scratch};
  const Stage fine{.stream = stream, .request = second, .workspace = workspace, .scratch = scratch};

  enqueue_plan(coarse, PlanPurpose::kScore);
  if (request.rule.mode != LayerMode::kSparse || request.max_length <= 0) return;
  enqueue_scores(coarse);
  if (coarse.shared()) {
    enqueue_normalisers(coarse);
    enqueue_combine(coarse);
  }
  enqueue_priorities(coarse, false);

  float* order = coarse.order() == workspace.combined ? workspace.combined : workspace.scores;
  const hashing::SketchGeometry prefix{.kv_heads = request.kv.kv_heads,
                                       .num_planes = first.params.num_planes()};
  const PhaseArgs args{.fine = generic_args(fine),
                       .coarse = first.params,
                       .flags = request.flags,
                       .order = order,
                       .exported = coarse.shared() ? workspace.combined : workspace.scores,
                       .coarse_bytes = prefix.token_bytes()};
  const dim3 tiles = tile_grid(coarse, request.kv.kv_heads);
  launch(coarse, score_candidates, tiles, args);

  enqueue_plan(fine, PlanPurpose::kScore);
  enqueue_priorities(fine, false);
  enqueue_marks(fine);
  enqueue_compact(fine, BiasSource::kPriorities);
  launch(fine, add_first_biases, dim3(tiles.y, tiles.z), args);
}

}  // namespace kvtier::scoring::cuda
