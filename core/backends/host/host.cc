#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "backends/host/factory.h"
#include "collectives/adasum.h"
#include "collectives/segment_collectives.h"
#include "collectives/transport_collectives.h"
#include "math/math.h"

namespace ronde {
namespace {

// Plain IEEE arithmetic on a borrowed thread: frameworks flush denormals on theirs. Restores what it found.
class PlainArithmetic {
 public:
#if defined(__SSE__)
  PlainArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

std::size_t RowBytes(const FusedOperation& operation, const FusedTensor& tensor) {
  return static_cast<std::size_t>(RowElements(tensor.shape)) * Info(operation.dtype).size;
}
std::size_t TensorBytes(const FusedOperation& operation, const FusedTensor& tensor) {
  return static_cast<std::size_t>(NumElements(tensor.shape)) * Info(operation.dtype).size;
}
// Null stays null, whatever the offset.
const void* At(const void* base, std::size_t offset) {
  return base ? static_cast<const std::byte*>(base) + offset : nullptr;
}
void* At(void* base, std::size_t offset) { return base ? static_cast<std::byte*>(base) + offset : nullptr; }

// Rows of a reducescatter's member: as even as possible, the first ones get one more.
struct Rows {
  std::size_t begin, count;
};
Rows RowsOf(std::int64_t total, std::size_t member, std::size_t members) {
  auto all = static_cast<std::size_t>(total);
  std::size_t base = all / members, rest = all % members;
  return {member * base + std::min(member, rest), base + (member < rest ? 1 : 0)};
}

Stream Whole(const FusedOperation& operation) {
  Stream stream;
  for (const auto& t : operation.tensors) stream.Add(t.input, t.output, TensorBytes(operation, t));
  return stream;
}

bool IsAdasum(const FusedOperation& operation) {
  return operation.op == Op::kAllreduce && operation.reduction == Reduction::kAdasum;
}
std::vector<Piece> EachTensor(const FusedOperation& operation) {
  std::vector<Piece> pieces;
  for (const auto& t : operation.tensors) {
    pieces.push_back(
        {static_cast<const std::byte*>(t.input), static_cast<std::byte*>(t.output), TensorBytes(operation, t)});
  }
  return pieces;
}

std::vector<Stream> GatherStreams(const FusedOperation& operation, int me) {
  const std::size_t members = operation.members.size();
  std::vector<Stream> streams(members);
  for (const auto& t : operation.tensors) {
    std::size_t row = RowBytes(operation, t), offset = 0;
    for (std::size_t m = 0; m < members; ++m) {
      std::size_t bytes = static_cast<std::size_t>(t.rows[m]) * row;
      streams[m].Add(static_cast<int>(m) == me ? t.input : nullptr, At(t.output, offset), bytes);
      offset += bytes;
    }
  }
  return streams;
}

std::vector<Stream> ShardStreams(const FusedOperation& operation, int me) {
  const std::size_t members = operation.members.size();
  std::vector<Stream> streams(members);
  for (const auto& t : operation.tensors) {
    std::size_t row = RowBytes(operation, t);
    for (std::size_t m = 0; m < members; ++m) {
      Rows rows = RowsOf(t.shape[0], m, members);
      streams[m].Add(At(t.input, rows.begin * row), static_cast<int>(m) == me ? t.output : nullptr, rows.count * row);
    }
  }
  return streams;
}

// Bytes of this rank's result.
std::size_t OutputBytes(const FusedOperation& operation, const FusedTensor& tensor, std::size_t me) {
  const std::size_t members = operation.members.size(), row = RowBytes(operation, tensor);
  std::int64_t rows = 0;
  switch (operation.op) {
    case Op::kAllgather: rows = std::accumulate(tensor.rows.begin(), tensor.rows.end(), std::int64_t{0}); break;
    case Op::kAlltoall:
      for (std::size_t s = 0; s < members; ++s) rows += tensor.rows[s * members + me];
      break;
    case Op::kReducescatter: return RowsOf(tensor.shape[0], me, members).count * row;
    default: return TensorBytes(operation, tensor);
  }
  return static_cast<std::size_t>(rows) * row;
}

// An output may be its input's memory. Where results arrive before all of the input is read, elsewhere than it lay, the
// input is copied first.
class InputCopies {
 public:
  InputCopies(const FusedOperation& operation, int me) : original_(operation) {
    if (operation.op == Op::kAllreduce || operation.op == Op::kBroadcast) return;
    for (std::size_t i = 0; i < operation.tensors.size(); ++i) {
      const FusedTensor& t = operation.tensors[i];
      const std::size_t in = TensorBytes(operation, t), out = OutputBytes(operation, t, static_cast<std::size_t>(me));
      auto from = reinterpret_cast<std::uintptr_t>(t.input), to = reinterpret_cast<std::uintptr_t>(t.output);
      if (in == 0 || out == 0 || from == 0 || to == 0 || from + in <= to || to + out <= from) continue;
      memory_.emplace_back(new std::byte[in]);
      math::Copy(memory_.back().get(), t.input, in);
      if (!changed_) changed_ = operation;
      changed_->tensors[i].input = memory_.back().get();
    }
  }
  InputCopies(const InputCopies&) = delete;
  const FusedOperation& operation() const { return changed_ ? *changed_ : original_; }

