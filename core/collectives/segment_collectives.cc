#include "collectives/segment_collectives.h"

#include <algorithm>

#include "base/types.h"

namespace ronde {
namespace {

// Up to here one exchange in which everybody reads everything beats two phases.
constexpr std::size_t kOnePhaseBytes = 65536;
// How many chunks packing runs ahead of reducing, and reducing ahead of unpacking.
constexpr std::uint64_t kAhead = 1;

Deadline WaitLimit(const SegmentCall& call) {
  return call.wait_seconds > 0 ? After(call.wait_seconds) : Deadline::max();
}

// One call's steps that all algorithms share.
class Steps {
 public:
  explicit Steps(const SegmentCall& call)
      : call_(call), readers_(std::make_shared<const std::vector<int>>(call.group.members)) {}

  const Group& group() const { return call_.group; }
  int me() const { return call_.group.me; }
  std::byte* Slot(int member, std::uint64_t chunk) const {
    return call_.slots.Slot(group().members[member], call_.first_chunk + chunk);
  }
  Result Acquire(std::uint64_t chunk) {
    Result result = call_.slots.Acquire(call_.first_chunk + chunk, readers_, WaitLimit(call_));
    // A small operation saves this reading: its slot is free, unless the ring is short.
    if (chunk > 0) Spent(call_.phases, Phase::kNetwork);
    doing_ = Phase::kPack;
    return result;
  }
  void Publish(Segment::Stage stage, std::uint64_t chunk) {
    call_.segment.Publish(stage, call_.first_chunk + chunk + 1);
    Spent(call_.phases, doing_);
  }
  Result Await(int member, Segment::Stage stage, std::uint64_t chunk) {
    Spent(call_.phases, doing_);
    return AwaitAtOnce(member, stage, chunk);
  }
  Result AwaitOthers(Segment::Stage stage, std::uint64_t chunk) {
    for (int m = 0; m < group().size(); ++m) {
      if (m != me()) RONDE_RETURN_IF_ERROR(AwaitAtOnce(m, stage, chunk));
    }
    return Ok();
  }
  // All counters pass the operation's last chunk, whatever stages it used.
  Result Finish(std::uint64_t chunks) {
    for (auto stage : {Segment::kPacked, Segment::kReduced, Segment::kConsumed}) {
      call_.segment.Publish(stage, call_.first_chunk + chunks);
    }
    Spent(call_.phases, doing_);
    return Ok();
  }

  // Copies [begin, end) of the inputs to `to`.
  static void Pack(const Stream& stream, std::size_t begin, std::size_t end, std::byte* to) {
    stream.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
      if (piece.input != nullptr) math::Copy(to + offset, piece.input, piece.bytes);
    });
  }
  static void Unpack(const Stream& stream, std::size_t begin, std::size_t end, const std::byte* from) {
    stream.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
      if (piece.output != nullptr) math::Copy(piece.output, from + offset, piece.bytes);
    });
  }
  static void CopyAcross(const Stream& stream) {
    stream.ForRange(0, stream.bytes(), [](const Piece& piece, std::size_t) {
      if (piece.input && piece.output && piece.input != piece.output) {
        math::Copy(piece.output, piece.input, piece.bytes);
      }
    });
  }
  // Reduces [begin, end) of all members' data into the own output and, if wanted, a slot. `at` gives where a
  // neighbour's bytes for `begin` lie.
  template <class At>
  void Reduce(const math::ReduceSpec& spec, const Stream& own, std::size_t begin, std::size_t end, At&& at,
              std::byte* also) {
    doing_ = Phase::kReduce;
    const std::size_t element = Info(spec.dtype).size;
    own.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
      sources_.clear();
      for (int m = 0; m < group().size(); ++m) {
        if (!group().Contributes(m)) continue;
        sources_.push_back(m == me() ? piece.input : at(m) + offset);
      }
      std::byte* second = also ? also + offset : nullptr;
      std::byte* first = piece.output;
      if (first == nullptr) std::swap(first, second);  // joined: the result is only for the others
      if (first != nullptr) math::Reduce(spec, sources_, first, second, piece.bytes / element);
    });
  }

 private:
  // Right after a Publish, which has settled what the time before went into.
  Result AwaitAtOnce(int member, Segment::Stage stage, std::uint64_t chunk) {
    Result result =
        call_.segment.Await(group().members[member], stage, call_.first_chunk + chunk + 1, WaitLimit(call_));
    Spent(call_.phases, Phase::kNetwork);
    doing_ = Phase::kUnpack;  // unless Acquire or Reduce says otherwise
    return result;
  }

  const SegmentCall& call_;
  std::shared_ptr<const std::vector<int>> readers_;
  std::vector<const void*> sources_;
  Phase doing_ = Phase::kPack;  // what the time goes into until the next Publish or wait
};

