// Waiting between processes: a waiter yields a few times, registers in the word's sleeper count and sleeps on a futex
// in the shared page; the publisher stores first and looks for sleepers second (both sequentially consistent), so one
// of the two always sees the other.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <mutex>
#include <thread>

#include "transport/segment_wait.h"
#include "transport/shm/group.h"

namespace ronde {
namespace {

constexpr int kSpins = 2000;
constexpr int kYields = 20;
// An abort cannot wake a thread that is about to sleep on a peer's word without a lock that spans processes, so sleeps
// are cut into slices of this length. Waits this long are rare: a slice costs nothing then.
constexpr auto kSlice = std::chrono::milliseconds(20);
// How often a rank that lost its job looks whether its neighbours are done with its memory.
constexpr auto kLeftPause = std::chrono::microseconds(200);

// The word that a futex sleeps on: the low half of the count.
std::uint32_t* FutexWord(ShmCounter& counter) {
  auto* word = reinterpret_cast<std::uint32_t*>(&counter.count);
  return word + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 1 : 0);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class ShmSegment final : public Segment {
 public:
  explicit ShmSegment(std::shared_ptr<const ShmGroup> group) : group_(std::move(group)) {}

  const std::shared_ptr<const ShmGroup>& group() const { return group_; }
  const std::vector<int>& ranks() const override { return group_->ranks(); }
  int rank() const override { return group_->rank(); }
  std::size_t ring_bytes() const override { return group_->config().ring_bytes; }
  std::byte* Peer(int rank) const override { return group_->Of(rank).ring(); }

  void Publish(Stage stage, std::uint64_t count) override {
    ShmCounter& counter = group_->Of(rank()).header().counters[stage];
    counter.count.exchange(count);
    if (counter.sleepers.load() != 0) {
      syscall(SYS_futex, FutexWord(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  Result Await(int peer, Stage stage, std::uint64_t count, Deadline deadline) override {
    ShmCounter& counter = group_->Of(peer).header().counters[stage];
    auto reached = [&] { return counter.count.load(std::memory_order_acquire) >= count; };
    if (reached()) return Ok();
    for (int i = 0; group_->config().spin && i < kSpins; ++i) {
      Pause();
      if (reached()) return Ok();
    }
    for (int i = 0; i < kYields; ++i) {
      sched_yield();
      if (reached()) return Ok();
    }
    counter.sleepers.fetch_add(1);
    Result result = Sleep(counter, peer, stage, count, deadline);
    counter.sleepers.fetch_sub(1);
    return result;
  }

  void Abort(const Result& cause) override {
    std::lock_guard lock(mutex_);
    if (aborted_.load()) return;
    cause_ = cause;
    aborted_.store(true);
    // This rank's waiter sleeps on a neighbour's word; other ranks' waiters there only look once more.
    for (int rank : group_->ranks()) {
      for (ShmCounter& counter : group_->Of(rank).header().counters) {
        syscall(SYS_futex, FutexWord(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
      }
    }
  }

  std::shared_ptr<SharedHeap> heap() const override { return group_->heap(); }
  std::span<std::byte> PeerHeap(int rank) const override { return group_->Of(rank).heap(); }
  void Leave() override { group_->Of(rank()).header().left.store(1); }
  bool AwaitLeft(int peer, std::uint64_t count, Deadline deadline) override {
    ShmHeader& header = group_->Of(peer).header();
    while (header.left.load() == 0 && header.counters[kConsumed].count.load() < count) {
      if (Now() >= deadline) return false;
      std::this_thread::sleep_for(kLeftPause);
    }
    return true;
  }

 private:
  Result Sleep(ShmCounter& counter, int peer, Stage stage, std::uint64_t count, Deadline deadline) {
    while (true) {
      std::uint64_t seen = counter.count.load();
      if (seen >= count) return Ok();
      if (aborted_.load()) {
        std::lock_guard lock(mutex_);
        return cause_;
      }
      TimePoint now = Now();
      if (now >= deadline) return AwaitTimedOut(peer, stage, seen, count);
      auto slice = std::chrono::duration_cast<std::chrono::nanoseconds>(std::min<Duration>(deadline - now, kSlice));
      timespec limit{0, static_cast<long>(slice.count())};
      syscall(SYS_futex, FutexWord(counter), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
    }
  }

  const std::shared_ptr<const ShmGroup> group_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // guards cause_
  Result cause_;
};

}  // namespace

Expected<std::unique_ptr<Segment>> CreateShmSegment(std::shared_ptr<ShmPart> own, const std::vector<int>& ranks,
                                                    const std::vector<int>& descriptors) {
  auto group = std::make_shared<ShmGroup>(std::move(own), ranks);
  RONDE_RETURN_IF_ERROR(group->MapPeers(descriptors));
  return std::unique_ptr<Segment>(std::make_unique<ShmSegment>(std::move(group)));
}

std::shared_ptr<const ShmGroup> GroupOf(const Segment& segment) {
  return static_cast<const ShmSegment&>(segment).group();
}

}  // namespace ronde
