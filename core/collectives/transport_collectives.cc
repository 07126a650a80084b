#include "collectives/transport_collectives.h"

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>

#include "base/types.h"

namespace ronde {
namespace {

// Data goes in blocks of this size, so that memory stays small whatever the tensor.
constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
// A reduction's blocks are shared out among the members; no transfer of a large one is smaller than this.
constexpr std::size_t kLeastTransfer = 65536;
// Up to here one step, in which everybody sends everything to everybody, beats two.
constexpr std::size_t kOneStepBytes = 16384;

// What one member owns of a reduction's block.
std::size_t ShareBytes(std::size_t members) { return std::max(kLeastTransfer, kBlockBytes / members / 64 * 64); }

// Steps of an operation that must not be mistaken for each other.
constexpr int kData = 0, kResults = 1;

void CopyAcross(const Stream& stream) {
  stream.ForRange(0, stream.bytes(), [](const Piece& piece, std::size_t) {
    if (piece.input && piece.output) math::Copy(piece.output, piece.input, piece.bytes);
  });
}

// [begin, end) of a stream, within its bounds.
struct Range {
  const Stream* stream = nullptr;
  std::size_t begin = 0, end = 0;
  std::size_t bytes() const { return end - begin; }
};
Range Clip(const Stream& stream, std::size_t begin, std::size_t end) {
  return {&stream, std::min(begin, stream.bytes()), std::min(end, stream.bytes())};
}

// The bytes of one transfer: a range's own memory where that is one run of bytes, else a copy. The memory for copies is
// kept for the next use.
class Parcel {
 public:
  // The range's inputs. Those of a piece without input are arbitrary.
  std::span<const std::byte> Pack(const Range& range) {
    if (Piece piece = range.stream->Only(range.begin, range.end); piece.input != nullptr) {
      return {piece.input, piece.bytes};
    }
    std::byte* copy = Copy(range.bytes());
    range.stream->ForRange(range.begin, range.end, [&](const Piece& piece, std::size_t offset) {
      if (piece.input != nullptr) math::Copy(copy + offset, piece.input, piece.bytes);
    });
    return {copy, range.bytes()};
  }
  // Where bytes for the range's outputs may be put; Unpack then brings them there.
  std::span<std::byte> Open(const Range& range) {
    range_ = {};
    if (Piece piece = range.stream->Only(range.begin, range.end); piece.output != nullptr) {
      return {piece.output, piece.bytes};
    }
    range_ = range;
    return {Copy(range.bytes()), range.bytes()};
  }
  void Unpack() {
    if (range_.stream == nullptr) return;
    range_.stream->ForRange(range_.begin, range_.end, [&](const Piece& piece, std::size_t offset) {
      if (piece.output != nullptr) math::Copy(piece.output, copy_.get() + offset, piece.bytes);
    });
  }
  // Memory that belongs to no range.
  std::span<std::byte> Blank(std::size_t bytes) {
    range_ = {};
    return {Copy(bytes), bytes};
  }

 private:
  std::byte* Copy(std::size_t bytes) {
    if (bytes > capacity_) {
      copy_.reset(new std::byte[bytes]);  // not cleared
      capacity_ = bytes;
    }
    return copy_.get();
  }

  Range range_;  // to unpack from the copy
  std::unique_ptr<std::byte[]> copy_;
  std::size_t capacity_ = 0;
};

// Transfers in flight: all are started before the first is waited for, so no order of ranks can deadlock. The memory
// they borrow must outlive this object: declare it before.
class Transfers {
 public:
  explicit Transfers(const TransportCall& call) : call_(call) {}
  Transfers(const Transfers&) = delete;
  ~Transfers() { (void)WaitUntil(Now()); }  // after an error elsewhere: nothing stays lent

  void Send(int member, int step, std::span<const std::byte> data) {
    if (!data.empty()) handles_.push_back(call_.transport.Send(call_.group.members[member], call_.tag + step, data));
  }
  void Recv(int member, int step, std::span<std::byte> data) {
    if (!data.empty()) handles_.push_back(call_.transport.Recv(call_.group.members[member], call_.tag + step, data));
  }
  Result Wait() { return WaitUntil(call_.wait_seconds > 0 ? After(call_.wait_seconds) : Deadline::max()); }

 private:
  // Waits for every one, also after an error: the memory is borrowed until then.
  Result WaitUntil(Deadline limit) {
    if (handles_.empty()) return Ok();
    Spent(call_.phases, Phase::kPack);  // what follows a wait is settled by those who do it
    Result first;
    for (auto handle : handles_) {
      Result result = call_.transport.Wait(handle, limit);
      if (!result.ok() && first.ok()) {
        first = result;
        limit = Now();
      }
    }
    handles_.clear();
    Spent(call_.phases, Phase::kNetwork);
    return first;
  }

