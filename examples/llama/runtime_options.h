#pragma once

#include "kvtier/config.h"
#include "kvtier/remote_tiers.h"

#include "llama/decoder.h"
#include "llama/model_config.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvtier::llama {

/// How kvtier is set up for a model, shared by all commands.
struct RuntimeOptions {
  Backend backend = Backend::kAuto;
  std::int64_t host_mib = 0;  ///< Page pool; 0: what the session needs.
  /// Of the pages that the session needs, those that host memory holds: "50%"; empty: all.
  std::string host_budget;
  std::string disk_cache;  ///< Folder of the others.
  PageFormat page_format = PageFormat::kModel;
  RemoteTiersConfig remote;     ///< Servers that keep copies of these.
  std::int64_t device_mib = 0;  ///< Sketches and workspaces; 0: what the session needs.
  int threads = 0;              ///< Of the decoder's own arithmetic; 0: all.
  /// Server that keeps the KV, "unix:PATH"; empty: this process. The memory is the server's then.
  std::string kv;
};

/// Which methods take as many tokens as their error target needs.
enum class ErrorRows : std::uint8_t {
  kNone,     ///< None: all have a sparsity.
  kBeside,   ///< Those with an error target, as one more row each.
  kInstead,  ///< The same, without rows at sparsities.
};

/// Retrieval settings that the rows of a report share.
struct RetrievalOptions {
  /// "default", "socket": rows of these methods in place of those that the lists below make; empty:
  /// those.
  std::vector<std::string> presets{};
  std::vector<Estimator> estimators{Estimator::kNormAware};
  std::vector<ValueWeighting> weightings{ValueWeighting::kDefault};
  std::vector<Selection> selections{Selection::kPerKvHead};
  std::vector<double> sparsities{0.0, 10.0, 33.0, 100.0};  ///< 0: dense.
  ErrorRows error_rows = ErrorRows::kNone;
  std::vector<SelectionRule> rules{};      ///< Empty: the estimator's.
  std::vector<SketchCode> codes{};         ///< Empty: the estimator's. Scalar with norm-aware only.
  std::vector<int> bits{0};                ///< Of norm-aware; 0: `RetrievalConfig`'s.
  std::vector<double> error_targets{0.0};  ///< Of the priority rule.
  std::vector<std::uint64_t> seeds{RetrievalConfig{}.seed};  ///< Of the planes and of priorities.
  int coarse_bits = 0;                                       ///< Of it over a scalar code.
  int candidates = RetrievalConfig{}.candidates;
  RetrievalConfig shared;  ///< Everything else but k.
  int sink = RetrievalConfig{}.sink_tokens;
  int window = RetrievalConfig{}.recent_tokens;
};

/// One row: dense attention, or a selector at one sparsity.
struct Method {
  bool dense = false;
  double sparsity = 1.0;  ///< 0: as many tokens as the error target needs.
  RetrievalConfig retrieval;
  std::string label = "dense";  ///< Of `retrieval`, in reports.
};

[[nodiscard]] std::string estimator_name(Estimator estimator);
[[nodiscard]] std::string weighting_name(ValueWeighting weighting);
[[nodiscard]] std::string selection_name(Selection selection);
[[nodiscard]] std::string rule_name(SelectionRule rule);
[[nodiscard]] std::string code_name(SketchCode code);
[[nodiscard]] std::string backend_name(Backend backend);

/// Returns the rows of `options`: dense once, when 0 is among the sparsities, then for every seed
/// every estimator with every weighting, selection, rule, error target, code and number of bits at
/// every other sparsity, and as `error_rows` says. Pairs of an estimator and one of these that
/// kvtier does not allow are left out and named in `left_out`. Throws `kInvalidArgument` for an
/// estimator left with no weighting, or a setting that kvtier rejects.
[[nodiscard]] std::vector<Method> make_methods(const RetrievalOptions& options,
                                               std::vector<std::string>& left_out);

/// Returns an engine configuration whose sessions hold `tokens` tokens and carry the sketches that
/// `methods` read. Throws `kInvalidArgument` for a host budget that is none, or servers, without a
/// disk cache, and what `make_remote_tiers` throws.
[[nodiscard]] Config engine_config(const ModelConfig& model, const RuntimeOptions& runtime,
                                   const std::vector<Method>& methods, std::int64_t tokens);

/// Returns per-call options of a method for queries that follow `context` tokens: k = floor(context
/// / sparsity) tokens by score, or as many as the error target needs, among those between the sink
/// and the last `window` tokens of the context; those outside, and all after the context, are
/// always attended. `method` must outlive the result when not dense.
[[nodiscard]] AttendOptions attend_options(Method& method, std::int64_t context, int window);

}  // namespace kvtier::llama
