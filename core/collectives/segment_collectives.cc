#include "collectives/segment_collectives.h"

#include <algorithm>

#include "collectives/segment_steps.h"

namespace ronde {
namespace {

// Up to here one exchange in which everybody reads everything beats two phases.
constexpr std::size_t kOnePhaseBytes = 65536;
// How many chunks packing runs ahead of reducing, and reducing ahead of unpacking.
constexpr std::uint64_t kAhead = 1;

bool OnePhase(std::size_t bytes, std::size_t chunk_bytes) { return bytes <= std::min(kOnePhaseBytes, chunk_bytes); }

Result AllreduceOnePhase(const SegmentCall& call, const math::ReduceSpec& spec, const Stream& data) {
  SegmentSteps steps(call);
  RONDE_RETURN_IF_ERROR(steps.Acquire(0));
  SegmentSteps::Pack(data, 0, data.bytes(), steps.Slot(0));
  steps.Publish(Segment::kPacked, 0);
  RONDE_RETURN_IF_ERROR(steps.AwaitOthers(Segment::kPacked, 0));
  RONDE_RETURN_IF_ERROR(steps.ViewAll(0));
  RONDE_RETURN_IF_ERROR(steps.Reduce(spec, 0, data, 0, data.bytes(), nullptr));
  return steps.Finish(1);
}

// Reduce-scatter and all-gather, chunk by chunk in a pipeline: a chunk is given to the others, one iteration later its
// own share is reduced, one more iteration later the others' shares are taken.
//
// A chunk that all members lend (a quiet one) moves nothing but the shares that are reduced in place, so nobody waits
// for its other stages, and the counters, each a cache line that travels between cores, are published for several such
// chunks at once. Nobody waits in a circle for what is held back: it is less than a third of the slots, and what a rank
// that packs would wait for is published at once.
class TwoPhaseAllreduce {
 public:
  TwoPhaseAllreduce(const SegmentCall& call, const math::ReduceSpec& spec, const Stream& data)
      : steps_(call),
        spec_(spec),
        data_(data),
        chunk_bytes_(call.slots.chunk_bytes()),
        chunks_(ChunksOf(data.bytes(), chunk_bytes_)),
        together_(std::clamp<std::uint64_t>(call.slots.slots() / 3, 1, kQuietTogether)),
        lent_(chunks_),
        quiet_(chunks_) {}

  Result Run() {
    for (std::uint64_t i = 0; i < chunks_ + 2 * kAhead; ++i) {
      if (i < chunks_ && i == given_) RONDE_RETURN_IF_ERROR(Give());
      if (i >= kAhead && i - kAhead < chunks_) RONDE_RETURN_IF_ERROR(ReduceShare(i - kAhead));
      if (i >= 2 * kAhead) RONDE_RETURN_IF_ERROR(Take(i - 2 * kAhead));
    }
    return steps_.Finish(chunks_);
  }

 private:
  static constexpr std::uint64_t kQuietTogether = 4;

