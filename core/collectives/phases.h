// Where the time of one fused operation goes in the data plane, and how much of its inputs needed no copy. A stopwatch
// that is read at the borders between phases: a backend gets it with the operation, and the thread that runs the
// operation owns it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace ronde {

enum class Phase : std::uint8_t {
  kPack,     // copying inputs to where others read or receive them
  kNetwork,  // waiting for peers and for bytes on their way
  kReduce,
  kUnpack,  // copying results to the outputs
};
inline constexpr std::size_t kPhases = 4;
inline constexpr const char* kPhaseNames[kPhases] = {"pack", "network", "reduce", "unpack"};

class PhaseTimes {
 public:
  void Start(std::int64_t now) { last_ = now; }
  // All time since the last call went into this.
  void Spent(Phase phase) {
    const std::int64_t now = Ticks();
    // Never below zero, should two cores' counters differ.
    ticks_[static_cast<std::size_t>(phase)] += std::max<std::int64_t>(now - last_, 0);
    last_ = now;
  }
  const std::array<std::int64_t, kPhases>& ticks() const { return ticks_; }
  // Bytes of this rank's inputs that the neighbours reached where they lay.
  void Lent(std::size_t bytes) { lent_ += static_cast<std::int64_t>(bytes); }
  std::int64_t lent() const { return lent_; }

 private:
  std::int64_t last_ = 0;
  std::int64_t lent_ = 0;
  std::array<std::int64_t, kPhases> ticks_{};
};

// For callers that may have none.
inline void Spent(PhaseTimes* times, Phase phase) {
  if (times != nullptr) times->Spent(phase);
}

}  // namespace ronde