bool OnePhase(std::size_t bytes, std::size_t chunk_bytes) { return bytes <= std::min(kOnePhaseBytes, chunk_bytes); }

Result AllreduceOnePhase(const SegmentCall& call, const math::ReduceSpec& spec, const Stream& data) {
  Steps steps(call);
  RONDE_RETURN_IF_ERROR(steps.Acquire(0));
  Steps::Pack(data, 0, data.bytes(), steps.Slot(steps.me(), 0));
  steps.Publish(Segment::kPacked, 0);
  RONDE_RETURN_IF_ERROR(steps.AwaitOthers(Segment::kPacked, 0));
  steps.Reduce(spec, data, 0, data.bytes(), [&](int m) { return steps.Slot(m, 0); }, nullptr);
  return steps.Finish(1);
}

Result AllreduceTwoPhase(const SegmentCall& call, const math::ReduceSpec& spec, const Stream& data) {
  Steps steps(call);
  const int me = steps.me();
  const int members = steps.group().size();
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  const std::uint64_t chunks = ChunksOf(data.bytes(), chunk_bytes);
  auto start = [&](std::uint64_t k) { return static_cast<std::size_t>(k) * chunk_bytes; };
  auto share = [&](std::uint64_t k, int m) {
    return ShareOf(std::min(data.bytes() - start(k), chunk_bytes), m, members);
  };
  for (std::uint64_t i = 0; i < chunks + 2 * kAhead; ++i) {
    if (i < chunks) {  // pack what others reduce
      RONDE_RETURN_IF_ERROR(steps.Acquire(i));
      for (int m = 0; m < members; ++m) {
        Share s = share(i, m);
        if (m != me) Steps::Pack(data, start(i) + s.begin, start(i) + s.end, steps.Slot(me, i) + s.begin);
      }
      steps.Publish(Segment::kPacked, i);
    }
    if (i >= kAhead && i - kAhead < chunks) {  // reduce the own share
      std::uint64_t k = i - kAhead;
      RONDE_RETURN_IF_ERROR(steps.AwaitOthers(Segment::kPacked, k));
      Share s = share(k, me);
      steps.Reduce(
          spec, data, start(k) + s.begin, start(k) + s.end, [&](int m) { return steps.Slot(m, k) + s.begin; },
          steps.Slot(me, k) + s.begin);
      steps.Publish(Segment::kReduced, k);
    }
    if (i >= 2 * kAhead) {  // take the others' results
      std::uint64_t k = i - 2 * kAhead;
      for (int j = 1; j < members; ++j) {
        int m = (me + j) % members;
        RONDE_RETURN_IF_ERROR(steps.Await(m, Segment::kReduced, k));
        Share s = share(k, m);
        Steps::Unpack(data, start(k) + s.begin, start(k) + s.end, steps.Slot(m, k) + s.begin);
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
  Steps steps(call);
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  const std::uint64_t chunks = ChunksOf(data.bytes(), chunk_bytes);
  for (std::uint64_t k = 0; k < chunks; ++k) {
    std::size_t begin = static_cast<std::size_t>(k) * chunk_bytes;
    if (steps.me() == root_member) {
      RONDE_RETURN_IF_ERROR(steps.Acquire(k));
      Steps::Pack(data, begin, begin + chunk_bytes, steps.Slot(root_member, k));
      steps.Publish(Segment::kPacked, k);
    } else {
      RONDE_RETURN_IF_ERROR(steps.Await(root_member, Segment::kPacked, k));
      Steps::Unpack(data, begin, begin + chunk_bytes, steps.Slot(root_member, k));
      steps.Publish(Segment::kConsumed, k);
    }
  }
  if (steps.me() == root_member) Steps::CopyAcross(data);
  return steps.Finish(chunks);
}

Result Allgather(const SegmentCall& call, const std::vector<Stream>& gathered) {
  Steps steps(call);
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  std::size_t longest = 0;
  for (const auto& stream : gathered) longest = std::max(longest, stream.bytes());
  const std::uint64_t chunks = ChunksOf(longest, chunk_bytes);
  const int me = steps.me();
  for (std::uint64_t k = 0; k < chunks; ++k) {
    std::size_t begin = static_cast<std::size_t>(k) * chunk_bytes;
    if (begin < gathered[me].bytes()) {
      RONDE_RETURN_IF_ERROR(steps.Acquire(k));
      Steps::Pack(gathered[me], begin, begin + chunk_bytes, steps.Slot(me, k));
    }
    steps.Publish(Segment::kPacked, k);
    for (int j = 1; j < steps.group().size(); ++j) {
      int m = (me + j) % steps.group().size();
      if (begin >= gathered[m].bytes()) continue;
      RONDE_RETURN_IF_ERROR(steps.Await(m, Segment::kPacked, k));
      Steps::Unpack(gathered[m], begin, begin + chunk_bytes, steps.Slot(m, k));
    }
    steps.Publish(Segment::kConsumed, k);
  }
  Steps::CopyAcross(gathered[me]);
  return steps.Finish(chunks);
}

Result Alltoall(const SegmentCall& call, const Stream& sent, const std::vector<Stream>& received,
                const std::vector<std::size_t>& offsets, std::size_t longest) {
  Steps steps(call);
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  const std::uint64_t chunks = ChunksOf(longest, chunk_bytes);
  const int me = steps.me();
  for (std::uint64_t k = 0; k < chunks; ++k) {
    std::size_t begin = static_cast<std::size_t>(k) * chunk_bytes;
    std::size_t end = begin + chunk_bytes;
    if (begin < sent.bytes()) {
      RONDE_RETURN_IF_ERROR(steps.Acquire(k));
      Steps::Pack(sent, begin, end, steps.Slot(me, k));
    }
    steps.Publish(Segment::kPacked, k);
    for (int j = 0; j < steps.group().size(); ++j) {
      int m = (me + j) % steps.group().size();
      std::size_t from = std::max(begin, offsets[m]);
      std::size_t to = std::min(end, offsets[m] + received[m].bytes());
      if (from >= to) continue;
      RONDE_RETURN_IF_ERROR(steps.Await(m, Segment::kPacked, k));
      Steps::Unpack(received[m], from - offsets[m], to - offsets[m], steps.Slot(m, k) + (from - begin));
    }
    steps.Publish(Segment::kConsumed, k);
  }
  return steps.Finish(chunks);
}

Result Reducescatter(const SegmentCall& call, const math::ReduceSpec& spec, const std::vector<Stream>& shards) {
  Steps steps(call);
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
        if (m != me) Steps::Pack(shards[m], begin, begin + piece, steps.Slot(me, i) + m * piece);
      }
      steps.Publish(Segment::kPacked, i);
    }
    if (i >= kAhead) {
      std::uint64_t k = i - kAhead;
      std::size_t begin = static_cast<std::size_t>(k) * piece;
      RONDE_RETURN_IF_ERROR(steps.AwaitOthers(Segment::kPacked, k));
      steps.Reduce(
          spec, shards[me], begin, begin + piece, [&](int m) { return steps.Slot(m, k) + me * piece; }, nullptr);
      steps.Publish(Segment::kConsumed, k);
    }
  }
  return steps.Finish(chunks);
}

}  // namespace ronde
