// Chunk numbers, and the slots of memory that chunks lie in.
//
// Vocabulary. Chunks are numbered job-wide in the order of the Go lists: an operation takes the numbers [first_chunk,
// first_chunk + its chunks) on every rank of the job, member or not. Every rank owns a ring of slots, one chunk each,
// in memory that its neighbours read; chunk c lies in slot c % slots of each writer's own ring. The counters of Segment
// count chunks by these numbers, so they only grow.
//
// A chunk is packed (its bytes are in the slot) or lent (they stay where they are, in the owner's heap, and neighbours
// write results there); its place says which. Places lie behind the slots of a ring, one for each.
//
// A slot may be written again once all who read its previous use have consumed that use. Operations of different
// process sets share the rings, so the readers of the previous use are not those of the next one: the owner remembers
// them for each slot. Nobody waits in a circle: the awaited reader is a member of an earlier operation, members run
// their operations in the order of the numbers, and so the rank that is furthest behind waits for nobody.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "transport/transport.h"

namespace ronde {

struct Extent {
  std::uint64_t offset;  // in the owner's heap
  std::uint64_t bytes;
};
struct alignas(64) Place {
  static constexpr std::size_t kMaxExtents = 15;
  std::uint64_t extents;  // 0: packed; else how many extents make the chunk
  Extent extent[kMaxExtents];
};

// The slots of this rank's ring and who may still be reading them. Lives as long as the segment; executor thread.
class SlotRing {
 public:
  // An allreduce has three chunks in work: one packed, one reduced, one read by others.
  static constexpr std::size_t kMinSlots = 3;

  SlotRing(Segment& segment, std::size_t chunk_bytes);
  // What so many slots and their places take.
  static constexpr std::size_t RingBytes(std::size_t slots, std::size_t chunk_bytes) {
    return slots * (chunk_bytes + sizeof(Place));
  }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  std::size_t slots() const { return uses_.size(); }
  // Waits until this rank's slot for the chunk is free and records its new use.
  Result Acquire(std::uint64_t chunk, const std::shared_ptr<const std::vector<int>>& readers, Deadline deadline);
  std::byte* Slot(int rank, std::uint64_t chunk) const;
  // Write only your own, between Acquire and Publish.
  Place& PlaceOf(int rank, std::uint64_t chunk) const;

 private:
  struct Use {
    std::uint64_t chunk = 0;
    std::shared_ptr<const std::vector<int>> readers;  // job ranks; null: never used
  };
  Segment& segment_;
  std::size_t chunk_bytes_;
  std::vector<Use> uses_;
};

// Chunk numbers that a run of bytes takes; at least 1, so that no two operations begin at the same number.
inline std::uint64_t ChunksOf(std::size_t bytes, std::size_t chunk_bytes) {
  return std::max<std::uint64_t>(1, bytes / chunk_bytes + (bytes % chunk_bytes != 0));
}

}  // namespace ronde
