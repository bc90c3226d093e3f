#pragma once

#include "kvtier/config.h"

#include <array>
#include <string_view>
#include <utility>

/// Names of enumerators in options and reports.
namespace kvtier::services {

inline constexpr std::array<std::pair<std::string_view, Backend>, 3> kBackendNames{
    {{"auto", Backend::kAuto}, {"cpu", Backend::kCpu}, {"cuda", Backend::kCuda}}};

inline constexpr std::array<std::pair<std::string_view, Estimator>, 3> kEstimatorNames{
    {{"soft_collision", Estimator::kSoftCollision},
     {"hard_collision", Estimator::kHardCollision},
     {"norm_aware", Estimator::kNormAware}}};

inline constexpr std::array<std::pair<std::string_view, ValueWeighting>, 5> kWeightingNames{
    {{"default", ValueWeighting::kDefault},
     {"linear", ValueWeighting::kLinear},
     {"calibrated", ValueWeighting::kCalibrated},
     {"logit", ValueWeighting::kLogit},
     {"none", ValueWeighting::kNone}}};

inline constexpr std::array<std::pair<std::string_view, Selection>, 3> kSelectionNames{
    {{"per_kv_head", Selection::kPerKvHead},
     {"per_query_head", Selection::kPerQueryHead},
     {"per_sequence", Selection::kPerSequence}}};

inline constexpr std::array<std::pair<std::string_view, SelectionRule>, 2> kRuleNames{
    {{"top_k", SelectionRule::kTopK}, {"priority", SelectionRule::kPriority}}};

inline constexpr std::array<std::pair<std::string_view, SketchCode>, 2> kCodeNames{
    {{"sign", SketchCode::kSign}, {"scalar", SketchCode::kScalar}}};

inline constexpr std::array<std::pair<std::string_view, HostAllocation>, 3> kHostAllocationNames{
    {{"managed", HostAllocation::kManaged},
     {"registered", HostAllocation::kRegistered},
     {"driver", HostAllocation::kDriver}}};

inline constexpr std::array<std::pair<std::string_view, PageFormat>, 2> kPageFormatNames{
    {{"model", PageFormat::kModel}, {"int8", PageFormat::kInt8}}};

inline constexpr std::array<std::pair<std::string_view, RowCachePolicy>, 3> kRowCachePolicyNames{
    {{"clock", RowCachePolicy::kClock},
     {"lru", RowCachePolicy::kLru},
     {"score", RowCachePolicy::kScore}}};

inline constexpr std::array<std::pair<std::string_view, PlaneKind>, 2> kPlaneKindNames{
    {{"gaussian", PlaneKind::kGaussian}, {"orthogonal", PlaneKind::kOrthogonal}}};

/// Returns the name of `value` in one of the tables above.
template <typename Names, typename Enum>
[[nodiscard]] constexpr std::string_view name_of(const Names& names, Enum value) {
  for (const auto& [name, candidate] : names) {
    if (candidate == value) return name;
  }
  return "unknown";
}

}  // namespace kvtier::services
