// What the ranks of a job know of each other before they are connected, and what one rank's connections share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "net/socket.h"
#include "transport/tcp/factory.h"
#include "transport/tcp/handshake.h"

namespace ronde {

// The contents of a blob. The first three fields come first in every version of ronde.
struct PeerInfo {
  std::string version;
  int rank = 0;
  std::string host_name;
  std::string host_id;
  std::string unix_address;
  int tcp_port = 0;
  std::vector<std::string> tcp_hosts;
  std::string job_options;
  SharedOptions shared;

  std::string Encode() const;
  // Of a blob of another version, only the first three fields.
  static Expected<PeerInfo> Decode(const std::string& blob, const std::string& own_version);
  std::string Describe() const { return "rank " + std::to_string(rank) + " (host " + host_name + ")"; }
};

// Those of the interfaces that `wanted` names or whose addresses are in a network of it ("eth0,10.0.0.0/8"); empty:
// all. An error says which there are.
Expected<std::vector<InterfaceAddress>> ChooseInterfaces(const std::vector<InterfaceAddress>& own,
                                                         const std::string& wanted);
// What to publish of this host's addresses: loopback only where there is nothing else.
std::vector<std::string> AddressesToPublish(const std::vector<InterfaceAddress>& own);
// The addresses of another host, in the order in which to dial them: those in a network of ours first. Addresses that
// this host has too (docker0's, say) lead back here, so they count only where there are no others.
std::vector<std::string> AddressesToDial(const std::vector<InterfaceAddress>& own,
                                         const std::vector<std::string>& theirs);

struct Meeting {
  EndpointConfig config;
  Log log;
  std::vector<InterfaceAddress> interfaces;
  Fd unix_listener;
  Fd tcp_listener;
  std::vector<PeerInfo> peers;  // by rank, once connected
  std::unique_ptr<Acceptor> acceptor;

  // Where to dial a peer, best first.
  std::vector<std::string> AddressesOf(int peer) const;
};

}  // namespace ronde
