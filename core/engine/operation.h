// One submitted operation: what was asked, where results go, and its end. Shared by the submitter (through a handle)
// and the engine; the memory that its pointers name is borrowed from the submitter until the operation has ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "wire/definition.h"

namespace ronde {

struct TensorRequest {
  std::string name;
  const void* input = nullptr;
  void* output = nullptr;  // null: from `allocate`, else memory owned by the operation
  DType dtype = DType::kFloat32;
  Shape shape;
};

struct Request {
  Op op = Op::kAllreduce;
  Reduction reduction = Reduction::kSum;
  double prescale = 1;
  double postscale = 1;
  int root = 0;
  SetId set = kGlobalSet;
  int device = -1;
  std::string name;  // empty: unnamed
  std::vector<TensorRequest> tensors;
  std::vector<std::int64_t> splits;  // alltoall: rows to each member, tensor after tensor; empty: even
  std::vector<int> ranks;            // AddProcessSet, RemoveProcessSet
  bool caller_waits = false;         // though not in Wait: see RONDE_CALLER_WAITS
  std::function<void*(std::uint32_t tensor, const Shape& shape)> allocate;
  std::function<void(const Result&)> done;
};

class Operation {
 public:
  struct Output {
    void* data = nullptr;
    Shape shape;
    std::unique_ptr<std::byte[]> owned;
    std::vector<std::int64_t> received_splits;  // alltoall
  };

  explicit Operation(Request request) : request_(std::move(request)) {}

  // Constant while the operation runs.
  const Request& request() const { return request_; }
  Request& mutable_request() { return request_; }  // before submission only

  // Set at submission: in ticks, and for a timeline as a time (else the epoch).
  std::int64_t submitted_ticks = 0;
  TimePoint submitted;

  // Written by the engine before Complete, read after done() returned true.
  std::vector<Output> outputs;
  std::int64_t value = 0;
  bool flag = false;

  // Ends the operation. Called exactly once, with no lock held.
  void Complete(const Result& result);

  bool done() const { return done_.load(std::memory_order_acquire); }
  const Result& result() const { return result_; }  // after done()
  // Yields briefly, then sleeps. False: the deadline passed first.
  bool Wait(Deadline deadline);

 private:
  Request request_;
  Result result_;  // written before done_
  std::atomic<bool> done_{false};
  std::mutex mutex_;  // guards sleepers_ and the sleep of Wait
  std::condition_variable ended_;
  int sleepers_ = 0;
};

}  // namespace ronde
