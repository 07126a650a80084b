#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>

#include "transport/tcp/sockets.h"

namespace ronde {
namespace {

constexpr int kYields = 20;

// Frames: tag and length, then the bytes, straight from and into the caller's memory. A frame that nobody has asked for
// yet stays in the socket, and what follows it too: collectives ask before they wait.
class SocketTransport final : public Transport {
 public:
  explicit SocketTransport(std::shared_ptr<const Meeting> meeting)
      : meeting_(std::move(meeting)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  int rank() const override { return meeting_->config.rank; }
  int size() const override { return meeting_->config.size; }

  Handle Send(int peer, std::uint64_t tag, std::span<const std::byte> data) override {
    Handle handle = ++last_;
    Link& link = links_[peer];
    link.sends.push_back(Outgoing{handle, {tag, data.size()}, 0, data.data(), data.size()});
    transfers_[handle] = Transfer{peer, false, link.broken};
    return handle;
  }

  Handle Recv(int peer, std::uint64_t tag, std::span<std::byte> data) override {
    Handle handle = ++last_;
    Link& link = links_[peer];
    link.receives[tag].push_back(Incoming{handle, data.data(), data.size()});
    transfers_[handle] = Transfer{peer, false, link.broken};
    return handle;
  }

  Result Wait(Handle handle, Deadline deadline) override {
    auto found = transfers_.find(handle);
    if (found == transfers_.end()) return Result(Code::kInternal, "a transfer was waited for twice");
    Transfer& transfer = found->second;
    Result result;
    int yields = 0;
    while (true) {
      if (Result cause = abort_cause(); !cause.ok()) {
        result = cause;
        break;
      }
      bool moved = Progress();
      if (transfer.done || !transfer.result.ok()) {
        result = transfer.result;
        break;
      }
      if (Now() >= deadline) {
        result = Result(Code::kTimeout, meeting_->peers[transfer.peer].Describe() + " did not answer in time");
        break;
      }
      if (moved) {
        yields = 0;
        continue;
      }
      if (++yields < kYields) {
        sched_yield();
      } else {
        Sleep(deadline);
      }
    }
    Forget(handle, transfer.peer);
    transfers_.erase(found);
    return result;
  }

  void Abort(const Result& cause) override {
    {
      std::lock_guard lock(mutex_);
      if (abort_.ok()) abort_ = cause;
    }
    std::uint64_t one = 1;
    [[maybe_unused]] ssize_t n = write(wake_.get(), &one, sizeof one);
  }

 private:
  struct FrameHeader {
    std::uint64_t tag = 0, bytes = 0;
  };
  struct Transfer {
    int peer = 0;
    bool done = false;
    Result result;
  };
  struct Outgoing {
    Handle handle;
    FrameHeader header;
    std::size_t header_sent;
    const std::byte* data;
    std::size_t left;
  };
  struct Incoming {
    Handle handle;
    std::byte* data;
    std::size_t bytes;
  };
  struct Link {
    Fd socket;
    std::optional<Dialer> dialer;  // on its way to the socket
    Result broken;
    std::deque<Outgoing> sends;
    std::map<std::uint64_t, std::deque<Incoming>> receives;
    FrameHeader header;
    std::size_t header_got = 0;
    std::size_t body_left = 0;
    std::byte* body = nullptr;
    Handle receiving = 0;
    bool busy() const { return !sends.empty() || !receives.empty() || receiving != 0; }
  };

  Result abort_cause() {
    std::lock_guard lock(mutex_);
    return abort_;
  }

  void Finish(Handle handle, const Result& result) {
    auto found = transfers_.find(handle);
    if (found == transfers_.end()) return;
    found->second.done = true;
    found->second.result = result;
  }

  // A transfer that is given up: nothing may touch its memory any more, so a half-done one breaks the link.
  void Forget(Handle handle, int peer) {
    Link& link = links_[peer];
    std::erase_if(link.sends, [&](const Outgoing& item) { return item.handle == handle && item.header_sent == 0; });
    for (auto& send : link.sends) {
      if (send.handle == handle) return Break(link, Result(Code::kTransport, "an earlier transfer was given up"));
    }
    if (link.receiving == handle) return Break(link, Result(Code::kTransport, "an earlier transfer was given up"));
    for (auto& [tag, queue] : link.receives) {
      std::erase_if(queue, [&](const Incoming& item) { return item.handle == handle; });
    }
    std::erase_if(link.receives, [](const auto& item) { return item.second.empty(); });
  }

  void Break(Link& link, const Result& why) {
    if (link.broken.ok()) link.broken = why;
    for (auto& send : link.sends) Finish(send.handle, why);
    for (auto& [tag, queue] : link.receives) {
      for (auto& item : queue) Finish(item.handle, why);
    }
    if (link.receiving != 0) Finish(link.receiving, why);
    link.sends.clear();
    link.receives.clear();
    link.receiving = 0;
    link.socket = Fd();
    link.dialer.reset();
  }

  // One look at every link that has something to do. Whether bytes moved.
  bool Progress() {
    bool moved = NeedsAccept() && meeting_->acceptor->Progress();
    for (auto& [peer, link] : links_) {
      if (!link.busy() || !link.broken.ok()) continue;
      if (!link.socket.valid()) moved |= Connect(peer, link);
      if (!link.socket.valid()) continue;
      moved |= Write(peer, link);
      if (link.socket.valid()) moved |= Read(peer, link);
    }
    return moved;
  }

  // Of a pair, the lower rank dials. A peer that computes may take long to answer; one whose host takes no connection
  // for so long is gone.
  bool Connect(int peer, Link& link) {
    if (peer < rank()) {
      link.socket = meeting_->acceptor->Take("data", peer);
      return link.socket.valid();
    }
    if (!link.dialer) link.dialer.emplace(meeting_.get(), peer, "data");
    bool moved = link.dialer->Progress();
    if (link.dialer->done()) {
      link.socket = link.dialer->Take();
      link.dialer.reset();
    } else if (Now() - link.dialer->unheard_since() > FromSeconds(meeting_->config.shared.peer_timeout)) {
      Break(link, Result(Code::kPeerLost,
                         meeting_->peers[peer].Describe() + " takes no connection: " + link.dialer->last().message()));
      return true;
    }
    return moved;
  }

  bool NeedsAccept() const {
    return std::any_of(links_.begin(), links_.end(), [this](const auto& item) {
      return item.first < rank() && item.second.busy() && item.second.broken.ok() && !item.second.socket.valid();
    });
  }

  bool Write(int peer, Link& link) {
    bool moved = false;
    while (!link.sends.empty()) {
      Outgoing& item = link.sends.front();
      iovec parts[2];
      int count = 0;
      if (item.header_sent < sizeof item.header) {
        parts[count++] = {reinterpret_cast<char*>(&item.header) + item.header_sent,
                          sizeof item.header - item.header_sent};
      }
      if (item.left > 0) parts[count++] = {const_cast<std::byte*>(item.data), item.left};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = static_cast<std::size_t>(count);
      ssize_t n = sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK) Break(link, Lost(peer));
        return moved;
      }
      moved = true;
      auto sent = static_cast<std::size_t>(n);
      std::size_t of_header = std::min(sent, sizeof item.header - item.header_sent);
      item.header_sent += of_header;
      item.data += sent - of_header;
      item.left -= sent - of_header;
      if (item.header_sent < sizeof item.header || item.left > 0) return moved;
      Finish(item.handle, Ok());
      link.sends.pop_front();
    }
    return moved;
  }

