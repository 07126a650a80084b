#include "collectives/transport_collectives.h"

#include <algorithm>
#include <cstring>

#include "base/types.h"

namespace ronde {
namespace {

// Data goes in blocks of this size, so that buffers stay small whatever the tensor.
constexpr std::size_t kBlockBytes = std::size_t{4} << 20;

using Bytes = std::vector<std::byte>;

void Pack(const Stream& stream, std::size_t begin, std::size_t end, Bytes* to) {
  to->resize(std::min(end, stream.bytes()) - std::min(begin, stream.bytes()));
  stream.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
    if (piece.input != nullptr) std::memcpy(to->data() + offset, piece.input, piece.bytes);
  });
}
void Unpack(const Stream& stream, std::size_t begin, std::size_t end, const std::byte* from) {
  stream.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
    if (piece.output != nullptr) std::memcpy(piece.output, from + offset, piece.bytes);
  });
}
void CopyAcross(const Stream& stream) {
  stream.ForRange(0, stream.bytes(), [](const Piece& piece, std::size_t) {
    if (piece.input && piece.output && piece.input != piece.output) {
      std::memcpy(piece.output, piece.input, piece.bytes);
    }
  });
}

// Transfers in flight: all are started before the first is waited for, so no order of ranks can deadlock.
class Transfers {
 public:
  explicit Transfers(const TransportCall& call) : call_(call) {}
  void Send(int member, int step, const Bytes& data) {
    if (!data.empty()) handles_.push_back(call_.transport.Send(call_.group.members[member], call_.tag + step, data));
  }
  void Recv(int member, int step, std::span<std::byte> data) {
    if (!data.empty()) handles_.push_back(call_.transport.Recv(call_.group.members[member], call_.tag + step, data));
  }
  // Waits for every one, also after an error: the memory is borrowed until then.
  Result Wait() {
    Deadline limit = call_.wait_seconds > 0 ? After(call_.wait_seconds) : Deadline::max();
    Result first;
    for (auto handle : handles_) {
      Result result = call_.transport.Wait(handle, limit);
      if (!result.ok() && first.ok()) {
        first = result;
        limit = Now();
      }
    }
    handles_.clear();
    return first;
  }

 private:
  const TransportCall& call_;
  std::vector<Transport::Handle> handles_;
};

// Everybody's [begins[m], ends[m]) of shard m goes to m, which reduces it into its outputs and `result`.
Result ReduceToOwners(const TransportCall& call, const math::ReduceSpec& spec, const std::vector<Stream>& shards,
                      const std::vector<Share>& ranges, Bytes* result) {
  const Group& group = call.group;
  const int me = group.me;
  std::vector<Bytes> out(group.size()), in(group.size());
  const std::size_t mine = ranges[me].end - ranges[me].begin;
  Transfers transfers(call);
  for (int m = 0; m < group.size(); ++m) {
    if (m == me) continue;
    if (group.Contributes(m)) {
      in[m].resize(mine);
      transfers.Recv(m, 0, in[m]);
    }
    if (group.Contributes(me)) {
      Pack(shards[m], ranges[m].begin, ranges[m].end, &out[m]);
      transfers.Send(m, 0, out[m]);
    }
  }
  RONDE_RETURN_IF_ERROR(transfers.Wait());
  Pack(shards[me], ranges[me].begin, ranges[me].end, &in[me]);
  std::vector<const void*> sources;
  for (int m = 0; m < group.size(); ++m) {
    if (group.Contributes(m)) sources.push_back(in[m].data());
  }
  result->resize(mine);
  math::Reduce(spec, sources, result->data(), nullptr, mine / Info(spec.dtype).size);
  Unpack(shards[me], ranges[me].begin, ranges[me].end, result->data());
  return Ok();
}

}  // namespace

Result Allreduce(const TransportCall& call, const math::ReduceSpec& spec, const Stream& data) {
  const int members = call.group.size();
  const int me = call.group.me;
  for (std::size_t begin = 0; begin < data.bytes(); begin += kBlockBytes) {
    std::size_t block = std::min(kBlockBytes, data.bytes() - begin);
    std::vector<Stream> streams(members, data);
    std::vector<Share> ranges;
    for (int m = 0; m < members; ++m) {
      Share share = ShareOf(block, m, members);
      ranges.push_back({begin + share.begin, begin + share.end});
    }
    Bytes result;
    RONDE_RETURN_IF_ERROR(ReduceToOwners(call, spec, streams, ranges, &result));
    std::vector<Bytes> results(members);
    Transfers transfers(call);
    for (int m = 0; m < members; ++m) {
      if (m == me) continue;
      results[m].resize(ranges[m].end - ranges[m].begin);
      transfers.Recv(m, 1, results[m]);
      transfers.Send(m, 1, result);
    }
    RONDE_RETURN_IF_ERROR(transfers.Wait());
    for (int m = 0; m < members; ++m) {
      if (m != me) Unpack(data, ranges[m].begin, ranges[m].end, results[m].data());
    }
  }
  return Ok();
}

