#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "transport/local/factory.h"

namespace ronde {
namespace {
constexpr int kYields = 40;

Result PeerGone(int peer) { return Result(Code::kPeerLost, "rank " + std::to_string(peer) + " is gone"); }
}  // namespace

class LocalHub {
 public:
  LocalHub(int size, std::size_t ring_bytes) : size(size), ring_bytes(ring_bytes), boxes(size), parts(size) {
    for (auto& part : parts) {
      part.memory.reset(new std::byte[ring_bytes + 64]);
      auto address = reinterpret_cast<std::uintptr_t>(part.memory.get());
      part.ring = part.memory.get() + (64 - address % 64) % 64;
    }
  }

  struct Box {
    std::deque<Mailbox::Event> events;
    bool rung = false;
  };
  struct Part {
    std::unique_ptr<std::byte[]> memory;
    std::byte* ring = nullptr;
    std::atomic<std::uint64_t> counters[Segment::kNumStages] = {};
  };
  struct Transfer {
    const std::byte* from = nullptr;  // of a send
    std::byte* to = nullptr;          // of a receive
    std::size_t size = 0;
    bool done = false;
    Result result;
  };
  using Line = std::tuple<int, int, std::uint64_t>;  // sender, receiver, tag

  const int size;
  const std::size_t ring_bytes;
  std::mutex mutex;  // guards all but the parts' memory and counters
  std::condition_variable changed;
  std::vector<Box> boxes;
  std::vector<Part> parts;
  std::map<Line, std::deque<Transfer*>> sends, receives;
  std::set<int> gone;
};

std::shared_ptr<LocalHub> CreateLocalHub(int size, std::size_t ring_bytes) {
  return std::make_shared<LocalHub>(size, ring_bytes);
}

void DisconnectLocal(LocalHub& hub, int rank) {
  std::lock_guard lock(hub.mutex);
  if (!hub.gone.insert(rank).second) return;
  for (int r = 0; r < hub.size; ++r) {
    if (r != rank) hub.boxes[r].events.push_back({rank, {}, PeerGone(rank)});
  }
  hub.changed.notify_all();
}

namespace {

class LocalMailbox final : public Mailbox {
 public:
  LocalMailbox(std::shared_ptr<LocalHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~LocalMailbox() override { DisconnectLocal(*hub_, rank_); }

  void Post(int peer, std::span<const std::byte> message) override {
    std::lock_guard lock(hub_->mutex);
    if (hub_->gone.count(peer)) return;
    hub_->boxes[peer].events.push_back({rank_, {message.begin(), message.end()}, {}});
    hub_->changed.notify_all();
  }
  bool Take(Event* event) override {
    std::lock_guard lock(hub_->mutex);
    auto& events = hub_->boxes[rank_].events;
    if (events.empty()) return false;
    *event = std::move(events.front());
    events.pop_front();
    return true;
  }
  void Wait(Deadline deadline, bool eager) override {
    auto& box = hub_->boxes[rank_];
    std::unique_lock lock(hub_->mutex);
    auto ready = [&] { return box.rung || !box.events.empty(); };
    for (int i = 0; eager && i < kYields && !ready(); ++i) {
      lock.unlock();
      sched_yield();
      lock.lock();
    }
    if (deadline == Deadline::max()) {
      hub_->changed.wait(lock, ready);  // nothing can stall: Ring or an event ends it
    } else {
      hub_->changed.wait_until(lock, deadline, ready);
    }
    box.rung = false;
  }
  void Ring() override {
    std::lock_guard lock(hub_->mutex);
    hub_->boxes[rank_].rung = true;
    hub_->changed.notify_all();
  }
  Result Flush(Deadline) override { return Ok(); }

 private:
  std::shared_ptr<LocalHub> hub_;
  const int rank_;
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<LocalHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size; }
  Handle Send(int peer, std::uint64_t tag, std::span<const std::byte> data) override {
    auto transfer = std::make_unique<LocalHub::Transfer>();
    transfer->from = data.data();
    transfer->size = data.size();
    return Start(std::move(transfer), {rank_, peer, tag}, hub_->sends, peer);
  }
  Handle Recv(int peer, std::uint64_t tag, std::span<std::byte> data) override {
    auto transfer = std::make_unique<LocalHub::Transfer>();
    transfer->to = data.data();
    transfer->size = data.size();
    return Start(std::move(transfer), {peer, rank_, tag}, hub_->receives, peer);
  }
  Result Wait(Handle handle, Deadline deadline) override {
    std::unique_lock lock(hub_->mutex);
    auto found = mine_.find(handle);
    if (found == mine_.end()) return Result(Code::kInternal, "a transfer was waited for twice");
    auto& [transfer, line, peer] = found->second;
    auto over = [&, t = transfer.get(), p = peer] { return t->done || !abort_.ok() || hub_->gone.count(p) > 0; };
    bool in_time = true;
    if (deadline == Deadline::max()) {
      hub_->changed.wait(lock, over);
    } else {
      in_time = hub_->changed.wait_until(lock, deadline, over);
    }
    Result result;
    if (transfer->done) {
      result = transfer->result;
    } else if (!abort_.ok()) {
      result = abort_;
    } else if (!in_time) {
      result = Result(Code::kTimeout, "no answer from rank " + std::to_string(peer) + " in time");
    } else {
      result = PeerGone(peer);
    }
    for (auto* table : {&hub_->sends, &hub_->receives}) {
      if (auto queue = table->find(line); queue != table->end()) std::erase(queue->second, transfer.get());
    }
    mine_.erase(found);
    return result;
  }
  void Abort(const Result& cause) override {
    std::lock_guard lock(hub_->mutex);
    if (abort_.ok()) abort_ = cause;
    hub_->changed.notify_all();
  }

