#include "benchmarks/quality/bound_selectors.h"
#include "benchmarks/quality/code_selectors.h"
#include "benchmarks/quality/library_selector.h"
#include "benchmarks/quality/sampling_selectors.h"
#include "benchmarks/quality/selector.h"
#include "benchmarks/quality/simple_selectors.h"

#include <utility>

namespace kvtier::quality {
namespace {

/// Norm-aware over signs; scores alone are compared, so the rule is of no effect.
RetrievalConfig signs() {
  RetrievalConfig config;
  config.rule = SelectionRule::kTopK;
  config.code = SketchCode::kSign;
  return config;
}

NamedSelector soft(ValueWeighting weighting, PlaneKind kind, const std::string& settings,
                   std::int64_t capacity) {
  RetrievalConfig config = RetrievalConfig::of(Estimator::kSoftCollision);
  config.value_weighting = weighting;
  config.plane_kind = kind;
  return {"soft_collision", settings, "SOCKET",
          std::make_unique<LibrarySelector>(config, capacity)};
}

NamedSelector norm_aware(int bits, int query_bits, std::int64_t capacity) {
  RetrievalConfig config = signs();
  config.num_planes = bits;
  config.query_bits = query_bits;
  return {"norm_aware",
          std::to_string(bits) + " planes" + (query_bits == 0 ? ", query in float" : ""), "kvtier",
          std::make_unique<LibrarySelector>(config, capacity)};
}

}  // namespace

std::vector<NamedSelector> make_selectors(std::int64_t capacity, bool variants) {
  std::vector<NamedSelector> all;
  const auto add = [&all](const char* name, const char* settings, const char* source,
                          std::unique_ptr<Selector> selector) {
    all.push_back({name, settings, source, std::move(selector)});
  };
  add("exact", "q.k", "oracle", std::make_unique<ExactSelector>(0.0F));
  add("exact", "q.k, ln |v|", "oracle", std::make_unique<ExactSelector>(1.0F));

  all.push_back(soft(ValueWeighting::kLinear, PlaneKind::kGaussian, "linear", capacity));
  all.push_back(soft(ValueWeighting::kNone, PlaneKind::kGaussian, "no value norm", capacity));
  all.push_back(
      soft(ValueWeighting::kNone, PlaneKind::kOrthogonal, "no value norm, orthogonal", capacity));
  all.push_back(soft(ValueWeighting::kCalibrated, PlaneKind::kGaussian, "calibrated", capacity));
  all.push_back(soft(ValueWeighting::kCalibrated, PlaneKind::kOrthogonal, "calibrated, orthogonal",
                     capacity));
  for (const int bits : {64, 128, 256, 600}) all.push_back(norm_aware(bits, 4, capacity));
  all.push_back(norm_aware(256, 0, capacity));
  RetrievalConfig unweighted = signs();
  unweighted.value_weighting = ValueWeighting::kNone;
  add("norm_aware", "256 planes, no value norm", "kvtier",
      std::make_unique<LibrarySelector>(unweighted, capacity));
  add("hard_lsh", "P 2, L 300", "baseline of SOCKET",
      std::make_unique<LibrarySelector>(RetrievalConfig::of(Estimator::kHardCollision), capacity));

  add("magicpig", "K 10, L 150", "MagicPIG", std::make_unique<HashSamplingSelector>(10, 150));
  add("quest", "pages of 16", "Quest", std::make_unique<QuestSelector>(16));
  add("double_sparsity", "16 channels", "Double Sparsity", std::make_unique<ChannelSelector>(16));
  add("pqcache", "m 2, b 6", "PQCache", std::make_unique<ProductSelector>(2, 6));
  add("pqcache", "m 16, b 8", "PQCache", std::make_unique<ProductSelector>(16, 8));
  add("rabitq", "1 bit", "RaBitQ", std::make_unique<BinarySelector>());
  add("vattention", "5 % at 95 %", "vAttention", std::make_unique<VerifiedSelector>());
  add("h2o", "recorded steps", "H2O", std::make_unique<HeavyHitterSelector>());
  add("streaming", "window", "StreamingLLM", std::make_unique<StreamingSelector>());
  add("random", "", "", std::make_unique<RandomSelector>());
  if (!variants) return all;
  add("exact", "q.k, 1.5 ln |v|", "variant", std::make_unique<ExactSelector>(1.5F));
  add("exact", "q.k, 2 ln |v|", "variant", std::make_unique<ExactSelector>(2.0F));
  add("exact", "q.k, 3 ln |v|", "variant", std::make_unique<ExactSelector>(3.0F));
  const auto add_signs = [&add](const char* settings, const BinarySelector::Parts& parts) {
    add("signs", settings, "variant", std::make_unique<BinarySelector>(parts));
  };
  add_signs("ln |v|", {.centred = false, .corrected = false, .value_weight = 1.0F});
  add_signs("2 ln |v|", {.centred = false, .corrected = false, .value_weight = 2.0F});
  add_signs("corrected, ln |v|", {.centred = false, .corrected = true, .value_weight = 1.0F});
  add_signs("corrected, centred, ln |v|", {.value_weight = 1.0F});
  add_signs("corrected, centred, 1.5 ln |v|", {.value_weight = 1.5F});
  return all;
}

}  // namespace kvtier::quality
