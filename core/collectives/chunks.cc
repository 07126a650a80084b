#include "collectives/chunks.h"

namespace ronde {

SlotRing::SlotRing(Segment& segment, std::size_t chunk_bytes)
    : segment_(segment), chunk_bytes_(chunk_bytes), uses_(segment.ring_bytes() / RingBytes(1, chunk_bytes)) {}

std::byte* SlotRing::Slot(int rank, std::uint64_t chunk) const {
  return segment_.Peer(rank) + chunk % uses_.size() * chunk_bytes_;
}

Place& SlotRing::PlaceOf(int rank, std::uint64_t chunk) const {
  std::byte* places = segment_.Peer(rank) + uses_.size() * chunk_bytes_;
  return reinterpret_cast<Place*>(places)[chunk % uses_.size()];
}

Result SlotRing::Acquire(std::uint64_t chunk, const std::shared_ptr<const std::vector<int>>& readers,
                         Deadline deadline) {
  Use& use = uses_[chunk % uses_.size()];
  if (use.readers) {
    for (int reader : *use.readers) {
      if (reader == segment_.rank()) continue;
      RONDE_RETURN_IF_ERROR(segment_.Await(reader, Segment::kConsumed, use.chunk + 1, deadline));
    }
  }
  use = Use{chunk, readers};
  return Ok();
}

}  // namespace ronde
