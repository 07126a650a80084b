// Collectives between ranks that read each other's memory.
//
// Vocabulary. Every rank owns a ring of slots, one chunk each. Chunks are numbered job-wide: an operation takes the
// numbers [first_chunk, first_chunk + its chunks) on all ranks, and chunk c lies in slot c % slots of each writer. A
// rank packs a chunk (its data as source), may reduce its share of it (as result), and consumes it (has read all it
// needs of everybody's). Before a slot is written again its owner waits until every reader of its previous use consumed
// that; the readers are remembered per slot because operations of different process sets share the rings.
//
// Allreduce is the reduce-scatter / all-gather scheme of Rabenseifner (2004) in the form for shared memory: each rank
// reduces its share reading all neighbours' chunks, and all read the results from the owners. Sources are combined in
// the order of the members, so every rank holds the same bits, fused or not.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "collectives/group.h"
#include "collectives/stream.h"
#include "math/math.h"
#include "transport/transport.h"

namespace ronde {

// The slots of this rank's ring and who may still be reading them. Lives as long as the segment; executor thread.
class SlotRing {
 public:
  SlotRing(Segment& segment, std::size_t chunk_bytes);
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  // Waits until this rank's slot for the chunk is free and records its new use.
  Result Acquire(std::uint64_t chunk, const std::shared_ptr<const std::vector<int>>& readers, Deadline deadline);
  std::byte* Slot(int rank, std::uint64_t chunk) const;

 private:
  struct Use {
    std::uint64_t chunk = 0;
    std::shared_ptr<const std::vector<int>> readers;  // job ranks; null: never used
  };
  Segment& segment_;
  std::size_t chunk_bytes_;
  std::vector<Use> uses_;
};

struct SegmentCall {
  Segment& segment;
  SlotRing& slots;
  std::uint64_t first_chunk;
  const Group& group;
  double wait_seconds;  // limit of one wait; 0: until Abort
};

// Chunk numbers that an operation takes; at least 1. Pure.
std::uint64_t AllreduceChunks(std::size_t bytes, std::size_t chunk_bytes);
std::uint64_t StreamChunks(std::size_t longest_stream, std::size_t chunk_bytes);
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
