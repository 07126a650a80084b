#include "engine/operation.h"

#include <sched.h>

namespace ronde {
namespace {
// Long enough for a small operation between ranks that each have a core, short enough not to be noticed.
constexpr int kYields = 100;
}  // namespace

void Operation::Complete(const Result& result) {
  // Moved out, so that what the callback captured is gone with it.
  auto callback = std::move(request_.done);
  result_ = result;
  {
    std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    if (sleepers_ > 0) ended_.notify_all();
  }
  if (callback) callback(result);
}

bool Operation::Wait(Deadline deadline) {
  for (int i = 0; i < kYields; ++i) {
    if (done()) return true;
    sched_yield();
  }
  std::unique_lock lock(mutex_);
  ++sleepers_;
  auto ended = [this] { return done_.load(std::memory_order_relaxed); };
  bool result = true;
  if (deadline == Deadline::max()) {
    ended_.wait(lock, ended);  // no limit of its own: the engine ends every operation, by its stall and peer limits
  } else {
    result = ended_.wait_until(lock, deadline, ended);
  }
  --sleepers_;
  return result;
}

}  // namespace ronde
