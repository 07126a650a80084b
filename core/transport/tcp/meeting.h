// How two processes of a job recognise each other, and what each tells the rest before it is connected.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/socket.h"
#include "transport/tcp/factory.h"

namespace ronde {

// The contents of a blob.
struct PeerInfo {
  std::string version;
  int rank = 0;
  std::string host_id;
  std::string host_name;
  std::string unix_address;
  int tcp_port = 0;
  std::vector<std::string> tcp_hosts;  // best first
  std::string job_options;

  std::string Encode() const;
  static Expected<PeerInfo> Decode(const std::string& blob);
  std::string Describe() const { return "rank " + std::to_string(rank) + " (host " + host_name + ")"; }
};

// Listeners and what is known of everybody: shared by the objects that make connections, now and later.
struct Meeting {
  EndpointConfig config;
  Log log;
  Fd unix_listener;
  Fd tcp_listener;
  std::vector<PeerInfo> peers;  // by rank, once connected

  // Both sides prove the secret over (job generation, purpose, both ranks, both nonces).
  // `stop` is asked now and then while waiting.
  Expected<Fd> DialPeer(int peer, const std::string& purpose, Deadline deadline,
                        const std::function<Result()>& stop = nullptr) const;
  // Takes one waiting connection, if any. Returns the peer's rank, or -1 when there was none or it was a stranger.
  int AcceptPeer(const Fd& listener, const std::string& purpose, Fd* socket) const;
};

}  // namespace ronde