  bool Read(int peer, Link& link) {
    bool moved = false;
    while (link.receiving != 0 || !link.receives.empty()) {
      if (link.receiving == 0 && link.header_got == sizeof link.header) {
        auto queue = link.receives.find(link.header.tag);
        if (queue == link.receives.end()) return moved;  // somebody will ask for it
        Incoming item = queue->second.front();
        queue->second.pop_front();
        if (queue->second.empty()) link.receives.erase(queue);
        if (item.bytes != link.header.bytes) {
          Result wrong(Code::kTransport, meeting_->peers[peer].Describe() + " sent " +
                                             std::to_string(link.header.bytes) + " bytes where " +
                                             std::to_string(item.bytes) + " were expected");
          Finish(item.handle, wrong);
          Break(link, wrong);
          return true;
        }
        link.receiving = item.handle;
        link.body = item.data;
        link.body_left = item.bytes;
      }
      if (link.receiving != 0 && link.body_left == 0) {
        Finish(link.receiving, Ok());
        link.receiving = 0;
        link.header_got = 0;
        continue;
      }
      char* to = link.receiving != 0 ? reinterpret_cast<char*>(link.body)
                                     : reinterpret_cast<char*>(&link.header) + link.header_got;
      std::size_t want = link.receiving != 0 ? link.body_left : sizeof link.header - link.header_got;
      ssize_t n = recv(link.socket.get(), to, want, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return moved;
      if (n <= 0) {
        Break(link, Lost(peer));
        return true;
      }
      moved = true;
      if (link.receiving != 0) {
        link.body += n;
        link.body_left -= static_cast<std::size_t>(n);
      } else {
        link.header_got += static_cast<std::size_t>(n);
      }
    }
    return moved;
  }

  Result Lost(int peer) const {
    return Result(Code::kPeerLost, meeting_->peers[peer].Describe() + " closed its data connection");
  }

  void Sleep(Deadline deadline) {
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
    if (NeedsAccept()) deadline = std::min(deadline, meeting_->acceptor->Watch(&polled));
    for (auto& [peer, link] : links_) {
      if (link.dialer) {
        Deadline give_up = link.dialer->unheard_since() + FromSeconds(meeting_->config.shared.peer_timeout);
        deadline = std::min({deadline, give_up, link.dialer->Watch(&polled)});
      }
      if (!link.busy() || !link.socket.valid()) continue;
      bool stuck = link.receiving == 0 && link.header_got == sizeof link.header;  // a frame nobody asked for
      short events = link.sends.empty() ? 0 : POLLOUT;
      if (!stuck && (link.receiving != 0 || !link.receives.empty())) events |= POLLIN;
      polled.push_back({link.socket.get(), events, 0});
    }
    WaitAny(&polled, deadline);
  }

  std::shared_ptr<const Meeting> meeting_;
  Fd wake_;
  Handle last_ = 0;
  std::map<Handle, Transfer> transfers_;
  std::map<int, Link> links_;
  std::mutex mutex_;  // guards abort_
  Result abort_;
};

}  // namespace

std::unique_ptr<Transport> CreateSocketTransport(std::shared_ptr<const Meeting> meeting) {
  return std::make_unique<SocketTransport>(std::move(meeting));
}

}  // namespace ronde
