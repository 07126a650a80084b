// Mail through shared memory: no system call while both sides are awake.
//
// In every rank's header lies one ring of bytes for each rank that may send to it. Messages to a peer are numbered; one
// that finds room goes into the ring, else it goes through the socket, and the receiver delivers by number, so the two
// ways need no agreement. An empty message through the socket is a doorbell: a sender rings it when the receiver may be
// asleep. The receiver says so first and looks at its rings second, the sender writes first and looks second (both
// sequentially consistent), so one of the two always sees the other.
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

#include "transport/shm/group.h"

namespace ronde {
namespace {

constexpr int kYields = 50;
// A socket is looked at (a system call) at most every so many Takes that find nothing else.
constexpr int kTakesPerLook = 16;

struct FrameHeader {
  std::uint64_t number;
  std::uint64_t bytes;
};
constexpr std::size_t kAlign = 16;
std::size_t FrameBytes(std::size_t message) { return (sizeof(FrameHeader) + message + kAlign - 1) / kAlign * kAlign; }

// One direction of one pair of ranks, in the receiver's header. Positions only grow.
struct RingHeader {
  alignas(64) std::atomic<std::uint64_t> written;  // by the sender
  alignas(64) std::atomic<std::uint64_t> read;     // by the receiver
};

class MailRing {
 public:
  MailRing(const ShmMapping& receiver, std::size_t sender_index, std::size_t num_ranks) {
    std::size_t each = (kShmHeaderBytes - kShmMailOffset) / num_ranks / 64 * 64;
    base_ = receiver.mail() + sender_index * each;
    capacity_ = each > sizeof(RingHeader) ? (each - sizeof(RingHeader)) / kAlign * kAlign : 0;
  }
  // False: no room.
  bool Write(std::uint64_t number, std::span<const std::byte> message) {
    std::size_t need = FrameBytes(message.size());
    if (need > capacity_) return false;
    std::uint64_t at = header().written.load(std::memory_order_relaxed);
    if (at + need - header().read.load(std::memory_order_acquire) > capacity_) return false;
    FrameHeader frame{number, message.size()};
    Copy(at, std::as_bytes(std::span(&frame, 1)));
    Copy(at + sizeof frame, message);
    header().written.store(at + need);
    return true;
  }
  bool empty() const {
    return capacity_ == 0 || header().written.load() == header().read.load(std::memory_order_relaxed);
  }
  enum class Found { kNothing, kMessage, kNonsense };
  // Takes the next message if it is this one.
  Found Read(std::uint64_t number, std::vector<std::byte>* message) {
    if (empty()) return Found::kNothing;
    std::uint64_t at = header().read.load(std::memory_order_relaxed);
    std::uint64_t there = header().written.load(std::memory_order_acquire) - at;
    FrameHeader frame{};
    if (there < sizeof frame || there > capacity_) return Found::kNonsense;
    Fetch(at, std::as_writable_bytes(std::span(&frame, 1)));
    if (frame.bytes > there - sizeof frame || FrameBytes(frame.bytes) > there) return Found::kNonsense;
    if (frame.number != number) return Found::kNothing;
    message->resize(frame.bytes);
    Fetch(at + sizeof frame, *message);
    header().read.store(at + FrameBytes(frame.bytes), std::memory_order_release);
    return Found::kMessage;
  }

 private:
  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(base_); }
  std::byte* data() const { return base_ + sizeof(RingHeader); }
  void Copy(std::uint64_t position, std::span<const std::byte> from) {
    if (from.empty()) return;
    std::size_t at = position % capacity_, first = std::min(from.size(), capacity_ - at);
    std::memcpy(data() + at, from.data(), first);
    if (first < from.size()) std::memcpy(data(), from.data() + first, from.size() - first);
  }
  void Fetch(std::uint64_t position, std::span<std::byte> to) const {
    if (to.empty()) return;
    std::size_t at = position % capacity_, first = std::min(to.size(), capacity_ - at);
    std::memcpy(to.data(), data() + at, first);
    if (first < to.size()) std::memcpy(to.data() + first, data(), to.size() - first);
  }

  std::byte* base_;
  std::size_t capacity_;
};

class ShmMailbox final : public Mailbox {
 public:
  ShmMailbox(std::shared_ptr<const ShmGroup> group, std::unique_ptr<Mailbox> sockets)
      : group_(std::move(group)), sockets_(std::move(sockets)) {
    const auto& ranks = group_->ranks();
    auto index = [&](int rank) {
      return static_cast<std::size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
    };
    for (int peer : ranks) {
      if (peer == group_->rank()) continue;
      peers_.try_emplace(peer, MailRing(group_->Of(peer), index(group_->rank()), ranks.size()),
                         MailRing(group_->Of(group_->rank()), index(peer), ranks.size()));
    }
  }

