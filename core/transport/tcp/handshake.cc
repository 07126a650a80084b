#include "transport/tcp/handshake.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/hmac.h"
#include "transport/tcp/meeting.h"
#include "wire/codec.h"

namespace ronde {
namespace {

constexpr char kMagic[] = "ronde-peer-1";
constexpr std::size_t kHelloLimit = 1024;
constexpr std::size_t kNonceBytes = 16;
// What has not proved itself within this time of connecting is dropped.
constexpr auto kStrangerTime = std::chrono::seconds(10);
constexpr std::size_t kMaxPending = 512;
// After this, the next address is tried beside the others.
constexpr auto kStagger = std::chrono::milliseconds(250);
// An address that takes no connection within this time is tried anew.
constexpr auto kConnectTime = std::chrono::seconds(5);
// After this, an address that failed is tried again.
constexpr auto kRetry = std::chrono::milliseconds(50);

std::string Proof(const std::string& secret, const char* side, const std::string& hello, const std::string& nonce) {
  return HmacSha256(secret, std::string(side) + nonce + hello);
}

}  // namespace

void FramePipe::Queue(std::string_view frame) {
  auto size = static_cast<std::uint32_t>(frame.size());
  out_.append(reinterpret_cast<const char*>(&size), sizeof size);
  out_.append(frame);
}

bool FramePipe::Flush() {
  while (!out_.empty()) {
    ssize_t n = send(socket_.get(), out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    out_.erase(0, static_cast<std::size_t>(n));
  }
  return true;
}

FramePipe::Step FramePipe::Move() {
  if (!Flush()) return Step::kEnded;
  if (!sent()) return Step::kWaiting;
  while (true) {
    std::uint32_t size = 0;
    std::size_t want = sizeof size;
    if (in_.size() >= sizeof size) {
      std::memcpy(&size, in_.data(), sizeof size);
      if (size > kHelloLimit) return Step::kEnded;
      want += size;
      if (in_.size() == want) return Step::kFrame;
    }
    char buffer[kHelloLimit];
    ssize_t n = recv(socket_.get(), buffer, std::min(want - in_.size(), sizeof buffer), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Step::kWaiting;
    if (n <= 0) return Step::kEnded;
    in_.append(buffer, static_cast<std::size_t>(n));
  }
}

std::string FramePipe::Take() {
  std::string frame = in_.substr(sizeof(std::uint32_t));
  in_.clear();
  return frame;
}

std::string Hello::Encode() const {
  Writer writer;
  writer.Text(kMagic);
  writer.Unsigned(generation);
  writer.Text(purpose);
  writer.Signed(from);
  writer.Signed(to);
  writer.Text(nonce);
  auto bytes = writer.Take();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

bool Hello::Decode(const std::string& text, Hello* hello) {
  Reader reader(std::as_bytes(std::span(text)));
  if (reader.Text() != kMagic) return false;
  hello->generation = reader.Unsigned();
  hello->purpose = reader.Text();
  hello->from = static_cast<int>(reader.Signed());
  hello->to = static_cast<int>(reader.Signed());
  hello->nonce = reader.Text();
  return reader.ok() && reader.done() && hello->nonce.size() == kNonceBytes;
}

// ---- Acceptor ----

void Acceptor::Refuse(const char* why) const { meeting_.log.Info(std::string("refused a connection: ") + why); }

void Acceptor::Welcome() {
  if (Now() < paused_until_) return;
  for (const Fd* listener : {&meeting_.unix_listener, &meeting_.tcp_listener}) {
    while (listener->valid()) {
      auto socket = Accept(*listener, Now());
      if (!socket.ok()) {
        if (socket.error().code() != Code::kTimeout) {  // out of descriptors, say: the listener stays readable
          meeting_.log.Warning(socket.error().message());
          paused_until_ = Now() + kStagger;
        }
        break;
      }
      if (pending_.size() >= kMaxPending) pending_.pop_front();
      pending_.push_back({FramePipe(std::move(socket.value())), Now(), {}, "", ""});
    }
  }
}

bool Acceptor::Progress() {
  Welcome();
  bool moved = false;
  for (auto item = pending_.begin(); item != pending_.end();) {
    State state = Advance(*item, &moved);
    if (state == State::kProved) {
      TuneTcp(item->pipe.socket(), meeting_.config.shared.peer_timeout);
      proved_[{item->hello.purpose, item->hello.from}] = item->pipe.Release();
    } else if (state == State::kOpen && Now() > item->since + kStrangerTime) {
      Refuse("it did not say who it is in time");
      state = State::kOver;
    }
    item = state == State::kOpen ? std::next(item) : pending_.erase(item);
  }
  return moved;
}

Acceptor::State Acceptor::Advance(Pending& pending, bool* moved) {
  const EndpointConfig& config = meeting_.config;
  while (true) {
    if (pending.proved) {  // what it sends now is not for us to read
      if (!pending.pipe.Flush()) return State::kOver;
      *moved |= pending.pipe.sent();
      return pending.pipe.sent() ? State::kProved : State::kOpen;
    }
    FramePipe::Step step = pending.pipe.Move();
    if (step == FramePipe::Step::kWaiting) return State::kOpen;
    *moved = true;
    if (step == FramePipe::Step::kEnded) {
      if (pending.nonce.empty()) Refuse("it is not from a rank of ronde");
      return State::kOver;  // else a dialer that took another address
    }
    std::string frame = pending.pipe.Take();
    if (pending.nonce.empty()) {
      const Hello& hello = pending.hello;
      if (!Hello::Decode(frame, &pending.hello)) {
        Refuse("it is not from a rank of ronde");
        return State::kOver;
      }
      if (hello.generation != config.generation || hello.to != config.rank || hello.from < 0 ||
          hello.from >= config.size || hello.from == config.rank) {
        Refuse("it was meant for another rank or init()");
        return State::kOver;
      }
      pending.said = std::move(frame);
      pending.nonce = RandomBytes(kNonceBytes);
      pending.pipe.Queue(pending.nonce + Proof(config.secret, "accept", pending.said, pending.nonce));
    } else if (EqualSecrets(frame, Proof(config.secret, "dial", pending.said, pending.nonce))) {
      pending.proved = true;
      pending.pipe.Queue("welcome");
    } else {
      Refuse("it does not know this job's secret");
      return State::kOver;
    }
  }
}

Fd Acceptor::Take(const std::string& purpose, int peer) {
  auto found = proved_.find({purpose, peer});
  if (found == proved_.end()) return Fd();
  Fd socket = std::move(found->second);
  proved_.erase(found);
  return socket;
}

Deadline Acceptor::Watch(std::vector<pollfd>* polled) const {
  for (const auto& pending : pending_) polled->push_back(pending.pipe.Watch());
  if (Now() < paused_until_) return paused_until_;
  for (const Fd* listener : {&meeting_.unix_listener, &meeting_.tcp_listener}) {
    if (listener->valid()) polled->push_back({listener->get(), POLLIN, 0});
  }
  return Deadline::max();
}

// ---- Dialer ----

Dialer::Dialer(const Meeting* meeting, int peer, std::string purpose)
    : meeting_(*meeting), peer_(peer), purpose_(std::move(purpose)), unheard_since_(Now()) {
  TimePoint start = Now();
  for (auto& address : meeting->AddressesOf(peer)) {
    candidates_.push_back({std::move(address), start, false, {}});
    start += kStagger;
  }
  last_ = Result(Code::kTransport, candidates_.empty() ? "it published no address" : "it does not answer");
}

bool Dialer::Progress() {
  bool moved = false;
  for (auto& candidate : candidates_) {
    if (chosen_ != nullptr && chosen_ != &candidate) continue;
    bool fresh = !candidate.attempt.has_value();
    if (fresh && Now() < candidate.start) continue;
    Result result = fresh ? Start(candidate) : Ok();
    if (result.ok()) result = Advance(candidate, &moved);
    if (done()) {
      candidates_.clear();
      return true;
    }
    if (candidate.attempt && candidate.attempt->connected) unheard_since_ = Now();
    if (result.ok()) continue;
    last_ = result.Because(candidate.address);
    chosen_ = nullptr;
    candidate.attempt.reset();
    candidate.start = Now() + kRetry;
    auto untried = std::find_if(candidates_.begin(), candidates_.end(), [](const auto& item) { return !item.tried; });
    if (untried != candidates_.end()) untried->start = Now();
  }
  if (chosen_ != nullptr) {
    // Dropped before the acceptor could believe any of them: none of them sent a proof.
    for (auto& candidate : candidates_) {
      if (&candidate != chosen_) candidate.attempt.reset();
    }
  }
  return moved;
}

Result Dialer::Start(Candidate& candidate) {
  candidate.tried = true;
  auto socket = StartDial(candidate.address);
  if (!socket.ok()) return socket.error();
  Hello hello{meeting_.config.generation, purpose_, meeting_.config.rank, peer_, RandomBytes(kNonceBytes)};
  candidate.attempt.emplace(Attempt{FramePipe(std::move(socket.value())), std::move(hello), Now(), false});
  return Ok();
}

Result Dialer::Advance(Candidate& candidate, bool* moved) {
  const std::string& secret = meeting_.config.secret;
  Attempt& attempt = *candidate.attempt;
  if (!attempt.connected) {
    if (!WaitWritable(attempt.pipe.socket().get(), Now())) {
      if (Now() < attempt.since + kConnectTime) return Ok();
      return Result(Code::kTransport, "it takes no connection");
    }
    *moved = true;
    RONDE_RETURN_IF_ERROR(DialOutcome(attempt.pipe.socket()));
    attempt.connected = true;
    attempt.pipe.Queue(attempt.hello.Encode());
  }
  while (true) {
    FramePipe::Step step = attempt.pipe.Move();
    if (step == FramePipe::Step::kWaiting) return Ok();
    *moved = true;
    if (step == FramePipe::Step::kEnded) {
      return Result(Code::kTransport,
                    chosen_ ? "it refused this rank: do both know the same secret?" : "it closed the connection");
    }
    std::string frame = attempt.pipe.Take();
    if (chosen_ != nullptr) {  // this one, and the frame is the welcome
      TuneTcp(attempt.pipe.socket(), meeting_.config.shared.peer_timeout);
      meeting_.log.Info(purpose_ + " connection to " + meeting_.peers[peer_].Describe() + " over " + candidate.address);
      done_ = attempt.pipe.Release();
      return Ok();
    }
    if (frame.size() <= kNonceBytes) return Result(Code::kTransport, "it gave a strange answer");
    std::string nonce = frame.substr(0, kNonceBytes), said = attempt.hello.Encode();
    if (nonce == attempt.hello.nonce ||
        !EqualSecrets(std::string_view(frame).substr(kNonceBytes), Proof(secret, "accept", said, nonce))) {
      return Result(Code::kTransport, "it does not know this job's secret");
    }
    chosen_ = &candidate;
    attempt.pipe.Queue(Proof(secret, "dial", said, nonce));
  }
}

Deadline Dialer::Watch(std::vector<pollfd>* polled) const {
  Deadline wake = Deadline::max();
  for (const auto& candidate : candidates_) {
    if (chosen_ != nullptr && chosen_ != &candidate) continue;
    if (!candidate.attempt) {
      wake = std::min(wake, candidate.start);
      continue;
    }
    const Attempt& attempt = *candidate.attempt;
    pollfd item = attempt.pipe.Watch();
    if (!attempt.connected) {
      item.events = POLLOUT;
      wake = std::min(wake, attempt.since + kConnectTime);
    }
    polled->push_back(item);
  }
  return wake;
}

}  // namespace ronde
