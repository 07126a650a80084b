#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "transport/local/factory.h"
#include "transport/segment_wait.h"

namespace ronde {
namespace {

constexpr int kYields = 40;
constexpr std::size_t kAlign = 4096;  // of rings and heaps
constexpr auto kLeftPause = std::chrono::microseconds(200);

Result PeerGone(int peer) { return Result(Code::kPeerLost, "rank " + std::to_string(peer) + " is gone"); }

// Whether `over` became true before the deadline.
template <class Over>
bool SleepUntil(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Deadline deadline, Over over) {
  if (deadline != Deadline::max()) return changed.wait_until(lock, deadline, over);
  changed.wait(lock, over);
  return true;
}

}  // namespace

class LocalHub {
 public:
  LocalHub(int size, std::size_t ring_bytes, std::size_t heap_bytes)
      : size(size), ring_bytes(ring_bytes), heap_bytes(heap_bytes), ranks(size) {
    for (auto& rank : ranks) {
      rank.memory.reset(new std::byte[ring_bytes + heap_bytes + kAlign]);
      auto address = reinterpret_cast<std::uintptr_t>(rank.memory.get());
      rank.heap_memory = rank.memory.get() + (kAlign - address % kAlign) % kAlign;
      rank.ring = rank.heap_memory + heap_bytes;
      if (heap_bytes > 0) rank.heap.emplace(rank.heap_memory, heap_bytes, nullptr, nullptr);
    }
  }

  struct PerRank {
    // Its mailbox.
    std::deque<Mailbox::Event> events;
    bool rung = false;
    std::condition_variable mail;  // events or rung changed
    // Its transport.
    std::condition_variable transfers;  // one of its transfers is over
    // Its part of the segment.
    std::unique_ptr<std::byte[]> memory;
    std::byte* ring = nullptr;
    std::byte* heap_memory = nullptr;
    std::optional<SharedHeap> heap;
    std::atomic<bool> left{false};
    std::atomic<std::uint64_t> counters[Segment::kNumStages] = {};
    std::atomic<int> sleepers = 0;      // of its peers, on `published`
    std::condition_variable published;  // a counter grew, or somebody's segment was aborted
  };
  struct Transfer {
    const std::byte* from = nullptr;  // of a send
    std::byte* to = nullptr;          // of a receive
    std::size_t size = 0;
    bool done = false;
    Result result;
  };
  using Line = std::tuple<int, int, std::uint64_t>;  // sender, receiver, tag
  using Queues = std::map<Line, std::deque<Transfer*>>;

  const int size;
  const std::size_t ring_bytes;
  const std::size_t heap_bytes;
  std::mutex mutex;  // guards all but rings, heaps, counters, left and sleepers
  std::vector<PerRank> ranks;
  Queues sends, receives;  // those that nothing has answered yet; owned by their transports
  std::set<int> gone;
  std::set<std::pair<int, int>> met;  // lower rank first: mailboxes between which a message went
};

std::shared_ptr<LocalHub> CreateLocalHub(int size, std::size_t ring_bytes, std::size_t heap_bytes) {
  return std::make_shared<LocalHub>(size, ring_bytes, heap_bytes);
}

namespace {

// A connection ends on both sides; what the others sent before stays readable.
void EndConnections(LocalHub& hub, int rank, bool also_unused) {
  std::lock_guard lock(hub.mutex);
  if (!hub.gone.insert(rank).second) return;
  for (auto* queues : {&hub.sends, &hub.receives}) {
    std::erase_if(*queues, [rank](const auto& entry) {
      return std::get<0>(entry.first) == rank || std::get<1>(entry.first) == rank;
    });
  }
  for (int other = 0; other < hub.size; ++other) {
    bool connected = also_unused || hub.met.count(std::minmax(rank, other)) > 0;
    if (other != rank && connected && !hub.gone.count(other)) {
      hub.ranks[other].events.push_back({rank, {}, PeerGone(rank)});
      hub.ranks[rank].events.push_back({other, {}, PeerGone(other)});
    }
    hub.ranks[other].mail.notify_all();
    hub.ranks[other].transfers.notify_all();
  }
}

}  // namespace

void DisconnectLocal(LocalHub& hub, int rank) { EndConnections(hub, rank, /*also_unused=*/true); }

namespace {

class LocalMailbox final : public Mailbox {
 public:
  LocalMailbox(std::shared_ptr<LocalHub> hub, int rank) : hub_(std::move(hub)), rank_(rank), mine_(hub_->ranks[rank]) {}
  // Leaving in peace concerns those it has talked to, its neighbours in the control tree.
  ~LocalMailbox() override { EndConnections(*hub_, rank_, /*also_unused=*/false); }

