// What every Segment says when a wait reached its limit.
#pragma once

#include <string>

#include "transport/transport.h"

namespace ronde {

inline Result AwaitTimedOut(int peer, Segment::Stage stage, std::uint64_t seen, std::uint64_t wanted) {
  static constexpr const char* kStageNames[] = {"packed", "reduced", "consumed"};
  static_assert(sizeof kStageNames / sizeof *kStageNames == Segment::kNumStages);
  return Result(Code::kTimeout, "rank " + std::to_string(peer) + " did not go on in time (it may be stopped): it has " +
                                    kStageNames[stage] + " " + std::to_string(seen) + " of " + std::to_string(wanted) +
                                    " chunks");
}

}  // namespace ronde
