#pragma once

namespace kvtier::scoring {

/// The right to launch kernels whose blocks wait for one another (docs/decisions/0013). Blocks of
/// launches at the same time hold SMs while they wait, so only so many engines of a process may
/// have it on one device; the others use kernels that cannot wait. Thread-safe.
class ExchangeLease {
 public:
  ExchangeLease() = default;  ///< Not held.
  /// Held if fewer than `most` of this device are.
  ExchangeLease(int device, int most);
  ExchangeLease(const ExchangeLease&) = delete;  // one owner
  ExchangeLease& operator=(const ExchangeLease&) = delete;
  ExchangeLease(ExchangeLease&& other) noexcept;
  ExchangeLease& operator=(ExchangeLease&& other) noexcept;
  ~ExchangeLease();

  [[nodiscard]] bool held() const noexcept { return device_ >= 0; }

 private:
  int device_ = -1;
};

}  // namespace kvtier::scoring
