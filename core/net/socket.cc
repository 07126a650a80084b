#include "net/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>

namespace ronde {
namespace {

Result SystemError(const std::string& what, int error = errno) {
  return Result(Code::kTransport, what + ": " + std::strerror(error));
}

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  int family = 0;
};

// One address, or all that a host name has.
Expected<std::vector<Address>> Parse(const std::string& text) {
  Address address;
  if (text.rfind("unix:", 0) == 0) {
    std::string path = text.substr(5);
    auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
    if (path.empty() || path.size() >= sizeof un->sun_path) {
      return Result(Code::kArgument, "'" + text + "': a Unix socket's path has 1 to 107 characters");
    }
    address.family = un->sun_family = AF_UNIX;
    std::memcpy(un->sun_path, path.data(), path.size());
    if (path[0] == '@') un->sun_path[0] = '\0';
    address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + (path[0] == '@' ? 0 : 1));
    return std::vector{address};
  }
  if (text.rfind("tcp:", 0) == 0) {
    auto colon = text.rfind(':');
    std::string host = text.substr(4, colon > 4 ? colon - 4 : 0), port = text.substr(colon + 1);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
    if (error != 0 || found == nullptr) {
      return Result(Code::kArgument, "'" + text + "' is no address: " + gai_strerror(error));
    }
    std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
    std::vector<Address> addresses;
    for (const addrinfo* item = found; item != nullptr; item = item->ai_next) {
      std::memcpy(&address.storage, item->ai_addr, item->ai_addrlen);
      address.size = item->ai_addrlen;
      address.family = item->ai_family;
      addresses.push_back(address);
    }
    return addresses;
  }
  return Result(Code::kArgument, "'" + text + "' is no address; it starts with unix: or tcp:");
}

int Milliseconds(Deadline deadline) {
  if (deadline == Deadline::max()) return -1;
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
}

bool WaitFor(int fd, short events, Deadline deadline) {
  pollfd item{fd, events, 0};
  while (true) {
    int ready = poll(&item, 1, Milliseconds(deadline));
    if (ready > 0) return true;
    if (ready == 0 && Now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return true;  // the next call on the descriptor reports what is wrong
  }
}

Result Late(const char* what) { return Result(Code::kTimeout, std::string(what) + " took too long"); }

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

bool WaitReadable(int fd, Deadline deadline) { return WaitFor(fd, POLLIN, deadline); }
bool WaitWritable(int fd, Deadline deadline) { return WaitFor(fd, POLLOUT, deadline); }

bool WaitAny(std::vector<pollfd>* polled, Deadline deadline) {
  return poll(polled->data(), polled->size(), Milliseconds(deadline)) > 0;
}

Expected<Fd> Listen(const std::string& text) {
  auto addresses = Parse(text);
  if (!addresses.ok()) return addresses.error();
  const Address* address = &addresses->front();
  Fd fd(socket(address->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return SystemError("cannot make a socket");
  int off = 0, on = 1;
  if (address->family == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (address->family != AF_UNIX) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address->storage), address->size) != 0) {
    return SystemError("cannot listen on " + text);
  }
  if (listen(fd.get(), 512) != 0) return SystemError("cannot listen on " + text);
  return fd;
}

std::string TcpAddress(const std::string& host, int port) {
  return (host.find(':') != std::string::npos ? "tcp:[" + host + "]:" : "tcp:" + host + ":") + std::to_string(port);
}

Expected<std::string> BoundAddress(const Fd& listener, const std::string& asked) {
  if (asked.rfind("tcp:", 0) != 0) return asked;
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return SystemError("cannot name a socket");
  }
  int port = ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port
                                                 : reinterpret_cast<sockaddr_in*>(&storage)->sin_port);
  return asked.substr(0, asked.rfind(':') + 1) + std::to_string(port);
}

namespace {

// `full`: the listener's queue was, which is no answer.
Expected<Fd> Connect(const Address& address, const std::string& text, bool* full) {
  *full = false;
  Fd fd(socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return SystemError("cannot make a socket");
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0) return fd;
  if (errno == EINPROGRESS || errno == EINTR) return fd;
  *full = errno == EAGAIN;
  return SystemError("cannot connect to " + text);
}

}  // namespace

Expected<Fd> StartDial(const std::string& text) {
  auto addresses = Parse(text);
  if (!addresses.ok()) return addresses.error();
  bool full = false;
  return Connect(addresses->front(), text, &full);
}

Result DialOutcome(const Fd& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return SystemError("cannot connect");
  return error == 0 ? Ok() : SystemError("cannot connect", error);
}

Expected<Fd> Dial(const std::string& text, Deadline deadline) {
  auto addresses = Parse(text);
  if (!addresses.ok()) return addresses.error();
  Result last;
  for (const Address& address : addresses.value()) {
    bool full = true;
    while (full) {
      auto fd = Connect(address, text, &full);
      if (fd.ok()) {
        if (!WaitFor(fd->get(), POLLOUT, deadline)) return Late(("connecting to " + text).c_str());
        last = DialOutcome(fd.value()).Because(text);
        if (last.ok()) return fd;
      } else if (full) {  // it will be served
        if (Now() >= deadline) return Late(("connecting to " + text).c_str());
        usleep(2000);
      } else {
        last = fd.error();
      }
    }
  }
  return last;
}

Expected<Fd> Accept(const Fd& listener, Deadline deadline) {
  while (true) {
    Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.valid()) return fd;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return SystemError("cannot accept a connection");
    if (!WaitFor(listener.get(), POLLIN, deadline)) return Late("waiting for a connection");
  }
}

