#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <thread>

#include "net/hmac.h"
#include "net/socket.h"
#include "store/protocol.h"

namespace ronde {
namespace {

// A client that asks nothing within this time of connecting is not one of ours.
constexpr double kHandshakeSeconds = 10;
// The most it may say before it has shown that it is.
constexpr std::size_t kStrangerBytes = 1024;

class StoreServerImpl final : public StoreServer {
 public:
  StoreServerImpl(Fd listener, std::string url, std::string secret)
      : listener_(std::move(listener)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        url_(std::move(url)),
        secret_(std::move(secret)),
        unix_(url_.rfind("unix:", 0) == 0),
        thread_([this] { Main(); }) {}
  ~StoreServerImpl() override {
    std::uint64_t one = 1;
    [[maybe_unused]] ssize_t n = write(wake_.get(), &one, sizeof one);
    thread_.join();
    if (unix_ && url_[5] != '@') unlink(url_.c_str() + 5);
  }
  const std::string& url() const override { return url_; }

 private:
  // An exchange: blobs by index, handed to all who wait once all are there.
  struct Gathering {
    std::vector<std::optional<std::string>> blobs;
    std::size_t there = 0;
  };
  struct Client {
    Fd socket;
    std::string nonce;
    bool trusted = false;
    TimePoint since;
    std::string in, out;
    std::size_t out_sent = 0;
    // A request that waits, for a key or for an exchange.
    enum class Waits { kNo, kKey, kExchange } waits = Waits::kNo;
    std::string wanted;
    Deadline deadline;
    bool dead = false;
  };

  // All below: the server's thread.
  void Main() {
    bool stop = false;
    while (!stop) {
      std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      Deadline wake = Deadline::max();
      for (auto& client : clients_) {
        polled.push_back({client.socket.get(), static_cast<short>(client.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
        if (client.waits != Client::Waits::kNo) wake = std::min(wake, client.deadline);
        if (!client.trusted) wake = std::min(wake, client.since + FromSeconds(kHandshakeSeconds));
      }
      int limit = -1;
      if (wake != Deadline::max()) {
        auto left = std::chrono::ceil<std::chrono::milliseconds>(wake - Now()).count();
        limit = static_cast<int>(std::clamp<long long>(left, 0, 60000));
      }
      if (poll(polled.data(), polled.size(), limit) < 0 && errno != EINTR) return;
      stop = polled[0].revents != 0;
      std::size_t i = 2;
      for (auto& client : clients_) {
        short events = polled[i++].revents;
        if (events & (POLLIN | POLLHUP | POLLERR)) Read(client);
        if (!client.dead && events & POLLOUT) Write(client);
      }
      if (polled[1].revents != 0) Welcome();
      for (auto& client : clients_) {
        if (client.dead) continue;
        if (client.waits != Client::Waits::kNo && Now() >= client.deadline) TimeOut(client);
        if (!client.trusted && Now() > client.since + FromSeconds(kHandshakeSeconds)) client.dead = true;
      }
      clients_.remove_if([](const Client& client) { return client.dead; });
    }
  }

  void Welcome() {
    while (true) {
      auto socket = Accept(listener_, Now());
      if (!socket.ok()) return;
      if (unix_ && !SameUser(socket.value())) continue;
      Client& client = clients_.emplace_back();
      client.socket = std::move(socket.value());
      TuneTcp(client.socket, kStorePeerSeconds);
      client.since = Now();
      client.nonce = RandomBytes(16);
      // A Unix client's user is proof enough; it gets an empty nonce.
      if (unix_) client.nonce.clear();
      Answer(client, Code::kOk, {kStoreMagic, client.nonce});
    }
  }

  void Read(Client& client) {
    char buffer[65536];
    // Not without end: the others want their turn, and a stranger gets no memory.
    const std::size_t most = client.in.size() + (client.trusted ? std::size_t{1} << 20 : kStrangerBytes);
    while (client.in.size() < most) {
      ssize_t n = recv(client.socket.get(), buffer, std::min(sizeof buffer, most - client.in.size()), 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (n <= 0) {
        client.dead = true;
        return;
      }
      client.in.append(buffer, static_cast<std::size_t>(n));
    }
    Take(client);
  }

  // Handles what came, one request after the other is answered.
  void Take(Client& client) {
    while (!client.dead && client.waits == Client::Waits::kNo && client.in.size() >= 4) {
      std::uint32_t size = 0;
      std::memcpy(&size, client.in.data(), sizeof size);
      if (size == 0 || size > (client.trusted ? kStoreFrameLimit : kStrangerBytes)) {
        client.dead = true;  // no client of ours
        return;
      }
      if (client.in.size() < 4 + std::size_t{size}) return;
      std::string frame = client.in.substr(4, size);
      client.in.erase(0, 4 + std::size_t{size});
      Handle(client, frame);
    }
  }

  void Handle(Client& client, const std::string& frame) {
    std::vector<std::string> fields;
    if (!SplitFields(std::string_view(frame).substr(1), &fields)) {
      client.dead = true;
      return;
    }
    if (!client.trusted) {
      std::string proof = StoreProof(secret_, client.nonce);
      client.trusted = frame[0] == 'h' && fields.size() == 2 && fields[0] == kStoreMagic &&
                       (unix_ || secret_.empty() || EqualSecrets(fields[1], proof));
      if (client.trusted) {
        Answer(client, Code::kOk, {});
      } else {
        client.dead = true;
      }
      return;
    }
    std::int64_t number = 0, index = 0, count = 0;
    switch (static_cast<StoreRequest>(frame[0])) {
      case StoreRequest::kSet:
        if (fields.size() != 2) break;
        Put(fields[0], std::move(fields[1]));
        return Answer(client, Code::kOk, {});
      case StoreRequest::kGet: {
        if (fields.size() != 2 || !ToNumber(fields[1], &number)) break;
        auto value = values_.find(fields[0]);
        if (value != values_.end()) return Answer(client, Code::kOk, {value->second});
        return Wait(client, Client::Waits::kKey, fields[0], number);
      }
      case StoreRequest::kAdd: {
        if (fields.size() != 2 || !ToNumber(fields[1], &number)) break;
        std::int64_t old = 0;
        ToNumber(values_[fields[0]], &old);
        std::string sum = std::to_string(
            static_cast<std::int64_t>(static_cast<std::uint64_t>(old) + static_cast<std::uint64_t>(number)));
        Put(fields[0], sum);
        return Answer(client, Code::kOk, {sum});
      }
      case StoreRequest::kExchange: {
        if (fields.size() != 5 || !ToNumber(fields[1], &number) || !ToNumber(fields[2], &index) ||
            !ToNumber(fields[3], &count) || count < 1 || count > 1 << 20 || index < 0 || index >= count) {
          break;
        }
        Gathering& gathering = gatherings_[fields[0]];
        auto& blobs = gathering.blobs;
        if (blobs.empty()) blobs.resize(static_cast<std::size_t>(count));
        if (blobs.size() != static_cast<std::size_t>(count)) {
          return Answer(client, Code::kArgument,
                        {"'" + fields[0] + "' is exchanged by " + std::to_string(blobs.size()) + ", not " +
                         std::to_string(count)});
        }
        auto& blob = blobs[static_cast<std::size_t>(index)];
        if (!blob) ++gathering.there;
        blob = std::move(fields[4]);
        Wait(client, Client::Waits::kExchange, fields[0], number);
        if (gathering.there == blobs.size()) HandOut(fields[0], gathering);
        return;
      }
    }
    client.dead = true;
  }

  void Wait(Client& client, Client::Waits what, const std::string& key, std::int64_t milliseconds) {
    constexpr std::int64_t kYear = std::int64_t{365} * 24 * 3600 * 1000;
    client.waits = what;
    client.wanted = key;
    client.deadline = Now() + std::chrono::milliseconds(std::clamp<std::int64_t>(milliseconds, 0, kYear));
  }

  void Put(const std::string& key, std::string value) {
    const std::string& stored = values_[key] = std::move(value);
    for (auto& client : clients_) {
      if (client.waits == Client::Waits::kKey && client.wanted == key) Answer(client, Code::kOk, {stored});
    }
  }

  void HandOut(const std::string& key, const Gathering& gathering) {
    std::vector<std::string> blobs;
    for (const auto& blob : gathering.blobs) blobs.push_back(*blob);
    for (auto& client : clients_) {
      if (client.waits == Client::Waits::kExchange && client.wanted == key) Answer(client, Code::kOk, blobs);
    }
  }

  void TimeOut(Client& client) {
    if (client.waits == Client::Waits::kKey) {
      return Answer(client, Code::kTimeout, {"nobody set the key '" + client.wanted + "' in time"});
    }
    const auto& blobs = gatherings_[client.wanted].blobs;
    std::string missing;
    for (std::size_t i = 0; i < blobs.size(); ++i) {
      if (!blobs[i]) missing += (missing.empty() ? "" : ", ") + std::to_string(i);
    }
    Answer(client, Code::kTimeout,
           {"'" + client.wanted + "': " + std::to_string(blobs.size()) + " were expected, missing: " + missing});
  }

  // Ends the client's request, if it waited.
  void Answer(Client& client, Code code, const std::vector<std::string>& fields) {
    client.waits = Client::Waits::kNo;
    std::string frame(1, static_cast<char>(code));
    for (const auto& field : fields) PutField(&frame, field);
    auto size = static_cast<std::uint32_t>(frame.size());
    client.out.append(reinterpret_cast<const char*>(&size), sizeof size);
    client.out += frame;
    Write(client);
  }

  void Write(Client& client) {
    while (client.out_sent < client.out.size()) {
      ssize_t n = send(client.socket.get(), client.out.data() + client.out_sent, client.out.size() - client.out_sent,
                       MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n < 0) {
        client.dead = true;
        return;
      }
      client.out_sent += static_cast<std::size_t>(n);
    }
    client.out.clear();
    client.out_sent = 0;
  }

  Fd listener_;
  Fd wake_;
  const std::string url_;
  const std::string secret_;
  const bool unix_;
  std::list<Client> clients_;
  std::map<std::string, std::string> values_;
  std::map<std::string, Gathering> gatherings_;
  std::thread thread_;
};

}  // namespace

Expected<std::unique_ptr<StoreServer>> StoreServer::Start(const std::string& url, const std::string& secret) {
  if (url.rfind("unix:", 0) != 0 && url.rfind("tcp:", 0) != 0) {
    return Result(Code::kArgument, "a store is served on unix:/path or tcp:host:port, not '" + url + "'");
  }
  auto listener = Listen(url);
  if (!listener.ok()) return listener.error();
  auto bound = BoundAddress(listener.value(), url);
  if (!bound.ok()) return bound.error();
  return std::unique_ptr<StoreServer>(
      std::make_unique<StoreServerImpl>(std::move(listener.value()), bound.value(), secret));
}

}  // namespace ronde
