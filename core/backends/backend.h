// Runs one fused operation on one kind of memory. The engine takes the first backend that supports the row.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "base/types.h"
#include "collectives/phases.h"

namespace ronde {

constexpr int kHostDevice = -1;  // the device number of host memory

// One tensor of a fused operation, on this rank. A rank that joined has null pointers: it contributes the neutral
// element (allreduce, reducescatter), no rows (allgather, alltoall) and drops results.
struct FusedTensor {
  const void* input = nullptr;  // borrowed until done; may equal output
  void* output = nullptr;       // borrowed until done; large enough for the result, allocated by the engine beforehand
  Shape shape;  // this rank's input shape (a joined rank's: the definition's, first dimension 0 if ragged)
  // Allgather: rows of each member, in member order. Alltoall: splits[s * members + d] = rows from member s to d.
  std::vector<std::int64_t> rows;
};

// Equal on all members but for the pointers and the shapes of ragged operations.
struct FusedOperation {
  Op op = Op::kAllreduce;
  DType dtype = DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  double prescale = 1;
  double postscale = 1;
  int device = kHostDevice;
  std::vector<int> members;  // job ranks of the process set, ascending
  std::vector<bool> joined;  // by member: contributes the neutral element
  int root = 0;              // job rank; broadcast
  std::vector<FusedTensor> tensors;
  // Chunk number at which this operation starts, in bytes of stream: see Backend::Chunks. Set by the engine.
  std::uint64_t first_chunk = 0;
  // Where Run says what its time went into; borrowed until done. Null: nobody asks.
  PhaseTimes* phases = nullptr;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual bool Supports(Op op, DType dtype, int device) const = 0;
  // How many chunk numbers the operation takes: a pure function of what is equal on all ranks of the job, so that ranks
  // outside the process set count the same (they call this with null pointers and never Run).
  virtual std::uint64_t Chunks(const FusedOperation& operation) const = 0;
  // Called on the executor thread, one operation at a time, in Go order. `done` fires exactly once, possibly before Run
  // returns.
  virtual void Run(const FusedOperation& operation, std::function<void(Result)> done) = 0;
  // Any thread: the running operation and all later ones end with this error.
  virtual void Abort(const Result& cause) = 0;
};

}  // namespace ronde
