#include "collectives/adasum.h"

#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "collectives/adasum_shard.h"
#include "collectives/segment_steps.h"

namespace ronde {
namespace {

using adasum::IsSmall;
using adasum::Layout;
using adasum::Owner;
using adasum::ShardStream;

std::size_t TotalBytes(const std::vector<Piece>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), std::size_t{0},
                         [](std::size_t sum, const Piece& t) { return sum + t.bytes; });
}

// Matrices come from all members, also from those that joined.
Group Everybody(const Group& group) {
  Group all = group;
  all.joined.clear();
  return all;
}

template <class Call>
Result AddGrams(const Call& call, Owner& owner) {
  math::ReduceSpec sum;
  sum.reduction = Reduction::kSum;
  sum.dtype = DType::kFloat64;
  Stream grams;
  grams.Add(owner.grams().data(), owner.grams().data(), owner.grams().size_bytes());
  return Allreduce(call, sum, grams);
}

template <class Call>
Result InOneStep(const Call& call, const math::ReduceSpec& spec, const std::vector<Piece>& tensors) {
  const Group& group = call.group;
  const std::size_t bytes = TotalBytes(tensors);
  std::vector<std::unique_ptr<std::byte[]>> memory(group.size());
  std::vector<const std::byte*> data(group.size());
  std::vector<Stream> gathered(group.size());
  for (int m = 0; m < group.size(); ++m) {
    if (!group.Contributes(m)) continue;
    memory[m].reset(new std::byte[bytes]);
    data[m] = memory[m].get();
    std::size_t start = 0;
    for (const auto& t : tensors) {
      gathered[m].Add(m == group.me ? t.input : nullptr, memory[m].get() + start, t.bytes);
      start += t.bytes;
    }
  }
  RONDE_RETURN_IF_ERROR(Allgather(call, gathered));
  adasum::CombineAll(group, spec, tensors, data);
  return Ok();
}

// What each member has in a chunk.
std::size_t PieceBytes(std::size_t chunk_bytes, int members) {
  return chunk_bytes / static_cast<std::size_t>(members) / 64 * 64;
}

// The chunks of one pass: in each, member m's slot has a piece of every other member's shard.
class Pass {
 public:
  Pass(const SegmentCall& call, const std::vector<Stream>& shards, std::size_t piece)
      : call_(call), steps_(call_), shards_(shards), piece_(piece) {}
  Pass(const Pass&) = delete;

  std::size_t begin(std::uint64_t chunk) const { return static_cast<std::size_t>(chunk) * piece_; }
  // Where the slot of `member` has its piece of shard `owner`.
  std::byte* At(int member, std::uint64_t chunk, int owner) const {
    return call_.slots.Slot(call_.group.members[member], call_.first_chunk + chunk) + Offset(owner);
  }
  Result Pack(std::uint64_t chunk) {
    RONDE_RETURN_IF_ERROR(steps_.Acquire(chunk));
    for (int m = 0; m < steps_.group().size(); ++m) {
      if (m == steps_.me()) continue;
      SegmentSteps::Pack(shards_[m], begin(chunk), begin(chunk) + piece_, steps_.Slot(chunk) + Offset(m));
    }
    steps_.Publish(Segment::kPacked, chunk);
    return Ok();
  }
  // What follows is arithmetic on the chunk.
  Result AwaitPacked(std::uint64_t chunk) {
    RONDE_RETURN_IF_ERROR(steps_.AwaitOthers(Segment::kPacked, chunk));
    steps_.Doing(Phase::kReduce);
    return Ok();
  }
  Result Unpack(int member, std::uint64_t chunk) {
    RONDE_RETURN_IF_ERROR(steps_.Await(member, Segment::kReduced, chunk));
    return steps_.Unpack(member, chunk, Offset(member), shards_[member], begin(chunk), begin(chunk) + piece_);
  }
  void Publish(Segment::Stage stage, std::uint64_t chunk) { steps_.Publish(stage, chunk); }

 private:
  std::size_t Offset(int owner) const { return static_cast<std::size_t>(owner) * piece_; }

  const SegmentCall call_;
  SegmentSteps steps_;
  const std::vector<Stream>& shards_;
  const std::size_t piece_;
};

// Packing runs a chunk ahead of measuring.
Result MeasureShard(Pass& pass, Owner& owner, int me, std::uint64_t chunks) {
  for (std::uint64_t i = 0; i <= chunks; ++i) {
    if (i < chunks) RONDE_RETURN_IF_ERROR(pass.Pack(i));
    if (i == 0) continue;
    const std::uint64_t k = i - 1;
    RONDE_RETURN_IF_ERROR(pass.AwaitPacked(k));
    owner.Measure(pass.begin(k), pass.begin(k + 1), [&](int m) { return pass.At(m, k, me); });
    pass.Publish(Segment::kConsumed, k);
  }
  return Ok();
}

// Packing runs a chunk ahead of combining, and that one ahead of taking the others' results.
Result CombineShard(Pass& pass, Owner& owner, int me, int members, std::uint64_t chunks) {
  for (std::uint64_t i = 0; i < chunks + 2; ++i) {
    if (i < chunks) RONDE_RETURN_IF_ERROR(pass.Pack(i));
    if (i >= 1 && i - 1 < chunks) {
      const std::uint64_t k = i - 1;
      RONDE_RETURN_IF_ERROR(pass.AwaitPacked(k));
      owner.Combine(pass.begin(k), pass.begin(k + 1), [&](int m) { return pass.At(m, k, me); }, pass.At(me, k, me));
      pass.Publish(Segment::kReduced, k);
    }
    if (i < 2) continue;
    for (int j = 1; j < members; ++j) RONDE_RETURN_IF_ERROR(pass.Unpack((me + j) % members, i - 2));
    pass.Publish(Segment::kConsumed, i - 2);
  }
  return Ok();
}