Result Broadcast(const TransportCall& call, int root_member, const Stream& data) {
  // A binomial tree, block by block: member r (counted from the root) hears from r minus its lowest set bit.
  const int members = call.group.size();
  const int me = (call.group.me - root_member + members) % members;
  auto real = [&](int virtual_member) { return (virtual_member + root_member) % members; };
  int lowest = me == 0 ? members : me & -me;
  for (std::size_t begin = 0; begin < data.bytes(); begin += kBlockBytes) {
    std::size_t end = std::min(begin + kBlockBytes, data.bytes());
    Bytes block(end - begin);
    if (me == 0) {
      Pack(data, begin, end, &block);
    } else {
      Transfers transfers(call);
      transfers.Recv(real(me - lowest), 0, block);
      RONDE_RETURN_IF_ERROR(transfers.Wait());
      Unpack(data, begin, end, block.data());
    }
    Transfers transfers(call);
    for (int bit = 1; bit < members && bit < lowest; bit <<= 1) {
      if (me + bit < members) transfers.Send(real(me + bit), 0, block);
    }
    RONDE_RETURN_IF_ERROR(transfers.Wait());
  }
  if (me == 0) CopyAcross(data);
  return Ok();
}

Result Allgather(const TransportCall& call, const std::vector<Stream>& gathered) {
  const int me = call.group.me;
  std::size_t longest = 0;
  for (const auto& stream : gathered) longest = std::max(longest, stream.bytes());
  for (std::size_t begin = 0; begin < longest; begin += kBlockBytes) {
    std::size_t end = begin + kBlockBytes;
    Bytes mine;
    Pack(gathered[me], begin, end, &mine);
    std::vector<Bytes> theirs(gathered.size());
    Transfers transfers(call);
    for (int m = 0; m < call.group.size(); ++m) {
      if (m == me) continue;
      const std::size_t bytes = gathered[m].bytes();
      theirs[m].resize(std::min(end, bytes) - std::min(begin, bytes));
      transfers.Recv(m, 0, theirs[m]);
      transfers.Send(m, 0, mine);
    }
    RONDE_RETURN_IF_ERROR(transfers.Wait());
    for (int m = 0; m < call.group.size(); ++m) {
      if (m != me) Unpack(gathered[m], begin, end, theirs[m].data());
    }
  }
  CopyAcross(gathered[me]);
  return Ok();
}

Result Alltoall(const TransportCall& call, const std::vector<Stream>& sent, const std::vector<Stream>& received) {
  const int members = call.group.size();
  // Pairwise: in step j with the members j places on and j places back, so that no rank is flooded.
  for (int j = 0; j < members; ++j) {
    int to = (call.group.me + j) % members;
    int from = (call.group.me - j + members) % members;
    if (j == 0) {
      Bytes own;
      Pack(sent[to], 0, sent[to].bytes(), &own);
      Unpack(received[from], 0, received[from].bytes(), own.data());
      continue;
    }
    std::size_t longest = std::max(sent[to].bytes(), received[from].bytes());
    for (std::size_t begin = 0; begin < longest; begin += kBlockBytes) {
      std::size_t end = begin + kBlockBytes;
      Bytes out, in;
      Pack(sent[to], begin, end, &out);
      const std::size_t bytes = received[from].bytes();
      in.resize(std::min(end, bytes) - std::min(begin, bytes));
      Transfers transfers(call);
      transfers.Recv(from, 0, in);
      transfers.Send(to, 0, out);
      RONDE_RETURN_IF_ERROR(transfers.Wait());
      Unpack(received[from], begin, end, in.data());
    }
  }
  return Ok();
}

Result Reducescatter(const TransportCall& call, const math::ReduceSpec& spec, const std::vector<Stream>& shards) {
  std::size_t largest = 0;
  for (const auto& shard : shards) largest = std::max(largest, shard.bytes());
  const std::size_t step = std::max<std::size_t>(64, kBlockBytes / shards.size() / 64 * 64);
  for (std::size_t begin = 0; begin < largest; begin += step) {
    std::vector<Share> ranges;
    for (const auto& shard : shards) {
      ranges.push_back({std::min(begin, shard.bytes()), std::min(begin + step, shard.bytes())});
    }
    Bytes result;
    RONDE_RETURN_IF_ERROR(ReduceToOwners(call, spec, shards, ranges, &result));
  }
  return Ok();
}

}  // namespace ronde