  void Post(int peer, std::span<const std::byte> message) override {
    auto found = peers_.find(peer);
    if (found == peers_.end()) return sockets_->Post(peer, message);
    Peer& to = found->second;
    if (to.lost) return;
    std::uint64_t number = to.next_out++;
    if (to.out.Write(number, message)) {
      if (group_->Of(peer).header().mail_asleep.load() != 0) sockets_->Post(peer, {});
      return;
    }
    std::vector<std::byte> framed(sizeof number + message.size());
    std::memcpy(framed.data(), &number, sizeof number);
    if (!message.empty()) std::memcpy(framed.data() + sizeof number, message.data(), message.size());
    sockets_->Post(peer, framed);
  }

  bool Take(Event* event) override {
    if (TakeInOrder(event)) return true;
    if (!look_.exchange(false) && ++takes_ < kTakesPerLook) return false;
    takes_ = 0;
    Event other;
    while (sockets_->Take(&other)) {
      auto found = peers_.find(other.peer);
      if (found == peers_.end()) {
        *event = std::move(other);
        look_ = true;
        return true;
      }
      Sort(found->second, std::move(other));
      if (TakeInOrder(event)) {
        look_ = true;  // there may be more behind it
        return true;
      }
    }
    return false;
  }

  void Wait(Deadline deadline, bool eager) override {
    for (int i = 0; eager && i < kYields && !rung_; ++i) {
      if (HasMail()) return;
      sched_yield();
    }
    auto& asleep = group_->Of(group_->rank()).header().mail_asleep;
    asleep.store(1);
    if (!HasMail()) {
      rung_ = false;
      sockets_->Wait(deadline, false);
    }
    asleep.store(0);
    look_ = true;
  }

  void Ring() override {
    rung_ = true;
    sockets_->Ring();
  }

  // What is in a ring is the receiver's already.
  Result Flush(Deadline deadline) override { return sockets_->Flush(deadline); }

 private:
  struct Peer {
    Peer(MailRing out, MailRing in) : out(out), in(in) {}
    MailRing out, in;
    std::uint64_t next_out = 0, next_in = 0;
    std::map<std::uint64_t, std::vector<std::byte>> early;  // came by socket, not yet due
    bool lost = false;
    Result why;                       // lost: told after the last message
    std::atomic<bool> closed{false};  // that was told: nothing more is read
  };

  bool HasMail() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const auto& item) { return !item.second.closed && !item.second.in.empty(); });
  }

  // The next message of some peer that is due.
  bool TakeInOrder(Event* event) {
    for (auto& [rank, peer] : peers_) {
      if (peer.closed) continue;
      *event = Event{rank, {}, {}};
      auto found = peer.in.Read(peer.next_in, &event->message);
      if (found == MailRing::Found::kMessage) {
        ++peer.next_in;
        return true;
      }
      if (!peer.early.empty() && peer.early.begin()->first == peer.next_in) {
        event->message = std::move(peer.early.begin()->second);
        peer.early.erase(peer.early.begin());
        ++peer.next_in;
        return true;
      }
      if (found == MailRing::Found::kNonsense && !peer.lost) {
        peer.lost = true;
        peer.why = Result(Code::kPeerLost, "rank " + std::to_string(rank) + " wrote nonsense into shared memory");
      }
      if (peer.lost) {
        event->lost = peer.why;
        peer.closed = true;
        return true;
      }
    }
    return false;
  }

  // A message that came by socket from a rank of this host.
  void Sort(Peer& peer, Event event) {
    if (!event.lost.ok()) {
      if (!peer.lost) peer.why = event.lost;
      peer.lost = true;
    } else if (event.message.size() >= sizeof(std::uint64_t)) {
      std::uint64_t number = 0;
      std::memcpy(&number, event.message.data(), sizeof number);
      event.message.erase(event.message.begin(), event.message.begin() + sizeof number);
      peer.early[number] = std::move(event.message);
    }  // else a doorbell
  }

  const std::shared_ptr<const ShmGroup> group_;
  const std::unique_ptr<Mailbox> sockets_;
  std::map<int, Peer> peers_;  // by job rank: those of this host
  int takes_ = 0;
  std::atomic<bool> look_{true};   // at the sockets, in the next Take
  std::atomic<bool> rung_{false};  // since the last Wait
};

}  // namespace

std::unique_ptr<Mailbox> CreateShmMailbox(const Segment& segment, std::unique_ptr<Mailbox> sockets) {
  return std::make_unique<ShmMailbox>(GroupOf(segment), std::move(sockets));
}

}  // namespace ronde
