// Runs batches in their order on a thread of its own: plans fusion, finds output memory, calls the backend, ends the
// operations.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backends/backend.h"
#include "base/log.h"
#include "engine/metrics.h"
#include "engine/operation.h"
#include "engine/timeline.h"
#include "negotiation/fusion.h"

namespace ronde {

// A batch with all that this rank needs to run it.
struct Job {
  Batch batch;
  std::shared_ptr<const std::vector<int>> members;     // of the batch's set, ascending
  std::vector<std::shared_ptr<Operation>> operations;  // by entry; null where nothing was submitted here
  std::int64_t committed_ticks = 0;
  TimePoint committed;  // while a timeline is open
};

class Executor {
 public:
  struct Config {
    int rank = 0;
    FusionLimits limits;
    std::vector<std::unique_ptr<Backend>>* backends = nullptr;  // owned by the engine, outlives the executor
    std::uint64_t first_chunk = 0;                              // tests start near 2^32
    // Called on the executor thread after the last operation of a batch has ended.
    std::function<void(SetId set, std::uint64_t number)> finished;
    // A backend failed: ranks may now disagree about what ran, so the engine must abort.
    std::function<void(const Result&)> failed;
    ExecutionCounters* counters = nullptr;  // as the backends: owned by the engine
    Timeline* timeline = nullptr;
  };

  explicit Executor(Config config);
  ~Executor();  // runs out the queue, then ends the thread

  // Takes the job, and puts an empty one in its place, with memory of one that has run. `wake` false: the caller calls
  // TryRunOne right away.
  void Push(Job* job, bool wake = true);
  // Runs the next job in the calling thread, if one waits and none runs: a user's thread that waits anyway saves the
  // way through the executor's thread.
  void TryRunOne();
  // Any thread: every queued and later job ends with the cause, the running one as soon as its waits notice.
  void Abort(const Result& cause);
  // False: the deadline passed with jobs still running.
  bool WaitIdle(Deadline deadline);

 private:
  void Main();
  bool Pop(Job* job);
  void Take(Job* job);    // the next job; mutex_ is held
  void Finish(Job* job);  // one taken; nothing is left of it but memory
  void Run(Job& job);
  void RunList(Job& job, const std::vector<PlannedTensor>& list);
  void Prepare(Job& job, const PlannedTensor& planned, int member, FusedTensor* prepared);
  void End(Job& job, std::size_t entry, const Result& result);
  // Adds a list that ran to the counters and, from `start` on, to the timeline if that is open.
  void Record(const Job& job, const std::vector<PlannedTensor>& list, const FusedOperation& fused,
              std::int64_t start_ticks, TimePoint start, const PhaseTimes& phases, bool failed);
  Result abort_cause();

  Config config_;
  // Owned by whoever runs a job (running_).
  std::uint64_t next_chunk_;
  std::vector<int> open_tensors_;                      // of the running job, by entry: tensors not yet run
  std::vector<bool> starved_;                          // ... the user gave no memory for an output
  FusedOperation fused_;                               // the running list, or the last one, for its memory
  std::vector<std::unique_ptr<std::byte[]>> scratch_;  // stands in for memory a user did not give
  std::atomic<int> pending_{0};                        // queued jobs, for polling without the mutex

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<Job> queue_;
  std::vector<Job> spare_;  // empty ones
  bool running_ = false;
  int idle_waiters_ = 0;
  bool stop_ = false;
  bool sleeping_ = false;
  Result abort_;
  std::thread thread_;  // last: starts when all else is ready
};

}  // namespace ronde
