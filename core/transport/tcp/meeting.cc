#include "transport/tcp/meeting.h"

#include <algorithm>
#include <cstdlib>

#include "wire/codec.h"

namespace ronde {
namespace {
constexpr char kMagic[] = "ronde-blob-1";
}  // namespace

std::string PeerInfo::Encode() const {
  Writer writer;
  writer.Text(kMagic);
  writer.Text(version);
  writer.Signed(rank);
  writer.Text(host_name);
  writer.Text(host_id);
  writer.Text(unix_address);
  writer.Signed(tcp_port);
  writer.Unsigned(tcp_hosts.size());
  for (const auto& host : tcp_hosts) writer.Text(host);
  writer.Text(job_options);
  writer.Unsigned(shared.ring_bytes);
  writer.Unsigned(shared.shared_memory);
  writer.Double(shared.peer_timeout);
  auto bytes = writer.Take();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Expected<PeerInfo> PeerInfo::Decode(const std::string& blob, const std::string& own_version) {
  Reader reader(std::as_bytes(std::span(blob)));
  PeerInfo info;
  if (reader.Text() != kMagic) reader.Fail("not from a rank of ronde");
  info.version = reader.Text();
  info.rank = static_cast<int>(reader.Signed());
  info.host_name = reader.Text();
  if (reader.ok() && info.version != own_version) return info;
  info.host_id = reader.Text();
  info.unix_address = reader.Text();
  info.tcp_port = static_cast<int>(reader.Signed());
  for (std::size_t n = reader.Count(); n > 0 && reader.ok(); --n) info.tcp_hosts.push_back(reader.Text());
  info.job_options = reader.Text();
  info.shared.ring_bytes = reader.Unsigned();
  info.shared.shared_memory = reader.Unsigned() != 0;
  info.shared.peer_timeout = reader.Double();
  if (!reader.ok()) return reader.result();
  return info;
}

Expected<std::vector<InterfaceAddress>> ChooseInterfaces(const std::vector<InterfaceAddress>& own,
                                                         const std::string& wanted) {
  if (wanted.empty()) return own;
  std::vector<InterfaceAddress> chosen;
  std::string there;
  for (const auto& item : own) {
    bool matches = false;
    for (std::size_t begin = 0; begin <= wanted.size();) {
      std::size_t end = std::min(wanted.find(',', begin), wanted.size());
      std::string word = wanted.substr(begin, end - begin);
      begin = end + 1;
      auto slash = word.find('/');
      InterfaceAddress network;
      if (slash != std::string::npos) {
        network.address = word.substr(0, slash);
        network.prefix = std::atoi(word.c_str() + slash + 1);
      }
      matches |= slash == std::string::npos ? word == item.name : InSubnet(network, item.address);
    }
    if (matches) chosen.push_back(item);
    there += (there.empty() ? "" : ", ") + item.name + " " + item.address;
  }
  if (!chosen.empty()) return chosen;
  return Result(Code::kArgument, "this host has none of the network interfaces " + wanted +
                                     " (RONDE_NETWORK_INTERFACES); it has: " + (there.empty() ? "none" : there));
}

std::vector<std::string> AddressesToPublish(const std::vector<InterfaceAddress>& own) {
  std::vector<std::string> addresses;
  for (const auto& item : own) {
    if (!item.loopback) addresses.push_back(item.address);
  }
  if (addresses.empty()) {
    for (const auto& item : own) addresses.push_back(item.address);
  }
  return addresses;
}

std::vector<std::string> AddressesToDial(const std::vector<InterfaceAddress>& own,
                                         const std::vector<std::string>& theirs) {
  std::vector<std::string> addresses;
  for (const auto& address : theirs) {
    bool shared = std::any_of(own.begin(), own.end(), [&](const auto& item) { return item.address == address; });
    if (!shared) addresses.push_back(address);
  }
  if (addresses.empty()) return theirs;
  std::stable_partition(addresses.begin(), addresses.end(), [&](const std::string& address) {
    return std::any_of(own.begin(), own.end(), [&](const auto& item) { return InSubnet(item, address); });
  });
  return addresses;
}

std::vector<std::string> Meeting::AddressesOf(int peer) const {
  const PeerInfo& other = peers[peer];
  if (other.host_id == config.host_id) return {other.unix_address};
  std::vector<std::string> addresses;
  for (const auto& host : AddressesToDial(interfaces, other.tcp_hosts)) {
    addresses.push_back(TcpAddress(host, other.tcp_port));
  }
  return addresses;
}

}  // namespace ronde