 private:
  struct Mine {
    std::unique_ptr<LocalHub::Transfer> transfer;
    LocalHub::Line line;
    int peer;
  };

  Handle Start(std::unique_ptr<LocalHub::Transfer> transfer, LocalHub::Line line,
               std::map<LocalHub::Line, std::deque<LocalHub::Transfer*>>& table, int peer) {
    std::lock_guard lock(hub_->mutex);
    table[line].push_back(transfer.get());
    mine_.emplace(++last_, Mine{std::move(transfer), line, peer});
    auto& sends = hub_->sends[line];
    auto& receives = hub_->receives[line];
    while (!sends.empty() && !receives.empty()) {
      LocalHub::Transfer* send = sends.front();
      LocalHub::Transfer* receive = receives.front();
      sends.pop_front();
      receives.pop_front();
      if (send->size != receive->size) {
        receive->result = Result(Code::kTransport, "rank " + std::to_string(std::get<0>(line)) + " sent " +
                                                       std::to_string(send->size) + " bytes where " +
                                                       std::to_string(receive->size) + " were expected");
      } else if (send->size > 0) {
        std::memcpy(receive->to, send->from, send->size);
      }
      send->done = receive->done = true;
    }
    if (sends.empty()) hub_->sends.erase(line);
    if (receives.empty()) hub_->receives.erase(line);
    hub_->changed.notify_all();
    return last_;
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
  std::byte* Peer(int rank) const override { return hub_->parts[rank].ring; }
  void Publish(Stage stage, std::uint64_t count) override {
    hub_->parts[rank_].counters[stage].store(count);
    // The lock orders this with a waiter between its look and its sleep.
    std::lock_guard lock(hub_->mutex);
    hub_->changed.notify_all();
  }
  Result Await(int peer, Stage stage, std::uint64_t count, Deadline deadline) override {
    auto& counter = hub_->parts[peer].counters[stage];
    for (int i = 0; i < kYields; ++i) {
      if (counter.load(std::memory_order_acquire) >= count) return Ok();
      sched_yield();
    }
    std::unique_lock lock(hub_->mutex);
    auto over = [&] { return counter.load() >= count || !abort_.ok(); };
    bool in_time = true;
    if (deadline == Deadline::max()) {
      hub_->changed.wait(lock, over);
    } else {
      in_time = hub_->changed.wait_until(lock, deadline, over);
    }
    if (counter.load() >= count) return Ok();
    if (!abort_.ok()) return abort_;
    (void)in_time;
    return Result(Code::kTimeout, "rank " + std::to_string(peer) + " did not reach chunk " + std::to_string(count) +
                                      " in time");
  }
  void Abort(const Result& cause) override {
    std::lock_guard lock(hub_->mutex);
    if (abort_.ok()) abort_ = cause;
    hub_->changed.notify_all();
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
