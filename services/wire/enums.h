#pragma once

#include "kvtier/config.h"
#include "kvtier/engine.h"
#include "kvtier/tensor.h"
#include "kvtier/v1/admin.pb.h"
#include "kvtier/v1/retrieval.pb.h"
#include "kvtier/v1/tensor.pb.h"

#include <array>
#include <optional>
#include <utility>

/// The enums of the library and those of messages: one table, for both directions.
namespace kvtier::services {

template <typename Enum>
inline constexpr auto kMessageValues = nullptr;
template <>
inline constexpr auto kMessageValues<DType> =
    std::to_array<std::pair<DType, v1::DataType>>({{DType::kFloat32, v1::DATA_TYPE_FLOAT32},
                                                   {DType::kFloat16, v1::DATA_TYPE_FLOAT16},
                                                   {DType::kBFloat16, v1::DATA_TYPE_BFLOAT16},
                                                   {DType::kInt32, v1::DATA_TYPE_INT32}});
template <>
inline constexpr auto kMessageValues<LayerMode> =
    std::to_array<std::pair<LayerMode, v1::LayerMode>>({{LayerMode::kSparse, v1::LAYER_MODE_SPARSE},
                                                        {LayerMode::kDense, v1::LAYER_MODE_DENSE},
                                                        {LayerMode::kSlidingWindow,
                                                         v1::LAYER_MODE_SLIDING_WINDOW}});
template <>
inline constexpr auto kMessageValues<PlaneKind> =
    std::to_array<std::pair<PlaneKind, v1::PlaneKind>>(
        {{PlaneKind::kGaussian, v1::PLANE_KIND_GAUSSIAN},
         {PlaneKind::kOrthogonal, v1::PLANE_KIND_ORTHOGONAL}});
template <>
inline constexpr auto kMessageValues<SketchCode> =
    std::to_array<std::pair<SketchCode, v1::SketchCode>>(
        {{SketchCode::kSign, v1::SKETCH_CODE_SIGN}, {SketchCode::kScalar, v1::SKETCH_CODE_SCALAR}});
template <>
inline constexpr auto kMessageValues<SelectionRule> =
    std::to_array<std::pair<SelectionRule, v1::SelectionRule>>(
        {{SelectionRule::kTopK, v1::SELECTION_RULE_TOP_K},
         {SelectionRule::kPriority, v1::SELECTION_RULE_PRIORITY}});
template <>
inline constexpr auto kMessageValues<Estimator> =
    std::to_array<std::pair<Estimator, v1::Estimator>>(
        {{Estimator::kSoftCollision, v1::ESTIMATOR_SOFT_COLLISION},
         {Estimator::kHardCollision, v1::ESTIMATOR_HARD_COLLISION},
         {Estimator::kNormAware, v1::ESTIMATOR_NORM_AWARE}});
template <>
inline constexpr auto kMessageValues<ValueWeighting> =
    std::to_array<std::pair<ValueWeighting, v1::ValueWeighting>>(
        {{ValueWeighting::kDefault, v1::VALUE_WEIGHTING_UNSPECIFIED},
         {ValueWeighting::kLinear, v1::VALUE_WEIGHTING_LINEAR},
         {ValueWeighting::kCalibrated, v1::VALUE_WEIGHTING_CALIBRATED},
         {ValueWeighting::kLogit, v1::VALUE_WEIGHTING_LOGIT},
         {ValueWeighting::kNone, v1::VALUE_WEIGHTING_NONE}});
template <>
inline constexpr auto kMessageValues<Selection> =
    std::to_array<std::pair<Selection, v1::Selection>>(
        {{Selection::kPerQueryHead, v1::SELECTION_PER_QUERY_HEAD},
         {Selection::kPerKvHead, v1::SELECTION_PER_KV_HEAD},
         {Selection::kPerSequence, v1::SELECTION_PER_SEQUENCE}});
template <>
inline constexpr auto kMessageValues<LogLevel> =
    std::to_array<std::pair<LogLevel, v1::LogLevel>>({{LogLevel::kDebug, v1::LOG_LEVEL_DEBUG},
                                                      {LogLevel::kInfo, v1::LOG_LEVEL_INFO},
                                                      {LogLevel::kWarning, v1::LOG_LEVEL_WARNING},
                                                      {LogLevel::kError, v1::LOG_LEVEL_ERROR}});

/// Returns the message's value; its first one, UNSPECIFIED, for a number that is none of the enum.
template <typename Enum>
[[nodiscard]] constexpr auto enum_message(Enum value) {
  for (const auto& [known, message] : kMessageValues<Enum>) {
    if (known == value) return message;
  }
  return decltype(kMessageValues<Enum>[0].second){};
}

/// Returns the value of a message's; nothing for a number that is not in the table.
template <typename Enum, typename Message>
[[nodiscard]] constexpr std::optional<Enum> enum_of(Message message) {
  for (const auto& [value, known] : kMessageValues<Enum>) {
    if (known == message) return value;
  }
  return std::nullopt;
}

}  // namespace kvtier::services
