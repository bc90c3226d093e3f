#include "kvtier/error.h"

#include "benchmarks/benchmarks.h"

#include <regex>

namespace kvtier::bench {

DenseCase parse_shape(const std::string& text) {
  // At most 9 digits of tokens, 3 of each other: nothing overflows.
  static const std::regex form(R"((\d{1,9})([KM]?)(?:x(\d{1,3}))?(?::(\d{1,3})/(\d{1,3}))?)");
  std::smatch match;
  DenseCase shape;
  bool good = std::regex_match(text, match, form);
  if (good) {
    shape.tokens = std::stoll(match[1]) << (match[2] == "M" ? 20 : match[2] == "K" ? 10 : 0);
    if (match[3].matched) shape.batch = std::stoi(match[3]);
    if (match[4].matched) {
      shape.query_heads = std::stoi(match[4]);
      shape.kv_heads = std::stoi(match[5]);
    }
    good = shape.tokens > 0 && shape.tokens <= 1 << 30 && shape.batch > 0 && shape.batch <= 64 &&
           shape.kv_heads > 0 && shape.query_heads > 0 && shape.query_heads % shape.kv_heads == 0;
  }
  if (!good) {
    throw Error(ErrorCode::kInvalidArgument,
                "shape: expected TOKENS[xSEQUENCES][:QUERY_HEADS/KV_HEADS], as 128K, 32Kx16 or "
                "128K:64/8, with 1 to 64 sequences and KV heads that divide the query heads, "
                "found " +
                    text);
  }
  return shape;
}

std::string name_of(const DenseCase& shape) {
  constexpr std::int64_t kThousand = 1024;
  std::string name = shape.tokens % (kThousand * kThousand) == 0
                         ? std::to_string(shape.tokens / kThousand / kThousand) + "M"
                     : shape.tokens % kThousand == 0
                         ? std::to_string(shape.tokens / kThousand) + "K"
                         : std::to_string(shape.tokens);
  if (shape.batch > 1) name += "x" + std::to_string(shape.batch);
  if (shape.query_heads != 32 || shape.kv_heads != 8) {
    name += ":" + std::to_string(shape.query_heads) + "/" + std::to_string(shape.kv_heads);
  }
  return name;
}

std::string name_of(Estimator estimator) {
  switch (estimator) {
    case Estimator::kSoftCollision:
      return "soft_collision";
    case Estimator::kHardCollision:
      return "hard_collision";
    default:
      return "norm_aware";
  }
}

std::string name_of(Selection selection) {
  if (selection == Selection::kPerSequence) return "per_sequence";
  return selection == Selection::kPerQueryHead ? "per_query_head" : "per_kv_head";
}

std::string name_of(SelectionRule rule) {
  return rule == SelectionRule::kPriority ? "priority" : "top_k";
}

std::string name_of(SketchCode code) { return code == SketchCode::kScalar ? "scalar" : "sign"; }

std::string name_of(KvPlacement placement) {
  return placement == KvPlacement::kHost ? "host" : "device";
}

json retrieval_parameters(const RetrievalConfig& retrieval, int head_dim) {
  json values = {{"estimator", name_of(retrieval.estimator)},
                 {"selection", name_of(retrieval.selection)},
                 {"rule", name_of(retrieval.rule)},
                 {"code", name_of(retrieval.code)},
                 {"bits", retrieval.sketch(head_dim).num_planes}};
  if (retrieval.error_target > 0) values["error_target"] = retrieval.error_target;
  if (retrieval.coarse_bits > 0) {
    values["coarse_bits"] = retrieval.coarse_bits;
    values["candidates"] = retrieval.candidates;
  }
  if (retrieval.estimator == Estimator::kNormAware) values["query_bits"] = retrieval.query_bits;
  if (retrieval.sparsity > 0) {
    values["sparsity"] = retrieval.sparsity;
  } else {
    values["k"] = retrieval.top_k;
  }
  return values;
}

}  // namespace kvtier::bench