  std::size_t Start(std::uint64_t chunk) const { return static_cast<std::size_t>(chunk) * chunk_bytes_; }
  Share ShareIn(std::uint64_t chunk, int member) const {
    return ShareOf(std::min(data_.bytes() - Start(chunk), chunk_bytes_), member, steps_.group().size());
  }
  // The next chunk; as long as they can be lent, the following ones too.
  Result Give() {
    const std::uint64_t end = std::min(given_ + together_, chunks_);
    do {
      const std::uint64_t k = given_++;
      RONDE_RETURN_IF_ERROR(steps_.Acquire(k));
      lent_[k] = steps_.Lend(k, data_, Start(k), Start(k) + chunk_bytes_, /*results=*/true);
      for (int m = 0; m < steps_.group().size() && !lent_[k]; ++m) {  // what others reduce
        Share s = ShareIn(k, m);
        if (m != steps_.me()) {
          SegmentSteps::Pack(data_, Start(k) + s.begin, Start(k) + s.end, steps_.Slot(k) + s.begin);
        }
      }
    } while (given_ < end && lent_[given_ - 1]);
    steps_.Publish(Segment::kPacked, given_ - 1);
    return Ok();
  }
  Result ReduceShare(std::uint64_t k) {
    RONDE_RETURN_IF_ERROR(steps_.AwaitOthers(Segment::kPacked, k));
    RONDE_RETURN_IF_ERROR(steps_.ViewAll(k));
    quiet_[k] = lent_[k] && steps_.AllOthersLent();
    Share s = ShareIn(k, steps_.me());
    std::byte* also = lent_[k] ? nullptr : steps_.Slot(k) + s.begin;
    RONDE_RETURN_IF_ERROR(steps_.Reduce(spec_, s.begin, data_, Start(k) + s.begin, Start(k) + s.end, also));
    if (!quiet_[k]) steps_.Publish(Segment::kReduced, k);
    return Ok();
  }
  Result Take(std::uint64_t k) {
    const int members = steps_.group().size();
    for (int j = 1; j < members && !lent_[k]; ++j) {  // into lent memory they have written them
      int m = (steps_.me() + j) % members;
      RONDE_RETURN_IF_ERROR(steps_.Await(m, Segment::kReduced, k));
      Share s = ShareIn(k, m);
      RONDE_RETURN_IF_ERROR(steps_.Unpack(m, k, s.begin, data_, Start(k) + s.begin, Start(k) + s.end));
    }
    if (!quiet_[k] || (k + 1) % together_ == 0) steps_.Publish(Segment::kConsumed, k);
    return Ok();
  }

