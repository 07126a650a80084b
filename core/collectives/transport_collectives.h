// Collectives over messages, for ranks that share no memory. Reductions send every shard's partials to its owner, which
// adds them in the order of the members (one rounding, the same bits on all ranks and in every run), then hands out
// results: 2 (P-1)/P of the data per rank, as a ring (Patarasuk and Yuan 2009) does, with two steps instead of 2 (P-1).
// Small ones take one step: everybody sends all to all and adds in the same order.
//
// Data moves straight from and into the tensors where a block lies in one of them; only blocks that cross tensors and
// partials on their way into a reduction are copied.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "collectives/group.h"
#include "collectives/phases.h"
#include "collectives/stream.h"
#include "math/math.h"
#include "transport/transport.h"

namespace ronde {

struct TransportCall {
  Transport& transport;
  std::uint64_t tag;  // of this operation; its low byte, 0, is for the algorithms' steps
  const Group& group;
  double wait_seconds;  // limit of one wait; 0: until Abort
  PhaseTimes* phases = nullptr;
};

// Arguments as in segment_collectives.h.
Result Allreduce(const TransportCall& call, const math::ReduceSpec& spec, const Stream& data);
Result Broadcast(const TransportCall& call, int root_member, const Stream& data);
Result Allgather(const TransportCall& call, const std::vector<Stream>& gathered);
// sent[m]: the rows for member m; received[m]: those from it.
Result Alltoall(const TransportCall& call, const std::vector<Stream>& sent, const std::vector<Stream>& received);
Result Reducescatter(const TransportCall& call, const math::ReduceSpec& spec, const std::vector<Stream>& shards);

}  // namespace ronde