  void Post(int peer, std::span<const std::byte> message) override {
    std::lock_guard lock(hub_->mutex);
    if (hub_->gone.count(peer) || hub_->gone.count(rank_)) return;
    hub_->met.insert(std::minmax(rank_, peer));
    hub_->ranks[peer].events.push_back({rank_, {message.begin(), message.end()}, {}});
    hub_->ranks[peer].mail.notify_all();
  }
  bool Take(Event* event) override {
    std::lock_guard lock(hub_->mutex);
    if (mine_.events.empty()) return false;
    *event = std::move(mine_.events.front());
    mine_.events.pop_front();
    return true;
  }
  void Wait(Deadline deadline, bool eager) override {
    std::unique_lock lock(hub_->mutex);
    auto ready = [this] { return mine_.rung || !mine_.events.empty(); };
    for (int i = 0; eager && i < kYields && !ready(); ++i) {
      lock.unlock();
      sched_yield();
      lock.lock();
    }
    SleepUntil(mine_.mail, lock, deadline, ready);
    mine_.rung = false;
  }
  void Ring() override {
    std::lock_guard lock(hub_->mutex);
    mine_.rung = true;
    mine_.mail.notify_all();
  }
  Result Flush(Deadline) override { return Ok(); }  // Post has delivered

 private:
  std::shared_ptr<LocalHub> hub_;
  const int rank_;
  LocalHub::PerRank& mine_;
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<LocalHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~LocalTransport() override {
    std::lock_guard lock(hub_->mutex);
    for (auto& [handle, mine] : mine_) Withdraw(mine);
  }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size; }
  Handle Send(int peer, std::uint64_t tag, std::span<const std::byte> data) override {
    auto transfer = std::make_unique<LocalHub::Transfer>();
    transfer->from = data.data();
    transfer->size = data.size();
    return Start({std::move(transfer), {rank_, peer, tag}, peer}, hub_->sends);
  }
  Handle Recv(int peer, std::uint64_t tag, std::span<std::byte> data) override {
    auto transfer = std::make_unique<LocalHub::Transfer>();
    transfer->to = data.data();
    transfer->size = data.size();
    return Start({std::move(transfer), {peer, rank_, tag}, peer}, hub_->receives);
  }
  Result Wait(Handle handle, Deadline deadline) override {
    std::unique_lock lock(hub_->mutex);
    auto found = mine_.find(handle);
    if (found == mine_.end()) return Result(Code::kInternal, "a transfer was waited for twice");
    const Mine& mine = found->second;
    SleepUntil(hub_->ranks[rank_].transfers, lock, deadline,
               [&] { return mine.transfer->done || !abort_.ok() || Cut(mine.peer); });
    Result result;
    if (mine.transfer->done) {
      result = mine.transfer->result;
    } else if (!abort_.ok()) {
      result = abort_;
    } else if (Cut(mine.peer)) {
      result = PeerGone(mine.peer);
    } else {
      result = Result(Code::kTimeout, "rank " + std::to_string(mine.peer) + " did not answer in time");
    }
    Withdraw(mine);
    mine_.erase(found);
    return result;
  }
  void Abort(const Result& cause) override {
    std::lock_guard lock(hub_->mutex);
    if (!abort_.ok()) return;
    abort_ = cause;
    // Nobody waits for these any more, so their memory may go at any time.
    for (auto& [handle, mine] : mine_) Withdraw(mine);
    hub_->ranks[rank_].transfers.notify_all();
  }

 private:
  struct Mine {
    std::unique_ptr<LocalHub::Transfer> transfer;
    LocalHub::Line line;
    int peer;
  };

  bool Cut(int peer) const { return hub_->gone.count(peer) > 0 || hub_->gone.count(rank_) > 0; }

  void Withdraw(const Mine& mine) {
    if (mine.transfer->done) return;
    for (auto* queues : {&hub_->sends, &hub_->receives}) {
      auto queue = queues->find(mine.line);
      if (queue == queues->end()) continue;
      std::erase(queue->second, mine.transfer.get());
      if (queue->second.empty()) queues->erase(queue);
    }
  }

  // Matches it with the longest waiting counterpart, or leaves it in `queues` (the hub's, of its kind).
  Handle Start(Mine mine, LocalHub::Queues& queues) {
    std::lock_guard lock(hub_->mutex);
    LocalHub::Transfer* transfer = mine.transfer.get();
    const LocalHub::Line line = mine.line;
    const int peer = mine.peer;
    mine_.emplace(++last_, std::move(mine));
    if (!abort_.ok() || Cut(peer)) return last_;
    bool is_send = &queues == &hub_->sends;
    LocalHub::Queues& others = is_send ? hub_->receives : hub_->sends;
    auto waiting = others.find(line);
    if (waiting == others.end()) {
      queues[line].push_back(transfer);
      return last_;
    }
    LocalHub::Transfer* other = waiting->second.front();
    waiting->second.pop_front();
    if (waiting->second.empty()) others.erase(waiting);
    Copy(is_send ? *transfer : *other, is_send ? *other : *transfer, std::get<0>(line));
    hub_->ranks[peer].transfers.notify_all();
    return last_;
  }

