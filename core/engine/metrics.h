// What one engine has done since it was made.
//
// Counters are always on, so they cost next to nothing: each is written by one thread at a time (whoever runs a job, or
// whoever drives) and read by any. Times are taken in ticks (base/clock.h) and turned into nanoseconds when asked for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "collectives/phases.h"

namespace ronde {

// One writer at a time, who hands over through a lock; any number of readers.
class Counter {
 public:
  void Add(std::int64_t amount) {
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  std::int64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> value_{0};
};

// Kept by the executor.
struct ExecutionCounters {
  struct PerOp {
    Counter operations;  // of this rank's, ended
    Counter tensors;     // run, those of a rank that joined included
    Counter lists;       // fused operations run
    Counter bytes;       // of this rank's inputs
    Counter lent;        // of these, reached by the neighbours where they lay
  };
  std::array<PerOp, std::size(kOps)> by_op;
  Counter batches;
  Counter failed;  // operations that ended with an error in their batch
  // In ticks. The first two are summed over operations, whose spans overlap; the others over lists, which run one by
  // one. `run` is all of a list's time, also what no phase accounts for.
  Counter negotiate;  // from the submission to the commit
  Counter queue;      // from there to the start of the operation's first list
  Counter run;
  std::array<Counter, kPhases> phases;
};

// Turns ticks into nanoseconds by what both clocks say since it was made.
class TickScale {
 public:
  double NanosecondsPerTick() const;

 private:
  TimePoint start_ = Now();
  std::int64_t start_ticks_ = Ticks();
};

// By name; a dot leads into a group: "bytes", "nanoseconds.pack", "ops.allreduce.bytes".
using MetricRows = std::vector<std::pair<std::string, std::int64_t>>;
void AddRows(const ExecutionCounters& counters, double nanoseconds_per_tick, MetricRows* rows);

}  // namespace ronde
