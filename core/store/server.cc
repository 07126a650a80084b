#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <thread>

#include "net/hmac.h"
#include "net/socket.h"
#include "store/protocol.h"

namespace ronde {
namespace {

constexpr std::size_t kFrameLimit = std::size_t{16} << 20;
constexpr char kMagic[] = "ronde-store-1";
// A client that asks nothing within this time of connecting is not one of ours.
constexpr double kHandshakeSeconds = 10;
// How long an answer may take beyond the request's own limit before the server counts as dead.
constexpr double kGraceSeconds = 10;

enum class Kind : unsigned char { kSet = 1, kGet, kAdd, kExchange };

// Fields of a frame: 32-bit length and bytes each.
void Put(std::string* frame, std::string_view field) {
  auto size = static_cast<std::uint32_t>(field.size());
  frame->append(reinterpret_cast<const char*>(&size), sizeof size);
  frame->append(field);
}
bool Split(std::string_view frame, std::vector<std::string>* fields) {
  while (!frame.empty()) {
    std::uint32_t size = 0;
    if (frame.size() < sizeof size) return false;
    std::memcpy(&size, frame.data(), sizeof size);
    frame.remove_prefix(sizeof size);
    if (size > frame.size()) return false;
    fields->emplace_back(frame.substr(0, size));
    frame.remove_prefix(size);
  }
  return true;
}
bool ToNumber(const std::string& text, std::int64_t* number) {
  char* end = nullptr;
  errno = 0;
  *number = std::strtoll(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0' && errno == 0;
}

class StoreClient final : public Store {
 public:
  StoreClient(Fd socket, std::string url) : socket_(std::move(socket)), url_(std::move(url)) {}

  Result Set(const std::string& key, const std::string& value) override {
    auto answer = Ask(Kind::kSet, {key, value}, Now());
    return answer.ok() ? Ok() : answer.error();
  }
  Expected<std::string> Get(const std::string& key, Deadline deadline) override {
    auto answer = Ask(Kind::kGet, {key, Left(deadline)}, deadline);
    if (!answer.ok()) return answer.error();
    return answer->empty() ? std::string() : answer->front();
  }
  Expected<std::int64_t> Add(const std::string& key, std::int64_t amount) override {
    auto answer = Ask(Kind::kAdd, {key, std::to_string(amount)}, Now());
    if (!answer.ok()) return answer.error();
    std::int64_t sum = 0;
    if (answer->empty() || !ToNumber(answer->front(), &sum)) return Broken("sent a bad number");
    return sum;
  }
  Expected<std::vector<std::string>> Exchange(const std::string& key, std::uint32_t index, std::uint32_t count,
                                              const std::string& blob, Deadline deadline) override {
    auto answer =
        Ask(Kind::kExchange, {key, Left(deadline), std::to_string(index), std::to_string(count), blob}, deadline);
    if (answer.ok() && answer->size() != count) return Broken("sent a wrong number of blobs");
    return answer;
  }

 private:
  static std::string Left(Deadline deadline) {
    double seconds = deadline == Deadline::max() ? 1e9 : std::max(0.0, Seconds(deadline - Now()));
    return std::to_string(static_cast<std::int64_t>(seconds * 1000));
  }
  Result Broken(const std::string& what) { return Result(Code::kTransport, "the store at " + url_ + " " + what); }

  Expected<std::vector<std::string>> Ask(Kind kind, const std::vector<std::string>& fields, Deadline deadline) {
    std::string frame(1, static_cast<char>(kind));
    for (const auto& field : fields) Put(&frame, field);
    if (frame.size() > kFrameLimit) return Result(Code::kArgument, "a store's value is at most 16 MiB");
    Deadline limit = deadline == Deadline::max() ? deadline : std::max(deadline, Now()) + FromSeconds(kGraceSeconds);
    RONDE_RETURN_IF_ERROR(SendFrame(socket_, frame, limit).Because("the store at " + url_ + " does not answer"));
    // The answer to an exchange holds everybody's blobs.
    auto answer = RecvFrame(socket_, std::size_t{1} << 31, limit);
    if (!answer.ok()) return answer.error().Because("the store at " + url_ + " does not answer");
    if (answer->empty()) return Broken("sent an empty answer");
    std::vector<std::string> values;
    if (!Split(std::string_view(answer.value()).substr(1), &values)) return Broken("sent a malformed answer");
    auto code = static_cast<Code>(answer.value()[0]);
    if (code != Code::kOk) return Result(code, values.empty() ? "unknown error" : values.front());
    return values;
  }

  Fd socket_;
  std::string url_;
};

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
  struct Client {
    Fd socket;
    std::string nonce;
    bool trusted = false;
    TimePoint since;
    std::string in, out;
    // A request that waits: its keys are not all there.
    std::vector<std::string> wanted;
    std::string waiting_for;
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
        if (!client.wanted.empty()) wake = std::min(wake, client.deadline);
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
        if (!client.dead) Write(client);
      }
      if (polled[1].revents != 0) Welcome();
      for (auto& client : clients_) {
        if (client.dead) continue;
        if (!client.wanted.empty()) Settle(client);
        if (!client.trusted && Now() > client.since + FromSeconds(kHandshakeSeconds)) client.dead = true;
        Write(client);
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
      client.since = Now();
      client.nonce = RandomBytes(16);
      // A Unix client's user is proof enough; it gets an empty nonce.
      if (unix_) client.nonce.clear();
      Answer(client, Code::kOk, {kMagic, client.nonce});
    }
  }