  static void Copy(LocalHub::Transfer& send, LocalHub::Transfer& receive, int sender) {
    if (send.size != receive.size) {
      receive.result =
          Result(Code::kTransport, "rank " + std::to_string(sender) + " sent " + std::to_string(send.size) +
                                       " bytes where " + std::to_string(receive.size) + " were expected");
    } else if (send.size > 0) {
      std::memcpy(receive.to, send.from, send.size);
    }
    send.done = receive.done = true;
  }

  std::shared_ptr<LocalHub> hub_;
  const int rank_;
  // Guarded by the hub's mutex.
  Handle last_ = 0;
  std::map<Handle, Mine> mine_;
  Result abort_;
};

class LocalSegment final : public Segment {
 public:
  LocalSegment(std::shared_ptr<LocalHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {
    for (int r = 0; r < hub_->size; ++r) ranks_.push_back(r);
  }
  const std::vector<int>& ranks() const override { return ranks_; }
  int rank() const override { return rank_; }
  std::size_t ring_bytes() const override { return hub_->ring_bytes; }
  std::byte* Peer(int rank) const override { return hub_->ranks[rank].ring; }
  // The publisher stores first and looks for sleepers second, a waiter registers first and looks at the counter second
  // (all sequentially consistent), so one of the two always sees the other.
  void Publish(Stage stage, std::uint64_t count) override {
    auto& own = hub_->ranks[rank_];
    own.counters[stage].store(count);
    if (own.sleepers.load() == 0) return;
    std::lock_guard lock(hub_->mutex);  // a waiter that has looked now sleeps
    own.published.notify_all();
  }
  Result Await(int peer, Stage stage, std::uint64_t count, Deadline deadline) override {
    auto& theirs = hub_->ranks[peer];
    auto& counter = theirs.counters[stage];
    for (int i = 0; i < kYields; ++i) {
      if (counter.load(std::memory_order_acquire) >= count) return Ok();
      sched_yield();
    }
    std::unique_lock lock(hub_->mutex);
    theirs.sleepers.fetch_add(1);
    SleepUntil(theirs.published, lock, deadline, [&] { return counter.load() >= count || !abort_.ok(); });
    theirs.sleepers.fetch_sub(1);
    std::uint64_t seen = counter.load();
    if (seen >= count) return Ok();
    if (!abort_.ok()) return abort_;
    return AwaitTimedOut(peer, stage, seen, count);
  }
  void Abort(const Result& cause) override {
    std::lock_guard lock(hub_->mutex);
    if (!abort_.ok()) return;
    abort_ = cause;
    for (auto& peer : hub_->ranks) peer.published.notify_all();
  }
  std::shared_ptr<SharedHeap> heap() const override {
    auto& heap = hub_->ranks[rank_].heap;
    return heap ? std::shared_ptr<SharedHeap>(hub_, &*heap) : nullptr;
  }
  std::span<std::byte> PeerHeap(int rank) const override { return {hub_->ranks[rank].heap_memory, hub_->heap_bytes}; }
  void Leave() override { hub_->ranks[rank_].left.store(true); }
  bool AwaitLeft(int peer, std::uint64_t count, Deadline deadline) override {
    auto& theirs = hub_->ranks[peer];
    while (!theirs.left.load() && theirs.counters[kConsumed].load() < count) {
      if (Now() >= deadline) return false;
      std::this_thread::sleep_for(kLeftPause);
    }
    return true;
  }

 private:
  std::shared_ptr<LocalHub> hub_;
  const int rank_;
  std::vector<int> ranks_;
  Result abort_;  // guarded by the hub's mutex
};

}  // namespace

std::unique_ptr<Transport> CreateLocalTransport(std::shared_ptr<LocalHub> hub, int rank) {
  return std::make_unique<LocalTransport>(std::move(hub), rank);
}
std::unique_ptr<Mailbox> CreateLocalMailbox(std::shared_ptr<LocalHub> hub, int rank) {
  return std::make_unique<LocalMailbox>(std::move(hub), rank);
}
std::unique_ptr<Segment> CreateLocalSegment(std::shared_ptr<LocalHub> hub, int rank) {
  return std::make_unique<LocalSegment>(std::move(hub), rank);
}

}  // namespace ronde