 private:
  const FusedOperation& original_;
  std::optional<FusedOperation> changed_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

class HostBackend final : public Backend {
 public:
  explicit HostBackend(const HostBackendConfig& config) : config_(config) {
    // Pieces of chunks begin at cache lines, whatever the element type.
    config_.chunk_bytes = std::max<std::size_t>(config_.chunk_bytes / 64 * 64, 64);
    if (config_.segment != nullptr) slots_.emplace(*config_.segment, config_.chunk_bytes);
  }

  bool Supports(Op op, DType, int device) const override { return device == kHostDevice && Info(op).tensors; }

  std::uint64_t Chunks(const FusedOperation& operation) const override {
    const std::size_t members = operation.members.size();
    if (members == 0) return 1;  // a removed set
    const std::size_t chunk = config_.chunk_bytes;
    if (IsAdasum(operation)) {
      const auto joined = std::count(operation.joined.begin(), operation.joined.end(), true);
      const int size = static_cast<int>(members);
      return AdasumChunks(EachTensor(operation), operation.dtype, size, size - static_cast<int>(joined), chunk);
    }
    switch (operation.op) {
      case Op::kAllgather: {
        std::size_t longest = 0;
        for (std::size_t m = 0; m < members; ++m) {
          std::size_t bytes = 0;
          for (const auto& t : operation.tensors) bytes += static_cast<std::size_t>(t.rows[m]) * RowBytes(operation, t);
          longest = std::max(longest, bytes);
        }
        return ChunksOf(longest, chunk);
      }
      case Op::kAlltoall: return ChunksOf(LongestSent(operation), chunk);
      case Op::kReducescatter: {
        std::size_t largest = 0;  // member 0 has the most rows of every tensor
        for (const auto& t : operation.tensors) {
          largest += RowsOf(t.shape[0], 0, members).count * RowBytes(operation, t);
        }
        return ReducescatterChunks(largest, chunk, static_cast<int>(members));
      }
      default: {
        std::size_t bytes = 0;
        for (const auto& t : operation.tensors) bytes += TensorBytes(operation, t);
        return ChunksOf(bytes, chunk);
      }
    }
  }

  void Run(const FusedOperation& operation, std::function<void(Result)> done) override {
    Result cause;
    {
      std::lock_guard lock(mutex_);
      cause = abort_;
      running_ = cause.ok();
    }
    if (cause.ok()) {
      PlainArithmetic plain;
      cause = RunNow(operation);
      if (config_.segment != nullptr) Leave(operation, cause);
    }
    done(cause);
  }

  void Abort(const Result& cause) override {
    {
      std::lock_guard lock(mutex_);
      if (abort_.ok()) abort_ = cause;
    }
    if (config_.segment != nullptr) {
      config_.segment->Abort(cause);
      std::lock_guard lock(mutex_);
      if (!running_) config_.segment->Leave();
    }
    if (config_.transport != nullptr) config_.transport->Abort(cause);
  }

 private:
  // The end of a run. After a failure nothing runs any more. Memory that the operation may have lent goes back to its
  // owner only when the neighbours do not touch it any more, or were given enough time: some may be dead or stopped.
  void Leave(const FusedOperation& operation, const Result& result) {
    {
      std::lock_guard lock(mutex_);
      running_ = false;
      if (!result.ok() || !abort_.ok()) config_.segment->Leave();
    }
    if (result.ok()) return;
    auto heap = config_.segment->heap();
    const bool lent = heap && std::any_of(operation.tensors.begin(), operation.tensors.end(),
                                          [&](const auto& tensor) { return heap->Find(tensor.input, 1).has_value(); });
    if (!lent) return;
    const Deadline deadline = After(config_.leave_seconds);
    const std::uint64_t end = operation.first_chunk + Chunks(operation);
    for (int rank : config_.segment->ranks()) {
      if (std::find(operation.members.begin(), operation.members.end(), rank) == operation.members.end()) continue;
      if (rank != config_.segment->rank()) (void)config_.segment->AwaitLeft(rank, end, deadline);
    }
  }

  static std::size_t LongestSent(const FusedOperation& operation) {
    const std::size_t members = operation.members.size();
    std::size_t longest = 0;
    for (const auto& t : operation.tensors) {
      for (std::size_t s = 0; s < members; ++s) {
        std::size_t rows = 0;
        for (std::size_t d = 0; d < members; ++d) rows += static_cast<std::size_t>(t.rows[s * members + d]);
        longest = std::max(longest, rows * RowBytes(operation, t));
      }
    }
    return longest;
  }

  bool InSegment(const std::vector<int>& members, int* rank) const {
    if (config_.segment == nullptr) return false;
    *rank = config_.segment->rank();
    const auto& ranks = config_.segment->ranks();
    return std::includes(ranks.begin(), ranks.end(), members.begin(), members.end());
  }

