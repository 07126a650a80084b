#include "collectives/segment_collectives.h"

#include <algorithm>
#include <array>

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

Result AllreduceTwoPhase(const SegmentCall& call, const math::ReduceSpec& spec, const Stream& data) {
  SegmentSteps steps(call);
  const int me = steps.me();
  const int members = steps.group().size();
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  const std::uint64_t chunks = ChunksOf(data.bytes(), chunk_bytes);
  auto start = [&](std::uint64_t k) { return static_cast<std::size_t>(k) * chunk_bytes; };
  auto share = [&](std::uint64_t k, int m) {
    return ShareOf(std::min(data.bytes() - start(k), chunk_bytes), m, members);
  };
  std::array<bool, 2 * kAhead + 1> lent{};  // by this rank, of the chunks in work
  for (std::uint64_t i = 0; i < chunks + 2 * kAhead; ++i) {
    if (i < chunks) {  // pack what others reduce
      RONDE_RETURN_IF_ERROR(steps.Acquire(i));
      lent[i % lent.size()] = steps.Lend(i, data, start(i), start(i) + chunk_bytes, /*results=*/true);
      for (int m = 0; m < members && !lent[i % lent.size()]; ++m) {
        Share s = share(i, m);
        if (m != me) SegmentSteps::Pack(data, start(i) + s.begin, start(i) + s.end, steps.Slot(i) + s.begin);
      }
      steps.Publish(Segment::kPacked, i);
    }
    if (i >= kAhead && i - kAhead < chunks) {  // reduce the own share
      std::uint64_t k = i - kAhead;
      RONDE_RETURN_IF_ERROR(steps.AwaitOthers(Segment::kPacked, k));
      Share s = share(k, me);
      RONDE_RETURN_IF_ERROR(steps.ViewAll(k));
      std::byte* also = lent[k % lent.size()] ? nullptr : steps.Slot(k) + s.begin;
      RONDE_RETURN_IF_ERROR(steps.Reduce(spec, s.begin, data, start(k) + s.begin, start(k) + s.end, also));
      steps.Publish(Segment::kReduced, k);
    }
    if (i >= 2 * kAhead) {  // take the others' results
      std::uint64_t k = i - 2 * kAhead;
      for (int j = 1; j < members && !lent[k % lent.size()]; ++j) {  // into lent memory they have written them
        int m = (me + j) % members;
        RONDE_RETURN_IF_ERROR(steps.Await(m, Segment::kReduced, k));
        Share s = share(k, m);
        RONDE_RETURN_IF_ERROR(steps.Unpack(m, k, s.begin, data, start(k) + s.begin, start(k) + s.end));
      }
      steps.Publish(Segment::kConsumed, k);
    }
  }
  return steps.Finish(chunks);
}

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
                                                          : AllreduceTwoPhase(call, spec, data);
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
