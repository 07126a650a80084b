// Internal to the collectives over a Segment: the steps that they are made of.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "collectives/segment_collectives.h"

namespace ronde {

// Where a member's chunk lies, as this rank reads it.
class ChunkView {
 public:
  ChunkView() = default;
  ChunkView(std::byte* slot, const Place& place, std::span<std::byte> heap)
      : slot_(slot), place_(&place), heap_(heap) {}

  bool lent() const { return place_->extents > 0; }
  // Whether the extents lie in the heap: a look at what another process wrote.
  bool Makes() const {
    if (place_->extents > Place::kMaxExtents) return false;
    return std::all_of(place_->extent, place_->extent + place_->extents, [this](const Extent& extent) {
      return extent.offset <= heap_.size() && extent.bytes <= heap_.size() - extent.offset;
    });
  }
  // The bytes from `offset` of the chunk on. *run, how many are wanted, becomes how many of them lie there in one
  // piece: 0 beyond the chunk's end.
  std::byte* At(std::size_t offset, std::size_t* run) const {
    if (!lent()) return slot_ + offset;
    for (std::size_t i = 0; i < place_->extents; ++i) {
      const Extent& extent = place_->extent[i];
      if (offset < extent.bytes) {
        *run = std::min<std::size_t>(*run, extent.bytes - offset);
        return heap_.data() + extent.offset + offset;
      }
      offset -= extent.bytes;
    }
    *run = 0;
    return nullptr;
  }

 private:
  std::byte* slot_ = nullptr;
  const Place* place_ = nullptr;
  std::span<std::byte> heap_;
};

// Chunks are those of the call, from 0.
class SegmentSteps {
 public:
  // Less is packed: a copy costs less than the wait until all have read what was lent.
  static constexpr std::size_t kMinLent = 16384;
  static constexpr std::size_t kBlockBytes = 16384;  // a part of the first-level cache for each result

  explicit SegmentSteps(const SegmentCall& call)
      : call_(call),
        readers_(std::make_shared<const std::vector<int>>(call.group.members)),
        heap_(call.segment.heap()),
        views_(call.group.members.size()) {}

