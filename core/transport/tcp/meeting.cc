#include "transport/tcp/meeting.h"

#include <thread>

#include "net/hmac.h"
#include "wire/codec.h"

namespace ronde {
namespace {

constexpr char kMagic[] = "ronde-peer-1";
constexpr std::size_t kHelloLimit = 1024;
// A stranger that connects and says nothing holds up the others no longer than this.
constexpr double kStrangerSeconds = 2;
constexpr auto kRetry = std::chrono::milliseconds(50);

std::string AsText(std::vector<std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}
std::span<const std::byte> AsBytes(const std::string& text) { return std::as_bytes(std::span(text)); }

struct Hello {
  std::uint64_t generation = 0;
  std::string purpose;
  int from = -1, to = -1;
  std::string nonce;

  std::string Encode() const {
    Writer writer;
    writer.Text(kMagic);
    writer.Unsigned(generation);
    writer.Text(purpose);
    writer.Signed(from);
    writer.Signed(to);
    writer.Text(nonce);
    return AsText(writer.Take());
  }
  static bool Decode(const std::string& text, Hello* hello) {
    Reader reader(AsBytes(text));
    if (reader.Text() != kMagic) return false;
    hello->generation = reader.Unsigned();
    hello->purpose = reader.Text();
    hello->from = static_cast<int>(reader.Signed());
    hello->to = static_cast<int>(reader.Signed());
    hello->nonce = reader.Text();
    return reader.ok() && reader.done() && hello->nonce.size() == 16;
  }
};

std::string Proof(const std::string& secret, const char* side, const std::string& hello, const std::string& nonce) {
  return HmacSha256(secret, std::string(side) + nonce + hello);
}

// A frame, asking `stop` while none comes.
Expected<std::string> Hear(const Fd& socket, Deadline deadline, const std::function<Result()>& stop) {
  while (stop && !WaitReadable(socket.get(), std::min(deadline, Now() + kRetry)) && Now() < deadline) {
    RONDE_RETURN_IF_ERROR(stop());
  }
  return RecvFrame(socket, kHelloLimit, deadline);
}

}  // namespace

std::string PeerInfo::Encode() const {
  Writer writer;
  writer.Text(kMagic);
  writer.Text(version);
  writer.Signed(rank);
  writer.Text(host_id);
  writer.Text(host_name);
  writer.Text(unix_address);
  writer.Signed(tcp_port);
  writer.Unsigned(tcp_hosts.size());
  for (const auto& host : tcp_hosts) writer.Text(host);
  writer.Text(job_options);
  return AsText(writer.Take());
}

Expected<PeerInfo> PeerInfo::Decode(const std::string& blob) {
  Reader reader(AsBytes(blob));
  PeerInfo info;
  if (reader.Text() != kMagic) reader.Fail("not from a rank of ronde");
  info.version = reader.Text();
  info.rank = static_cast<int>(reader.Signed());
  info.host_id = reader.Text();
  info.host_name = reader.Text();
  info.unix_address = reader.Text();
  info.tcp_port = static_cast<int>(reader.Signed());
  for (std::size_t n = reader.Count(); n > 0 && reader.ok(); --n) info.tcp_hosts.push_back(reader.Text());
  info.job_options = reader.Text();
  if (!reader.ok()) return reader.result();
  return info;
}

Expected<Fd> Meeting::DialPeer(int peer, const std::string& purpose, Deadline deadline,
                               const std::function<Result()>& stop) const {
  const PeerInfo& other = peers[peer];
  std::vector<std::string> addresses;
  if (other.host_id == config.host_id) addresses.push_back(other.unix_address);
  if (other.host_id != config.host_id) {
    for (const auto& host : other.tcp_hosts) addresses.push_back(TcpAddress(host, other.tcp_port));
  }
  Result last(Code::kTransport, "it published no address");
  while (true) {
    for (const auto& address : addresses) {
      if (stop) RONDE_RETURN_IF_ERROR(stop());
      auto socket = Dial(address, std::min(deadline, After(3)));
      if (!socket.ok()) {
        last = socket.error();
        continue;
      }
      Hello hello{config.generation, purpose, config.rank, peer, RandomBytes(16)};
      std::string said = hello.Encode();
      auto handshake = [&]() -> Result {
        RONDE_RETURN_IF_ERROR(SendFrame(socket.value(), said, deadline));
        auto answer = Hear(socket.value(), deadline, stop);
        if (!answer.ok()) return answer.error();
        if (answer->size() != 48) return Result(Code::kTransport, "it gave a strange answer");
        std::string nonce = answer->substr(0, 16);
        if (nonce == hello.nonce || !EqualSecrets(answer->substr(16), Proof(config.secret, "accept", said, nonce))) {
          return Result(Code::kTransport, "it does not know this job's secret");
        }
        RONDE_RETURN_IF_ERROR(SendFrame(socket.value(), Proof(config.secret, "dial", said, nonce), deadline));
        auto welcome = Hear(socket.value(), deadline, stop);
        return welcome.ok() ? Ok() : welcome.error();
      };
      Result result = handshake();
      if (result.ok()) {
        TuneTcp(socket.value(), config.peer_timeout);
        return std::move(socket.value());
      }
      last = result;
    }
    if (Now() + kRetry >= deadline) break;
    std::this_thread::sleep_for(kRetry);
  }
  return Result(Code::kTimeout,
                other.Describe() + " could not be reached (" + purpose + " connection): " + last.message());
}

int Meeting::AcceptPeer(const Fd& listener, const std::string& purpose, Fd* result) const {
  if (!listener.valid()) return -1;
  auto socket = Accept(listener, Now());
  if (!socket.ok()) return -1;
  Deadline limit = After(kStrangerSeconds);
  auto refuse = [&](const char* why) {
    log.Info(std::string("refused a connection: ") + why);
    return -1;
  };
  auto said = RecvFrame(socket.value(), kHelloLimit, limit);
  Hello hello;
  if (!said.ok() || !Hello::Decode(said.value(), &hello)) return refuse("it is not from a rank of ronde");
  if (hello.generation != config.generation || hello.purpose != purpose || hello.to != config.rank || hello.from < 0 ||
      hello.from >= config.size || hello.from == config.rank) {
    return refuse("it was meant for another rank, purpose or init()");
  }
  std::string nonce = RandomBytes(16);
  if (!SendFrame(socket.value(), nonce + Proof(config.secret, "accept", said.value(), nonce), limit).ok()) {
    return refuse("it went away");
  }
  auto proof = RecvFrame(socket.value(), kHelloLimit, limit);
  if (!proof.ok() || !EqualSecrets(proof.value(), Proof(config.secret, "dial", said.value(), nonce))) {
    return refuse("it does not know this job's secret");
  }
  if (!SendFrame(socket.value(), "welcome", limit).ok()) return refuse("it went away");
  TuneTcp(socket.value(), config.peer_timeout);
  *result = std::move(socket.value());
  return hello.from;
}

}  // namespace ronde
