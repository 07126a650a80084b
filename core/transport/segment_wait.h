// What every Segment says when a wait reached its limit.
#pragma once

#include <string>

#include "transport/transport.h"

namespace ronde {

inline Result AwaitTimedOut(int peer, Segment::Stage stage, std::uint64_t seen, std::uint64_t wanted) {
  static constexpr const char* kStageNames[] = {"packed", "reduced", "consumed"};
  static_assert(sizeof kStageNames / sizeof *kStageNames == Segment::kNumStages);
  return Result(Code::kTimeout, "rank " + std::to_string(peer) + " has " + kStageNames[stage] + " " +
                                    std::to_string(seen) + " chunks, not the awaited " + std::to_string(wanted) +
                                    ", in time");
}

}  // namespace ronde