  Result RunNow(const FusedOperation& operation) {
    Group group;
    group.members = operation.members;
    group.joined = operation.joined;
    int rank = 0;
    const bool shared = InSegment(operation.members, &rank);
    if (!shared && config_.transport != nullptr) rank = config_.transport->rank();
    auto here = std::find(group.members.begin(), group.members.end(), rank);
    if (group.size() > 1 && !shared && config_.transport == nullptr) {
      return Result(Code::kInternal, "the host backend has neither memory nor a transport that all members share");
    }
    group.me = group.size() == 1 ? 0 : static_cast<int>(here - group.members.begin());

    math::ReduceSpec spec;
    spec.reduction = operation.reduction;
    spec.dtype = operation.dtype;
    spec.prescale = operation.prescale;
    spec.postscale = operation.postscale;
    spec.divisor = group.size();
    if (Info(operation.op).reduces) RONDE_RETURN_IF_ERROR(math::CheckReduction(spec.reduction, spec.dtype));
    if (group.size() == 1) return Alone(operation, spec);
    const InputCopies copies(operation, group.me);
    const FusedOperation& safe = copies.operation();
    if (!shared) {
      return RunOn(
          TransportCall{*config_.transport, operation.first_chunk << 8, group, config_.wait_seconds, safe.phases}, safe,
          group, spec);
    }
    if (slots_->slots() < SlotRing::kMinSlots) {
      return Result(Code::kArgument, "RONDE_RING_BYTES (" + std::to_string(config_.segment->ring_bytes()) +
                                         ") must hold at least " + std::to_string(SlotRing::kMinSlots) +
                                         " chunks of RONDE_CHUNK_BYTES (" + std::to_string(config_.chunk_bytes) +
                                         "), each with " + std::to_string(sizeof(Place)) + " bytes more");
    }
    return RunOn(
        SegmentCall{*config_.segment, *slots_, operation.first_chunk, group, config_.wait_seconds, safe.phases}, safe,
        group, spec);
  }

  // One member: scales apply, nothing moves.
  static Result Alone(const FusedOperation& operation, math::ReduceSpec spec) {
    if (spec.reduction == Reduction::kAdasum) spec.reduction = Reduction::kSum;
    for (const auto& t : operation.tensors) {
      if (t.input == nullptr || t.output == nullptr) continue;
      std::size_t bytes = TensorBytes(operation, t);
      if (Info(operation.op).reduces) {
        const void* source[] = {t.input};
        math::Reduce(spec, source, t.output, nullptr, bytes / Info(operation.dtype).size);
      } else if (t.input != t.output) {
        math::Copy(t.output, t.input, bytes);
      }
    }
    return Ok();
  }

  template <class Call>
  Result RunOn(const Call& call, const FusedOperation& operation, const Group& group, const math::ReduceSpec& spec) {
    switch (operation.op) {
      case Op::kAllreduce:
        return IsAdasum(operation) ? Adasum(call, spec, EachTensor(operation))
                                   : Allreduce(call, spec, Whole(operation));
      case Op::kBroadcast: {
        auto root = std::find(group.members.begin(), group.members.end(), operation.root);
        return Broadcast(call, static_cast<int>(root - group.members.begin()), Whole(operation));
      }
      case Op::kAllgather: return Allgather(call, GatherStreams(operation, group.me));
      case Op::kReducescatter: return Reducescatter(call, spec, ShardStreams(operation, group.me));
      case Op::kAlltoall: return Exchange(call, operation, group);
      default: return Result(Code::kInternal, "not an operation of the host backend");
    }
  }

  // Alltoall is never fused, so there is one tensor.
  template <class Call>
  Result Exchange(const Call& call, const FusedOperation& operation, const Group& group) {
    const FusedTensor& t = operation.tensors.front();
    const std::size_t members = group.members.size(), me = static_cast<std::size_t>(group.me);
    const std::size_t row = RowBytes(operation, t);
    std::vector<Stream> sent(members), received(members);
    std::vector<std::size_t> offsets(members);
    std::size_t out = 0, in = 0;
    for (std::size_t m = 0; m < members; ++m) {
      std::size_t to = static_cast<std::size_t>(t.rows[me * members + m]) * row;
      sent[m].Add(At(t.input, out), nullptr, to);
      out += to;
      std::size_t from = static_cast<std::size_t>(t.rows[m * members + me]) * row;
      received[m].Add(nullptr, At(t.output, in), from);
      in += from;
      for (std::size_t d = 0; d < me; ++d) offsets[m] += static_cast<std::size_t>(t.rows[m * members + d]) * row;
    }
    if constexpr (std::is_same_v<Call, SegmentCall>) {
      Stream all;
      all.Add(t.input, nullptr, out);
      return Alltoall(call, all, received, offsets, LongestSent(operation));
    } else {
      return Alltoall(call, sent, received);
    }
  }

  HostBackendConfig config_;
  std::optional<SlotRing> slots_;
  std::mutex mutex_;  // guards abort_ and running_
  Result abort_;
  bool running_ = false;
};

}  // namespace

std::unique_ptr<Backend> CreateHostBackend(const HostBackendConfig& config) {
  return std::make_unique<HostBackend>(config);
}

}  // namespace ronde
