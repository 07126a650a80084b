// Collectives between ranks that read each other's memory.
//
// Vocabulary (chunks and slots: see chunks.h). A rank packs a chunk (its data as source), may reduce its share of it
// (as result), and consumes it (has read all it needs of everybody's).
//
// Allreduce is the reduce-scatter / all-gather scheme of Rabenseifner (2004) in the form for shared memory: each rank
// reduces its share reading all neighbours' chunks, and all read the results from the owners. Sources are combined in
// the order of the members, so every rank holds the same bits, fused or not.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "collectives/chunks.h"
#include "collectives/group.h"
#include "collectives/phases.h"
#include "collectives/stream.h"
#include "math/math.h"
#include "transport/transport.h"

namespace ronde {

struct SegmentCall {
  Segment& segment;
  SlotRing& slots;  // at least SlotRing::kMinSlots
  std::uint64_t first_chunk;
  const Group& group;
  double wait_seconds;  // limit of one wait; 0: until Abort
  PhaseTimes* phases = nullptr;
};

// Chunk numbers of a reducescatter: every chunk holds a piece of each member's shard. Other operations: ChunksOf the
// longest stream that a member brings. Pure.
std::uint64_t ReducescatterChunks(std::size_t largest_shard, std::size_t chunk_bytes, int members);

Result Allreduce(const SegmentCall& call, const math::ReduceSpec& spec, const Stream& data);
Result Broadcast(const SegmentCall& call, int root_member, const Stream& data);
// gathered[m]: where member m's stream goes (outputs), and this rank's own input.
Result Allgather(const SegmentCall& call, const std::vector<Stream>& gathered);
// sent: this rank's rows for all members in member order. received[m].bytes() come from member m's stream at
// offsets[m]; longest: bytes of the longest stream that any member sends.
Result Alltoall(const SegmentCall& call, const Stream& sent, const std::vector<Stream>& received,
                const std::vector<std::size_t>& offsets, std::size_t longest);
// shards[m]: this rank's input of member m's shard; the own one has outputs too.
Result Reducescatter(const SegmentCall& call, const math::ReduceSpec& spec, const std::vector<Stream>& shards);

}  // namespace ronde