  SegmentSteps steps_;
  const math::ReduceSpec& spec_;
  const Stream& data_;
  const std::size_t chunk_bytes_;
  const std::uint64_t chunks_;
  const std::uint64_t together_;  // quiet chunks for which counters are published at once
  std::uint64_t given_ = 0;       // chunks packed or lent
  std::vector<bool> lent_;        // by this rank
  std::vector<bool> quiet_;       // by all
};

// Of a chunk, one piece for each member's shard.
std::size_t PieceBytes(std::size_t chunk_bytes, int members) {
  return std::max<std::size_t>(64, chunk_bytes / static_cast<std::size_t>(members) / 64 * 64);
}
}  // namespace

std::uint64_t ReducescatterChunks(std::size_t largest_shard, std::size_t chunk_bytes, int members) {
  return ChunksOf(largest_shard, PieceBytes(chunk_bytes, members));
}

Result Allreduce(const SegmentCall& call, const math::ReduceSpec& spec, const Stream& data) {
  return OnePhase(data.bytes(), call.slots.chunk_bytes()) ? AllreduceOnePhase(call, spec, data)
                                                          : TwoPhaseAllreduce(call, spec, data).Run();
}

Result Broadcast(const SegmentCall& call, int root_member, const Stream& data) {
  SegmentSteps steps(call);
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  const std::uint64_t chunks = ChunksOf(data.bytes(), chunk_bytes);
  for (std::uint64_t k = 0; k < chunks; ++k) {
    std::size_t begin = static_cast<std::size_t>(k) * chunk_bytes;
    if (steps.me() == root_member) {
      RONDE_RETURN_IF_ERROR(steps.Acquire(k));
      steps.Bring(k, data, begin, begin + chunk_bytes);
      steps.Publish(Segment::kPacked, k);
    } else {
      RONDE_RETURN_IF_ERROR(steps.Await(root_member, Segment::kPacked, k));
      RONDE_RETURN_IF_ERROR(steps.Unpack(root_member, k, 0, data, begin, begin + chunk_bytes));
      steps.Publish(Segment::kConsumed, k);
    }
  }
  if (steps.me() == root_member) SegmentSteps::CopyAcross(data);
  return steps.Finish(chunks);
}

Result Allgather(const SegmentCall& call, const std::vector<Stream>& gathered) {
  SegmentSteps steps(call);
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  std::size_t longest = 0;
  for (const auto& stream : gathered) longest = std::max(longest, stream.bytes());
  const std::uint64_t chunks = ChunksOf(longest, chunk_bytes);
  const int me = steps.me();
  for (std::uint64_t k = 0; k < chunks; ++k) {
    std::size_t begin = static_cast<std::size_t>(k) * chunk_bytes;
    if (begin < gathered[me].bytes()) {
      RONDE_RETURN_IF_ERROR(steps.Acquire(k));
      steps.Bring(k, gathered[me], begin, begin + chunk_bytes);
    }
    steps.Publish(Segment::kPacked, k);
    for (int j = 1; j < steps.group().size(); ++j) {
      int m = (me + j) % steps.group().size();
      if (begin >= gathered[m].bytes()) continue;
      RONDE_RETURN_IF_ERROR(steps.Await(m, Segment::kPacked, k));
      RONDE_RETURN_IF_ERROR(steps.Unpack(m, k, 0, gathered[m], begin, begin + chunk_bytes));
    }
    steps.Publish(Segment::kConsumed, k);
  }
  SegmentSteps::CopyAcross(gathered[me]);
  return steps.Finish(chunks);
}

Result Alltoall(const SegmentCall& call, const Stream& sent, const std::vector<Stream>& received,
                const std::vector<std::size_t>& offsets, std::size_t longest) {
  SegmentSteps steps(call);
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  const std::uint64_t chunks = ChunksOf(longest, chunk_bytes);
  const int me = steps.me();
  for (std::uint64_t k = 0; k < chunks; ++k) {
    std::size_t begin = static_cast<std::size_t>(k) * chunk_bytes;
    std::size_t end = begin + chunk_bytes;
    if (begin < sent.bytes()) {
      RONDE_RETURN_IF_ERROR(steps.Acquire(k));
      steps.Bring(k, sent, begin, end);
    }
    steps.Publish(Segment::kPacked, k);
    for (int j = 0; j < steps.group().size(); ++j) {
      int m = (me + j) % steps.group().size();
      std::size_t from = std::max(begin, offsets[m]);
      std::size_t to = std::min(end, offsets[m] + received[m].bytes());
      if (from >= to) continue;
      RONDE_RETURN_IF_ERROR(steps.Await(m, Segment::kPacked, k));
      RONDE_RETURN_IF_ERROR(steps.Unpack(m, k, from - begin, received[m], from - offsets[m], to - offsets[m]));
    }
    steps.Publish(Segment::kConsumed, k);
  }
  return steps.Finish(chunks);
}

Result Reducescatter(const SegmentCall& call, const math::ReduceSpec& spec, const std::vector<Stream>& shards) {
  SegmentSteps steps(call);
  const int me = steps.me();
  const int members = steps.group().size();
  const std::size_t piece = PieceBytes(call.slots.chunk_bytes(), members);
  if (piece * members > call.slots.chunk_bytes()) {
    return Result(Code::kArgument, "RONDE_CHUNK_BYTES is too small for a reducescatter over " +
                                       std::to_string(members) + " ranks; it needs 64 bytes for each");
  }
  std::size_t largest = 0;
  for (const auto& shard : shards) largest = std::max(largest, shard.bytes());
  const std::uint64_t chunks = ReducescatterChunks(largest, call.slots.chunk_bytes(), members);
  for (std::uint64_t i = 0; i < chunks + kAhead; ++i) {
    if (i < chunks) {
      RONDE_RETURN_IF_ERROR(steps.Acquire(i));
      std::size_t begin = static_cast<std::size_t>(i) * piece;
      for (int m = 0; m < members; ++m) {
        if (m != me) SegmentSteps::Pack(shards[m], begin, begin + piece, steps.Slot(i) + m * piece);
      }
      steps.Publish(Segment::kPacked, i);
    }
    if (i >= kAhead) {
      std::uint64_t k = i - kAhead;
      std::size_t begin = static_cast<std::size_t>(k) * piece;
      RONDE_RETURN_IF_ERROR(steps.AwaitOthers(Segment::kPacked, k));
      RONDE_RETURN_IF_ERROR(steps.ViewAll(k));
      RONDE_RETURN_IF_ERROR(steps.Reduce(spec, me * piece, shards[me], begin, begin + piece, nullptr));
      steps.Publish(Segment::kConsumed, k);
    }
  }
  return steps.Finish(chunks);
}

}  // namespace ronde
