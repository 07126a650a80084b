// Monotonic time. Pure code (negotiation) takes a TimePoint as an argument and never asks for one.
#pragma once

#include <chrono>
#include <cstdint>

namespace ronde {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;
// When a wait gives up. Every wait takes one.
using Deadline = TimePoint;

inline TimePoint Now() { return Clock::now(); }
inline Deadline After(double seconds) {
  return Now() + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}
inline double Seconds(Duration d) { return std::chrono::duration<double>(d).count(); }
inline Duration FromSeconds(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// A clock for measuring, at half the price of Now(). Its unit is its own: compare two readings of both clocks.
inline std::int64_t Ticks() {
#if defined(__x86_64__)
  return static_cast<std::int64_t>(__builtin_ia32_rdtsc());
#else
  return Now().time_since_epoch().count();
#endif
}

}  // namespace ronde
