#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>

#include "transport/tcp/sockets.h"

namespace ronde {
namespace {

constexpr int kYields = 50;
constexpr std::uint32_t kFrameLimit = 1u << 30;
// epoll's names: peers go by their rank, their processes by kProcess - rank.
constexpr int kRing = -1;
constexpr int kProcess = -2;

class SocketMailbox final : public Mailbox {
 public:
  SocketMailbox(std::shared_ptr<const Meeting> meeting, std::map<int, Fd> sockets)
      : meeting_(std::move(meeting)),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        ring_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    Watch(ring_.get(), kRing, EPOLLIN, EPOLL_CTL_ADD);
    for (auto& [peer, socket] : sockets) {
      Watch(socket.get(), peer, EPOLLIN, EPOLL_CTL_ADD);
      // A killed process may leave children that it forked (data loaders), which keep its sockets open.
      Fd process = PeerProcess(socket);
      if (process.valid()) Watch(process.get(), kProcess - peer, EPOLLIN, EPOLL_CTL_ADD);
      connections_[peer].process = std::move(process);
      connections_[peer].socket = std::move(socket);
    }
  }

  void Post(int peer, std::span<const std::byte> message) override {
    auto found = connections_.find(peer);
    if (found == connections_.end()) return;
    auto size = static_cast<std::uint32_t>(message.size());
    std::string& out = found->second.out;
    out.append(reinterpret_cast<const char*>(&size), sizeof size);
    out.append(reinterpret_cast<const char*>(message.data()), message.size());
    Write(peer, found->second);
  }

  bool Take(Event* event) override {
    if (events_.empty()) Poll();
    if (events_.empty()) return false;
    *event = std::move(events_.front());
    events_.pop_front();
    return true;
  }

  void Wait(Deadline deadline, bool eager) override {
    // Only looks: what is there is read by Take, which another thread may be in.
    for (int i = 0; eager && i < kYields; ++i) {
      if (rung_.exchange(false) || Ready(0)) return;
      sched_yield();
    }
    sleeps_.store(true);
    while (!rung_.load()) {
      int limit = -1;
      if (deadline != Deadline::max()) {
        auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Now()).count();
        limit = static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
      }
      if (Ready(limit) || limit == 0) break;
    }
    sleeps_.store(false);
    rung_.exchange(false);
  }

  void Ring() override {
    rung_.store(true);
    // Wait sets sleeps_ before its last look at rung_, so one of the two sees the other. One write wakes it.
    if (!sleeps_.exchange(false)) return;
    std::uint64_t one = 1;
    [[maybe_unused]] ssize_t n = write(ring_.get(), &one, sizeof one);
  }

  Result Flush(Deadline deadline) override {
    for (auto& [peer, connection] : connections_) {
      while (connection.socket.valid() && !connection.out.empty()) {
        if (!WaitWritable(connection.socket.get(), deadline)) {
          return Result(Code::kTimeout, meeting_->peers[peer].Describe() + " does not read");
        }
        Write(peer, connection);
      }
    }
    return Ok();
  }

 private:
  struct Connection {
    Fd socket;
    Fd process;  // readable once it has ended; invalid: unknown
    std::string in, out;
    bool wants_write = false;
  };

  void Watch(int fd, int name, std::uint32_t events, int operation) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = static_cast<std::uint64_t>(static_cast<std::int64_t>(name));
    epoll_ctl(epoll_.get(), operation, fd, &event);
  }

  // Whether there is something to look at. Clears the ring.
  bool Ready(int milliseconds) const {
    epoll_event ready[16];
    int count = epoll_wait(epoll_.get(), ready, 16, milliseconds);
    for (int i = 0; i < count; ++i) {
      if (Name(ready[i]) != kRing) continue;
      std::uint64_t value = 0;
      [[maybe_unused]] ssize_t n = read(ring_.get(), &value, sizeof value);
    }
    return count > 0;
  }

  static int Name(const epoll_event& event) { return static_cast<int>(static_cast<std::int64_t>(event.data.u64)); }

  // Reads what came and sends what can be sent.
  void Poll() {
    epoll_event ready[64];
    int count = epoll_wait(epoll_.get(), ready, 64, 0);
    for (int i = 0; i < count; ++i) {
      int name = Name(ready[i]);
      if (name == kRing) continue;  // Wait's business
      bool process_ended = name <= kProcess;
      int peer = process_ended ? kProcess - name : name;
      auto found = connections_.find(peer);
      if (found == connections_.end()) continue;
      if (ready[i].events & EPOLLOUT) Write(peer, found->second);
      if (process_ended || ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) Read(peer, found->second, process_ended);
    }
  }

  void Write(int peer, Connection& connection) {
    std::string& out = connection.out;
    std::size_t sent = 0;
    while (connection.socket.valid() && sent < out.size()) {
      ssize_t n = send(connection.socket.get(), out.data() + sent, out.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        // What a dead peer would not take is dropped; reading says that it is dead, after what it still said.
        if (errno != EAGAIN && errno != EWOULDBLOCK) sent = out.size();
        break;
      }
      sent += static_cast<std::size_t>(n);
    }
    out.erase(0, sent);
    bool wants = !out.empty();
    if (connection.socket.valid() && wants != connection.wants_write) {
      connection.wants_write = wants;
      Watch(connection.socket.get(), peer, wants ? EPOLLIN | EPOLLOUT : EPOLLIN, EPOLL_CTL_MOD);
    }
  }

  // `last`: its process has ended, so no more comes than what is there.
  void Read(int peer, Connection& connection, bool last) {
    char buffer[65536];
    bool ended = last;
    std::string why = last ? "ended" : "closed its connection";
    while (connection.socket.valid()) {
      ssize_t n = recv(connection.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (n <= 0) {
        if (n < 0 && errno != ECONNRESET) why = std::string("was lost: ") + std::strerror(errno);
        ended = true;
        break;
      }
      connection.in.append(buffer, static_cast<std::size_t>(n));
      if (static_cast<std::size_t>(n) < sizeof buffer && !last) break;
    }
    std::size_t used = 0;
    while (connection.in.size() - used >= sizeof(std::uint32_t)) {
      std::uint32_t size = 0;
      std::memcpy(&size, connection.in.data() + used, sizeof size);
      if (size > kFrameLimit) {
        ended = true;
        why = "sent a frame of " + std::to_string(size) + " bytes";
        break;
      }
      if (connection.in.size() - used - sizeof size < size) break;
      const auto* begin = reinterpret_cast<const std::byte*>(connection.in.data() + used + sizeof size);
      events_.push_back({peer, {begin, begin + size}, {}});
      used += sizeof size + size;
    }
    connection.in.erase(0, used);
    if (ended) {
      events_.push_back({peer, {}, Result(Code::kPeerLost, meeting_->peers[peer].Describe() + " " + why)});
      connections_.erase(peer);  // closing it leaves epoll
    }
  }

  std::shared_ptr<const Meeting> meeting_;
  Fd epoll_;
  Fd ring_;
  std::atomic<bool> rung_{false};    // since the last Wait
  std::atomic<bool> sleeps_{false};  // Wait is in epoll_wait without having been rung
  std::map<int, Connection> connections_;
  std::deque<Event> events_;
};

}  // namespace

std::unique_ptr<Mailbox> CreateSocketMailbox(std::shared_ptr<const Meeting> meeting, std::map<int, Fd> sockets) {
  return std::make_unique<SocketMailbox>(std::move(meeting), std::move(sockets));
}

}  // namespace ronde
