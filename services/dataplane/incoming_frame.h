#pragma once

#include "services/base/admission.h"
#include "services/wire/frame.h"

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

namespace kvtier::services {

/// A frame while its body comes. Memory grows as bytes come, each piece of it counted first; a
/// frame that finds no room is read on, to its end, without being kept. Not thread-safe.
class IncomingFrame {
 public:
  /// `reservation`, which is charged for the body, is null before there is a tenant, and for a
  /// frame that has a `refusal` from the start.
  IncomingFrame(const FrameHeader& header, std::shared_ptr<InflightReservation> reservation,
                std::optional<ServiceError> refusal = std::nullopt)
      : header_(header), reservation_(std::move(reservation)), refusal_(std::move(refusal)) {}

  /// Takes the body's part of `bytes`; returns how many they are.
  std::size_t append(std::span<const std::byte> bytes);
  /// Returns where the next bytes are to be read to: `scratch`, or a part of it, for a frame that
  /// is not kept. Not empty unless the frame is complete or `scratch` is empty.
  [[nodiscard]] std::span<std::byte> room(std::span<std::byte> scratch);
  /// So many bytes have been read there.
  void filled(std::size_t bytes) noexcept { received_ += bytes; }
  [[nodiscard]] bool complete() const noexcept { return received_ == header_.body_bytes; }

  [[nodiscard]] const FrameHeader& header() const noexcept { return header_; }
  /// Why it is not kept, if it is not: the body is empty then.
  [[nodiscard]] const std::optional<ServiceError>& refusal() const noexcept { return refusal_; }
  [[nodiscard]] const std::shared_ptr<InflightReservation>& reservation() const noexcept {
    return reservation_;
  }
  // Of a complete frame that is kept.
  [[nodiscard]] std::span<const std::byte> control() const {
    return std::span(body_).first(header_.control_bytes);
  }
  [[nodiscard]] std::span<const std::byte> payload() const {
    return std::span(body_).subspan(header_.control_bytes);
  }

 private:
  /// Makes the body at least `bytes` long, or refuses the frame.
  void grow(std::size_t bytes);

  const FrameHeader header_;
  const std::shared_ptr<InflightReservation> reservation_;
  Bytes body_;
  std::size_t received_ = 0;
  std::optional<ServiceError> refusal_;
};

}  // namespace kvtier::services