  const TransportCall& call_;
  std::vector<Transport::Handle> handles_;
};

// One block of a reduction: everybody's part of shard m goes to member m, which reduces them into its outputs, and (for
// an allreduce) the results go to everybody. Two of these alternate, so that a block is on its way while the one before
// is reduced and shared.
class Block {
 public:
  Block(const TransportCall& call, const math::ReduceSpec& spec)
      : call_(call), spec_(spec), out_(call.group.size()), in_(call.group.size()), to_owners_(call), to_all_(call) {}

  // parts[m]: the block's part of shard m.
  void Start(std::vector<Range> parts) {
    parts_ = std::move(parts);
    const Group& group = call_.group;
    sources_.clear();
    for (int m = 0; m < group.size(); ++m) {
      if (!group.Contributes(m)) continue;
      std::span<const std::byte> source;
      if (m == group.me) {
        source = out_[m].Pack(parts_[m]);
      } else {
        auto memory = in_[m].Blank(parts_[group.me].bytes());
        to_owners_.Recv(m, kData, memory);
        source = memory;
      }
      sources_.push_back(source.data());
    }
    for (int m = 0; m < group.size(); ++m) {
      if (m != group.me && group.Contributes(group.me)) to_owners_.Send(m, kData, out_[m].Pack(parts_[m]));
    }
  }
  Result Reduce() {
    RONDE_RETURN_IF_ERROR(to_owners_.Wait());
    const Range& mine = parts_[call_.group.me];
    result_ = own_.Open(mine);
    math::Reduce(spec_, sources_, result_.data(), nullptr, mine.bytes() / Info(spec_.dtype).size);
    Spent(call_.phases, Phase::kReduce);
    own_.Unpack();
    Spent(call_.phases, Phase::kUnpack);
    return Ok();
  }
  void StartSharing() {
    for (int m = 0; m < call_.group.size(); ++m) {
      if (m != call_.group.me) to_all_.Recv(m, kResults, in_[m].Open(parts_[m]));
    }
    for (int m = 0; m < call_.group.size(); ++m) {
      if (m != call_.group.me) to_all_.Send(m, kResults, result_);
    }
  }
  Result FinishSharing() {
    RONDE_RETURN_IF_ERROR(to_all_.Wait());
    for (int m = 0; m < call_.group.size(); ++m) {
      if (m != call_.group.me) in_[m].Unpack();
    }
    Spent(call_.phases, Phase::kUnpack);
    return Ok();
  }