Result SendAll(const Fd& socket, std::span<const std::byte> data, Deadline deadline) {
  while (!data.empty()) {
    ssize_t n = send(socket.get(), data.data(), data.size(), MSG_NOSIGNAL);
    if (n >= 0) {
      data = data.subspan(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!WaitFor(socket.get(), POLLOUT, deadline)) return Late("sending");
    } else if (errno != EINTR) {
      return SystemError("cannot send");
    }
  }
  return Ok();
}

Result RecvAll(const Fd& socket, std::span<std::byte> data, Deadline deadline) {
  while (!data.empty()) {
    ssize_t n = recv(socket.get(), data.data(), data.size(), 0);
    if (n > 0) {
      data = data.subspan(static_cast<std::size_t>(n));
    } else if (n == 0) {
      return Result(Code::kPeerLost, "the connection was closed");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!WaitFor(socket.get(), POLLIN, deadline)) return Late("receiving");
    } else if (errno != EINTR) {
      return SystemError("cannot receive");
    }
  }
  return Ok();
}

Result SendFrame(const Fd& socket, std::string_view frame, Deadline deadline) {
  auto size = static_cast<std::uint32_t>(frame.size());
  std::string bytes(sizeof size, '\0');
  std::memcpy(bytes.data(), &size, sizeof size);
  bytes += frame;
  return SendAll(socket, std::as_bytes(std::span(bytes)), deadline);
}

Expected<std::string> RecvFrame(const Fd& socket, std::size_t limit, Deadline deadline) {
  std::uint32_t size = 0;
  RONDE_RETURN_IF_ERROR(RecvAll(socket, std::as_writable_bytes(std::span(&size, 1)), deadline));
  if (size > limit) return Result(Code::kTransport, "a frame of " + std::to_string(size) + " bytes was refused");
  std::string frame(size, '\0');
  RONDE_RETURN_IF_ERROR(RecvAll(socket, std::as_writable_bytes(std::span(frame)), deadline));
  return frame;
}

Result SendDescriptors(const Fd& socket, const std::vector<int>& descriptors, Deadline deadline) {
  for (int descriptor : descriptors) {
    char byte = 'd';
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    while (sendmsg(socket.get(), &message, MSG_NOSIGNAL) != 1) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) return SystemError("cannot pass a file descriptor");
      if (!WaitFor(socket.get(), POLLOUT, deadline)) return Late("passing a file descriptor");
    }
  }
  return Ok();
}

Expected<std::vector<Fd>> RecvDescriptors(const Fd& socket, std::size_t count, Deadline deadline) {
  std::vector<Fd> descriptors;
  while (descriptors.size() < count) {
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t n = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!WaitFor(socket.get(), POLLIN, deadline)) return Late("waiting for a file descriptor");
      continue;
    }
    if (n < 0) return SystemError("cannot receive a file descriptor");
    if (n == 0) return Result(Code::kPeerLost, "the connection was closed");
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) {
      return Result(Code::kTransport, "no file descriptor came where one was expected");
    }
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    descriptors.emplace_back(descriptor);
  }
  return descriptors;
}

bool SameUser(const Fd& socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

Fd PeerProcess(const Fd& socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return Fd();
  if (peer.pid <= 0 || peer.pid == getpid()) return Fd();
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

namespace {

// The bytes of an IPv4 or IPv6 address; empty: neither.
std::string AddressBytes(const std::string& text) {
  char bytes[16];
  if (inet_pton(AF_INET, text.c_str(), bytes) == 1) return std::string(bytes, 4);
  if (inet_pton(AF_INET6, text.c_str(), bytes) == 1) return std::string(bytes, 16);
  return "";
}

int PrefixBits(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  std::string_view bytes;
  if (mask->sa_family == AF_INET) {
    bytes = {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in*>(mask)->sin_addr), 4};
  } else if (mask->sa_family == AF_INET6) {
    bytes = {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr), 16};
  }
  int bits = 0;
  for (unsigned char byte : bytes) bits += std::popcount(byte);
  return bits;
}

}  // namespace

bool InSubnet(const InterfaceAddress& own, const std::string& address) {
  std::string a = AddressBytes(own.address), b = AddressBytes(address);
  if (a.empty() || a.size() != b.size() || own.prefix <= 0) return false;
  for (int bit = 0; bit < std::min(own.prefix, static_cast<int>(8 * a.size())); ++bit) {
    if ((a[bit / 8] ^ b[bit / 8]) & (0x80 >> bit % 8)) return false;
  }
  return true;
}

std::vector<InterfaceAddress> InterfaceAddresses() {
  std::vector<InterfaceAddress> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    constexpr unsigned kUsable = IFF_UP | IFF_RUNNING;
    if (item->ifa_addr == nullptr || (item->ifa_flags & kUsable) != kUsable) continue;
    char text[INET6_ADDRSTRLEN] = {};
    if (item->ifa_addr->sa_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(item->ifa_addr)->sin_addr, text, sizeof text);
    } else if (item->ifa_addr->sa_family == AF_INET6) {
      auto* address = reinterpret_cast<sockaddr_in6*>(item->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;  // means nothing without this host's scope
      inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
    } else {
      continue;
    }
    addresses.push_back({item->ifa_name, text, PrefixBits(item->ifa_netmask), (item->ifa_flags & IFF_LOOPBACK) != 0});
  }
  std::stable_sort(addresses.begin(), addresses.end(),
                   [](const auto& a, const auto& b) { return a.loopback < b.loopback; });
  return addresses;
}

void TuneTcp(const Fd& socket, double peer_timeout) {
  int on = 1;
  if (setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) return;  // a Unix socket
  int seconds = std::max(1, static_cast<int>(peer_timeout / 3));
  int probes = 3;
  auto milliseconds = static_cast<unsigned>(peer_timeout * 1000);
  setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

}  // namespace ronde