  const Group& group() const { return call_.group; }
  int me() const { return call_.group.me; }
  std::byte* Slot(std::uint64_t chunk) const {
    return call_.slots.Slot(call_.segment.rank(), call_.first_chunk + chunk);
  }
  Result Acquire(std::uint64_t chunk) {
    RONDE_RETURN_IF_ERROR(call_.slots.Acquire(call_.first_chunk + chunk, readers_, WaitLimit()));
    // A small operation saves this reading: its slot is free, unless the ring is short.
    if (chunk > 0) Spent(call_.phases, Phase::kNetwork);
    doing_ = Phase::kPack;
    OwnPlace(chunk).extents = 0;
    return Ok();
  }
  // Has an acquired chunk stay where it is, if all of [begin, end) of the stream's inputs lies in this rank's heap.
  // With `results` the neighbours write their shards of the result there, so the outputs must be the same memory.
  bool Lend(std::uint64_t chunk, const Stream& stream, std::size_t begin, std::size_t end, bool results) {
    if (heap_ == nullptr || std::min(end, stream.bytes()) < begin + kMinLent) return false;
    Place& place = OwnPlace(chunk);
    std::size_t extents = 0;
    bool all = true;
    stream.ForRange(begin, end, [&](const Piece& piece, std::size_t) {
      auto offset =
          all && (!results || piece.output == piece.input) ? heap_->Find(piece.input, piece.bytes) : std::nullopt;
      Extent* last = extents > 0 ? &place.extent[extents - 1] : nullptr;
      if (offset && last && last->offset + last->bytes == *offset) {
        last->bytes += piece.bytes;
      } else if (offset && extents < Place::kMaxExtents) {
        place.extent[extents++] = {*offset, piece.bytes};
      } else {
        all = false;
      }
    });
    if (!all) return false;
    place.extents = extents;
    lent_ = true;
    if (call_.phases != nullptr) call_.phases->Lent(std::min(end, stream.bytes()) - begin);
    return true;
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
  // All counters pass the operation's last chunk, whatever stages it used. Memory that was lent is its owner's again
  // when everybody has read it. Who read it waits too: should its owner fail meanwhile, nobody's operation ends well.
  Result Finish(std::uint64_t chunks) {
    for (auto stage : {Segment::kPacked, Segment::kReduced, Segment::kConsumed}) {
      call_.segment.Publish(stage, call_.first_chunk + chunks);
    }
    Spent(call_.phases, doing_);
    return lent_ ? AwaitOthers(Segment::kConsumed, chunks - 1) : Ok();
  }

  // A neighbour's chunk, packed and awaited.
  Expected<ChunkView> View(int member, std::uint64_t chunk) {
    const int rank = group().members[member];
    const std::uint64_t number = call_.first_chunk + chunk;
    ChunkView view(call_.slots.Slot(rank, number), call_.slots.PlaceOf(rank, number), call_.segment.PeerHeap(rank));
    if (!view.Makes()) return Nonsense(member);
    lent_ |= view.lent();
    return view;
  }

  // Gives the neighbours [begin, end) of the inputs as an acquired chunk.
  void Bring(std::uint64_t chunk, const Stream& stream, std::size_t begin, std::size_t end) {
    if (!Lend(chunk, stream, begin, end, /*results=*/false)) Pack(stream, begin, end, Slot(chunk));
  }
  // What the time from now to the next Publish or wait goes into, where it is not copying.
  void Doing(Phase phase) { doing_ = phase; }
  // Copies [begin, end) of the inputs to `to`.
  static void Pack(const Stream& stream, std::size_t begin, std::size_t end, std::byte* to) {
    stream.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
      if (piece.input != nullptr) math::Copy(to + offset, piece.input, piece.bytes);
    });
  }
  // Copies a neighbour's chunk, from `at` on, to [begin, end) of the outputs.
  Result Unpack(int member, std::uint64_t chunk, std::size_t at, const Stream& stream, std::size_t begin,
                std::size_t end) {
    auto view = View(member, chunk);
    if (!view.ok()) return view.error();
    bool whole = true;
    stream.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
      for (std::size_t done = 0; done < piece.bytes && piece.output != nullptr && whole;) {
        std::size_t run = piece.bytes - done;
        const std::byte* from = view->At(at + offset + done, &run);
        whole = run > 0;
        math::Copy(piece.output + done, from, run);
        done += run;
      }
    });
    return whole ? Ok() : Nonsense(member);
  }
  static void CopyAcross(const Stream& stream) {
    stream.ForRange(0, stream.bytes(), [](const Piece& piece, std::size_t) {
      if (piece.input && piece.output && piece.input != piece.output) {
        math::Copy(piece.output, piece.input, piece.bytes);
      }
    });
  }
  // Looks at all members' chunk, packed and awaited, before the shards of it are reduced.
  Result ViewAll(std::uint64_t chunk) {
    for (int m = 0; m < group().size(); ++m) {
      if (m == me()) continue;
      auto view = View(m, chunk);
      if (!view.ok()) return view.error();
      views_[m] = view.value();
    }
    return Ok();
  }
  // Of the chunk viewed last.
  bool AllOthersLent() const {
    for (int m = 0; m < group().size(); ++m) {
      if (m != me() && !views_[m].lent()) return false;
    }
    return true;
  }
  // Reduces [begin, end) of all members' data (of the chunk viewed last) into the own output, into what members have
  // lent, and into the own slot if some member will look for it there: `also` is null if this rank has lent the chunk.
  // A neighbour's bytes for `begin` are its chunk's from `at` on.
  Result Reduce(const math::ReduceSpec& spec, std::size_t at, const Stream& own, std::size_t begin, std::size_t end,
                std::byte* also) {
    doing_ = Phase::kReduce;
    const std::size_t element = Info(spec.dtype).size;
    auto packed = [&](int m) { return m != me() && !views_[m].lent(); };
    bool wanted = false;
    for (int m = 0; m < group().size(); ++m) wanted |= packed(m);
    int broken = -1;
    own.ForRange(begin, end, [&](const Piece& piece, std::size_t offset) {
      for (std::size_t done = 0; done < piece.bytes && broken < 0;) {
        std::size_t run = piece.bytes - done;
        sources_.clear();
        results_.clear();
        if (piece.output) results_.push_back(piece.output + done);
        if (also && wanted) results_.push_back(also + offset + done);
        for (int m = 0; m < group().size() && broken < 0; ++m) {
          std::byte* data = m == me() ? nullptr : views_[m].At(at + offset + done, &run);
          if (run < element) broken = m;
          if (data && views_[m].lent()) results_.push_back(data);
          if (group().Contributes(m)) sources_.push_back(m == me() ? piece.input + done : data);
        }
        if (broken < 0 && !results_.empty()) ReduceRun(spec, run / element);
        done += run;
      }
    });
    return broken < 0 ? Ok() : Nonsense(broken);
  }

 private:
  // Right after a Publish, which has settled what the time before went into.
  Result AwaitAtOnce(int member, Segment::Stage stage, std::uint64_t chunk) {
    Result result = call_.segment.Await(group().members[member], stage, call_.first_chunk + chunk + 1, WaitLimit());
    Spent(call_.phases, Phase::kNetwork);
    doing_ = Phase::kUnpack;  // unless Acquire or Reduce says otherwise
    return result;
  }
  Deadline WaitLimit() const { return call_.wait_seconds > 0 ? After(call_.wait_seconds) : Deadline::max(); }
  Place& OwnPlace(std::uint64_t chunk) const {
    return call_.slots.PlaceOf(call_.segment.rank(), call_.first_chunk + chunk);
  }
  // sources_ to results_. The kernels write two; more are copies, made while the bytes are in the nearest cache.
  void ReduceRun(const math::ReduceSpec& spec, std::size_t count) {
    if (results_.size() == 1) return math::Reduce(spec, sources_, results_[0], nullptr, count);
    if (results_.size() == 2) return math::Reduce(spec, sources_, results_[0], results_[1], count);
    const std::size_t element = Info(spec.dtype).size, block = kBlockBytes / element;
    for (std::size_t done = 0; done < count; done += block) {
      const std::size_t now = std::min(block, count - done);
      math::Reduce(spec, sources_, results_[0], results_[1], now);
      for (std::size_t r = 2; r < results_.size(); ++r) math::Copy(results_[r], results_[0], now * element);
      for (auto& source : sources_) source = static_cast<const std::byte*>(source) + now * element;
      for (auto& result : results_) result += now * element;
    }
  }
  Result Nonsense(int member) const {
    return Result(Code::kTransport,
                  "rank " + std::to_string(group().members[member]) + " lent memory that it does not have");
  }

  const SegmentCall& call_;
  const std::shared_ptr<const std::vector<int>> readers_;
  const std::shared_ptr<SharedHeap> heap_;
  std::vector<ChunkView> views_;  // by member, of the chunk being reduced
  std::vector<const void*> sources_;
  std::vector<std::byte*> results_;
  Phase doing_ = Phase::kPack;  // what the time goes into until the next Publish or wait
  bool lent_ = false;           // this rank has lent a chunk, or looked at one that was lent
};

}  // namespace ronde