 private:
  const TransportCall& call_;
  const math::ReduceSpec& spec_;
  std::vector<Range> parts_;
  std::vector<Parcel> out_, in_;
  Parcel own_;
  std::vector<const void*> sources_;
  std::span<std::byte> result_;   // of the own shard
  Transfers to_owners_, to_all_;  // last: they borrow from the parcels
};

// Everybody sends all its data to everybody and reduces it all.
Result AllreduceInOneStep(const TransportCall& call, const math::ReduceSpec& spec, const Stream& data) {
  const Group& group = call.group;
  const Range all = Clip(data, 0, data.bytes());
  std::vector<Parcel> in(group.size());
  Parcel out, result;
  Transfers transfers(call);
  std::vector<const void*> sources;
  const auto mine = out.Pack(all);
  for (int m = 0; m < group.size(); ++m) {
    if (!group.Contributes(m)) continue;
    if (m == group.me) {
      sources.push_back(mine.data());
      continue;
    }
    auto memory = in[m].Blank(all.bytes());
    transfers.Recv(m, kData, memory);
    sources.push_back(memory.data());
  }
  for (int m = 0; m < group.size(); ++m) {
    if (m != group.me && group.Contributes(group.me)) transfers.Send(m, kData, mine);
  }
  RONDE_RETURN_IF_ERROR(transfers.Wait());
  math::Reduce(spec, sources, result.Open(all).data(), nullptr, all.bytes() / Info(spec.dtype).size);
  Spent(call.phases, Phase::kReduce);
  result.Unpack();
  Spent(call.phases, Phase::kUnpack);
  return Ok();
}

}  // namespace

Result Allreduce(const TransportCall& call, const math::ReduceSpec& spec, const Stream& data) {
  if (data.bytes() == 0) return Ok();
  if (data.bytes() <= kOneStepBytes) return AllreduceInOneStep(call, spec, data);
  const int members = call.group.size();
  const std::size_t block = ShareBytes(call.group.members.size()) * call.group.members.size();
  auto parts = [&](std::size_t begin) {
    std::vector<Range> ranges;
    for (int m = 0; m < members; ++m) {
      Share share = ShareOf(std::min(block, data.bytes() - begin), m, members);
      ranges.push_back(Clip(data, begin + share.begin, begin + share.end));
    }
    return ranges;
  };
  Block first(call, spec), second(call, spec);
  Block *now = &first, *next = &second;
  now->Start(parts(0));
  for (std::size_t begin = 0; begin < data.bytes(); begin += block) {
    RONDE_RETURN_IF_ERROR(now->Reduce());
    now->StartSharing();
    if (begin + block < data.bytes()) next->Start(parts(begin + block));
    RONDE_RETURN_IF_ERROR(now->FinishSharing());
    std::swap(now, next);
  }
  return Ok();
}

Result Reducescatter(const TransportCall& call, const math::ReduceSpec& spec, const std::vector<Stream>& shards) {
  std::size_t largest = 0;
  for (const auto& shard : shards) largest = std::max(largest, shard.bytes());
  const std::size_t step = ShareBytes(shards.size());
  auto parts = [&](std::size_t begin) {
    std::vector<Range> ranges;
    for (const auto& shard : shards) ranges.push_back(Clip(shard, begin, begin + step));
    return ranges;
  };
  Block first(call, spec), second(call, spec);
  Block *now = &first, *next = &second;
  if (largest > 0) now->Start(parts(0));
  for (std::size_t begin = 0; begin < largest; begin += step) {
    if (begin + step < largest) next->Start(parts(begin + step));
    RONDE_RETURN_IF_ERROR(now->Reduce());
    std::swap(now, next);
  }
  return Ok();
}

Result Broadcast(const TransportCall& call, int root_member, const Stream& data) {
  // A binomial tree, block by block: member r (counted from the root) hears from r minus its lowest set bit. The next
  // block may come in while this one goes out.
  const int members = call.group.size();
  const int me = (call.group.me - root_member + members) % members;
  auto real = [&](int counted) { return (counted + root_member) % members; };
  const int lowest = me == 0 ? members : me & -me;
  std::array<Parcel, 2> parcels;
  Transfers in(call), out(call);
  std::span<std::byte> coming;
  std::span<const std::byte> block;
  auto receive = [&](std::size_t begin) {
    if (me == 0 || begin >= data.bytes()) return;
    coming = parcels[begin / kBlockBytes % 2].Open(Clip(data, begin, begin + kBlockBytes));
    in.Recv(real(me - lowest), kData, coming);
  };
  receive(0);
  for (std::size_t begin = 0; begin < data.bytes(); begin += kBlockBytes) {
    Parcel& parcel = parcels[begin / kBlockBytes % 2];
    if (me == 0) {
      block = parcel.Pack(Clip(data, begin, begin + kBlockBytes));
    } else {
      RONDE_RETURN_IF_ERROR(in.Wait());
      block = coming;
      parcel.Unpack();
      Spent(call.phases, Phase::kUnpack);
      receive(begin + kBlockBytes);
    }
    for (int bit = 1; bit < members && bit < lowest; bit <<= 1) {
      if (me + bit < members) out.Send(real(me + bit), kData, block);
    }
    RONDE_RETURN_IF_ERROR(out.Wait());
  }
  if (me == 0) CopyAcross(data);
  Spent(call.phases, Phase::kUnpack);
  return Ok();
}

Result Allgather(const TransportCall& call, const std::vector<Stream>& gathered) {
  const int me = call.group.me;
  std::size_t longest = 0;
  for (const auto& stream : gathered) longest = std::max(longest, stream.bytes());
  std::vector<Parcel> parcels(gathered.size());
  Transfers transfers(call);
  for (std::size_t begin = 0; begin < longest; begin += kBlockBytes) {
    const std::size_t end = begin + kBlockBytes;
    const auto mine = parcels[me].Pack(Clip(gathered[me], begin, end));
    for (int m = 0; m < call.group.size(); ++m) {
      if (m == me) continue;
      transfers.Recv(m, kData, parcels[m].Open(Clip(gathered[m], begin, end)));
      transfers.Send(m, kData, mine);
    }
    RONDE_RETURN_IF_ERROR(transfers.Wait());
    for (int m = 0; m < call.group.size(); ++m) {
      if (m != me) parcels[m].Unpack();
    }
    Spent(call.phases, Phase::kUnpack);
  }
  CopyAcross(gathered[me]);
  Spent(call.phases, Phase::kUnpack);
  return Ok();
}

Result Alltoall(const TransportCall& call, const std::vector<Stream>& sent, const std::vector<Stream>& received) {
  const int members = call.group.size(), me = call.group.me;
  Parcel out, in;
  Transfers transfers(call);
  // Pairwise: in step j with the members j places on and j places back, so that no rank is flooded.
  for (int j = 0; j < members; ++j) {
    const Stream& outgoing = sent[(me + j) % members];
    const Stream& incoming = received[(me - j + members) % members];
    const std::size_t longest = std::max(outgoing.bytes(), incoming.bytes());
    for (std::size_t begin = 0; begin < longest; begin += kBlockBytes) {
      const std::size_t end = begin + kBlockBytes;
      auto data = out.Pack(Clip(outgoing, begin, end));
      auto memory = in.Open(Clip(incoming, begin, end));
      if (j == 0) {
        math::Copy(memory.data(), data.data(), data.size());
      } else {
        transfers.Recv((me - j + members) % members, kData, memory);
        transfers.Send((me + j) % members, kData, data);
      }
      RONDE_RETURN_IF_ERROR(transfers.Wait());
      in.Unpack();
      Spent(call.phases, Phase::kUnpack);
    }
  }
  return Ok();
}

}  // namespace ronde