  void Read(Client& client) {
    char buffer[65536];
    while (true) {
      ssize_t n = recv(client.socket.get(), buffer, sizeof buffer, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (n <= 0) {
        client.dead = true;
        return;
      }
      client.in.append(buffer, static_cast<std::size_t>(n));
    }
    while (!client.dead && client.wanted.empty() && client.in.size() >= 4) {
      std::uint32_t size = 0;
      std::memcpy(&size, client.in.data(), sizeof size);
      if (size == 0 || size > (client.trusted ? kFrameLimit : 1024)) {
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
    if (!Split(std::string_view(frame).substr(1), &fields)) {
      client.dead = true;
      return;
    }
    if (!client.trusted) {
      std::string proof = HmacSha256(secret_, kMagic + client.nonce);
      client.trusted = frame[0] == 'h' && fields.size() == 2 && fields[0] == kMagic &&
                       (unix_ || secret_.empty() || EqualSecrets(fields[1], proof));
      if (client.trusted) {
        Answer(client, Code::kOk, {});
      } else {
        client.dead = true;
      }
      return;
    }
    std::int64_t number = 0, index = 0, count = 0;
    switch (static_cast<Kind>(frame[0])) {
      case Kind::kSet:
        if (fields.size() != 2) break;
        values_[fields[0]] = std::move(fields[1]);
        return Answer(client, Code::kOk, {});
      case Kind::kGet:
        if (fields.size() != 2 || !ToNumber(fields[1], &number)) break;
        client.wanted = {fields[0]};
        client.waiting_for = "nobody set the key '" + fields[0] + "' in time";
        client.deadline = Now() + std::chrono::milliseconds(number);
        return Settle(client);
      case Kind::kAdd: {
        if (fields.size() != 2 || !ToNumber(fields[1], &number)) break;
        std::int64_t old = 0;
        ToNumber(values_[fields[0]], &old);
        return Answer(client, Code::kOk, {values_[fields[0]] = std::to_string(old + number)});
      }
      case Kind::kExchange:
        if (fields.size() != 5 || !ToNumber(fields[1], &number) || !ToNumber(fields[2], &index) ||
            !ToNumber(fields[3], &count) || count < 1 || count > 1 << 20 || index < 0 || index >= count) {
          break;
        }
        values_[fields[0] + "/" + std::to_string(index)] = std::move(fields[4]);
        for (std::int64_t i = 0; i < count; ++i) client.wanted.push_back(fields[0] + "/" + std::to_string(i));
        client.waiting_for.clear();
        client.deadline = Now() + std::chrono::milliseconds(number);
        return Settle(client);
    }
    client.dead = true;
  }

  // Answers a waiting request if all it wants is there, or its time is up.
  void Settle(Client& client) {
    std::vector<std::string> found;
    std::string missing;
    for (const auto& key : client.wanted) {
      auto value = values_.find(key);
      if (value != values_.end()) {
        found.push_back(value->second);
      } else {
        missing += (missing.empty() ? "" : ", ") + key.substr(key.rfind('/') + 1);
      }
    }
    if (!missing.empty() && Now() < client.deadline) return;
    std::size_t expected = client.wanted.size();
    client.wanted.clear();
    if (missing.empty()) return Answer(client, Code::kOk, found);
    Answer(client, Code::kTimeout,
           {client.waiting_for.empty() ? std::to_string(expected) + " ranks were expected; missing: " + missing
                                       : client.waiting_for});
  }

  void Answer(Client& client, Code code, const std::vector<std::string>& fields) {
    std::string frame(1, static_cast<char>(code));
    for (const auto& field : fields) Put(&frame, field);
    auto size = static_cast<std::uint32_t>(frame.size());
    client.out.append(reinterpret_cast<const char*>(&size), sizeof size);
    client.out += frame;
    Write(client);
  }

  void Write(Client& client) {
    while (!client.out.empty()) {
      ssize_t n = send(client.socket.get(), client.out.data(), client.out.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n < 0) {
        client.dead = true;
        return;
      }
      client.out.erase(0, static_cast<std::size_t>(n));
    }
  }

  Fd listener_;
  Fd wake_;
  const std::string url_;
  const std::string secret_;
  const bool unix_;
  std::list<Client> clients_;
  std::map<std::string, std::string> values_;
  std::thread thread_;
};

}  // namespace

Expected<std::unique_ptr<Store>> ConnectStore(const std::string& url, const std::string& secret, Deadline deadline) {
  auto socket = Dial(url, deadline);
  if (!socket.ok()) return socket.error().Because("no store at " + url);
  auto hello = RecvFrame(socket.value(), 1024, deadline);
  if (!hello.ok()) return hello.error().Because("no store at " + url);
  std::vector<std::string> fields;
  if (hello->empty() || !Split(std::string_view(hello.value()).substr(1), &fields) || fields.size() != 2 ||
      fields[0] != kMagic) {
    return Result(Code::kTransport, url + " is not a ronde store");
  }
  std::string frame = "h";
  Put(&frame, kMagic);
  Put(&frame, HmacSha256(secret, kMagic + fields[1]));
  RONDE_RETURN_IF_ERROR(SendFrame(socket.value(), frame, deadline));
  auto welcome = RecvFrame(socket.value(), 1024, deadline);
  if (!welcome.ok()) return welcome.error().Because("the store at " + url + " refused this client");
  return std::unique_ptr<Store>(std::make_unique<StoreClient>(std::move(socket.value()), url));
}

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
