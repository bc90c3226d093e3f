#pragma once

#include "kvtier/config.h"
#include "kvtier/engine.h"
#include "kvtier/memory.h"
#include "kvtier/tensor.h"
#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/session.pb.h"

#include <cstddef>
#include <functional>

/// From the types of the library to messages. Every field is set, so that nothing is left to the
/// defaults of the other side.
namespace kvtier::services {

[[nodiscard]] v1::Geometry geometry_of(const ModelConfig& model);
[[nodiscard]] v1::Sketch message_of(const SketchConfig& sketch);
[[nodiscard]] v1::RetrievalOptions message_of(const RetrievalConfig& retrieval);
[[nodiscard]] v1::SessionMemory message_of(const SessionMemory& memory);
/// What is left out stays left out.
[[nodiscard]] v1::AttendOptions message_of(const AttendOptions& options);

/// Returns the bytes of all elements of a tensor of rank 1 to 4.
[[nodiscard]] std::size_t tensor_bytes(const TensorView& view);
/// Gives a message the dtype and shape of a tensor of rank 1 to 4, and returns its bytes.
std::size_t describe_tensor(const TensorView& view, v1::Tensor& message);
/// Copies bytes, which are there when it returns; empty: as memcpy does.
using CopyBytes = std::function<void(void* to, const void* from, std::size_t bytes)>;
/// Copies a tensor, strided as it may be, to dense memory.
void copy_tensor(const TensorView& view, std::byte* to, const CopyBytes& copy = {});
/// Both, to a message with data.
void copy_tensor(const TensorView& view, v1::Tensor& message, const CopyBytes& copy = {});
/// Copies a dense message into a view of the same shape and dtype. Returns false when it has
/// another.
[[nodiscard]] bool copy_back(const v1::Tensor& message, const MutableTensorView& view,
                             const CopyBytes& copy = {});

}  // namespace kvtier::services