bool InOneChunk(std::size_t bytes, int members, std::size_t chunk_bytes) {
  return IsSmall(bytes, members) && bytes <= chunk_bytes;
}

// Chunk numbers of one pass, and of the exchange of matrices between them.
struct Numbers {
  std::uint64_t pass, grams;
};
Numbers NumbersOf(const Layout& layout, int members, std::size_t vectors, std::size_t chunk_bytes) {
  // Of chunks that are too small for the members there is no use; Adasum says so.
  const std::size_t piece = std::max<std::size_t>(64, PieceBytes(chunk_bytes, members));
  const std::size_t grams = layout.splits() * math::GramSize(vectors) * sizeof(double);
  return {ChunksOf(layout.longest(), piece), ChunksOf(grams, chunk_bytes)};
}

}  // namespace

std::uint64_t AdasumChunks(const std::vector<Piece>& tensors, DType dtype, int members, int contributing,
                           std::size_t chunk_bytes) {
  if (InOneChunk(TotalBytes(tensors), members, chunk_bytes)) return 1;
  const Layout layout(tensors, Info(dtype).size, members);
  const Numbers numbers = NumbersOf(layout, members, static_cast<std::size_t>(contributing), chunk_bytes);
  return 2 * numbers.pass + numbers.grams;
}

Result Adasum(const SegmentCall& call, const math::ReduceSpec& spec, const std::vector<Piece>& tensors) {
  const Group& group = call.group;
  const std::size_t chunk_bytes = call.slots.chunk_bytes();
  if (InOneChunk(TotalBytes(tensors), group.size(), chunk_bytes)) return InOneStep(call, spec, tensors);
  const std::size_t piece = PieceBytes(chunk_bytes, group.size());
  if (piece == 0) {
    return Result(Code::kArgument, "RONDE_CHUNK_BYTES is too small for Adasum over " + std::to_string(group.size()) +
                                       " ranks; it needs 64 bytes for each");
  }
  const Layout layout(tensors, Info(spec.dtype).size, group.size());
  std::vector<Stream> shards;
  for (int m = 0; m < group.size(); ++m) shards.push_back(ShardStream(layout, tensors, m));
  Owner owner(group, spec, tensors, layout);
  const Numbers numbers = NumbersOf(layout, group.size(), owner.vectors(), chunk_bytes);

  Pass first(call, shards, piece);
  RONDE_RETURN_IF_ERROR(MeasureShard(first, owner, group.me, numbers.pass));
  const Group all = Everybody(group);
  const SegmentCall grams{call.segment, call.slots,        call.first_chunk + numbers.pass,
                          all,          call.wait_seconds, call.phases};
  RONDE_RETURN_IF_ERROR(AddGrams(grams, owner));
  owner.Solve();
  SegmentCall last = call;
  last.first_chunk = grams.first_chunk + numbers.grams;
  Pass second(last, shards, piece);
  RONDE_RETURN_IF_ERROR(CombineShard(second, owner, group.me, group.size(), numbers.pass));
  return Ok();
}

Result Adasum(const TransportCall& call, const math::ReduceSpec& spec, const std::vector<Piece>& tensors) {
  const Group& group = call.group;
  if (IsSmall(TotalBytes(tensors), group.size())) return InOneStep(call, spec, tensors);
  const Layout layout(tensors, Info(spec.dtype).size, group.size());
  const std::size_t shard = layout.shard_bytes(group.me);

  std::vector<std::unique_ptr<std::byte[]>> theirs(group.size());
  std::vector<Stream> sent(group.size()), received(group.size()), gathered(group.size());
  for (int m = 0; m < group.size(); ++m) {
    if (m == group.me) continue;
    if (group.Contributes(group.me)) sent[m] = ShardStream(layout, tensors, m);
    if (!group.Contributes(m)) continue;
    theirs[m].reset(new std::byte[shard]);  // not cleared
    received[m].Add(nullptr, theirs[m].get(), shard);
  }
  // One tag for all: transfers of a pair match in their order.
  RONDE_RETURN_IF_ERROR(Alltoall(call, sent, received));
  Owner owner(group, spec, tensors, layout);
  auto at = [&](int m) -> const std::byte* { return theirs[m].get(); };
  owner.Measure(0, shard, at);
  const Group all = Everybody(group);
  RONDE_RETURN_IF_ERROR(AddGrams(TransportCall{call.transport, call.tag, all, call.wait_seconds, call.phases}, owner));
  owner.Solve();

  std::unique_ptr<std::byte[]> results(new std::byte[shard]);
  owner.Combine(0, shard, at, results.get());
  for (int m = 0; m < group.size(); ++m) {
    if (m == group.me) {
      gathered[m].Add(results.get(), nullptr, shard);
      continue;
    }
    for (const auto& part : layout.shard(m)) {
      std::byte* output = tensors[part.tensor].output;
      gathered[m].Add(nullptr, output ? output + part.offset : nullptr, part.bytes);
    }
  }
  return Allgather(call, gathered);
}

}  // namespace ronde
