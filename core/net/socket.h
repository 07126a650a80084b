// Stream sockets with one owner each. All are non-blocking and close-on-exec; every wait takes a deadline; a closed
// peer is an error value, never a signal.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace ronde {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// "unix:/path", "unix:@abstract", "tcp:1.2.3.4:5", "tcp:[::1]:5".
Expected<Fd> Listen(const std::string& address);
// The address a listener got ("tcp:127.0.0.1:0" asks for any port).
Expected<std::string> BoundAddress(const Fd& listener, const std::string& asked);
// A host name's addresses are tried one after the other. (Names take as long as the resolver takes.)
Expected<Fd> Dial(const std::string& address, Deadline deadline);
// Begins to connect. Once the socket can be written, DialOutcome tells how it went.
Expected<Fd> StartDial(const std::string& address);
Result DialOutcome(const Fd& socket);
Expected<Fd> Accept(const Fd& listener, Deadline deadline);

// Waits until the descriptor can be read (or written). False: the deadline passed.
bool WaitReadable(int fd, Deadline deadline);
bool WaitWritable(int fd, Deadline deadline);
// Waits until poll finds something, or the deadline (max: none). True: it found something, in `polled`.
bool WaitAny(std::vector<pollfd>* polled, Deadline deadline);

Result SendAll(const Fd& socket, std::span<const std::byte> data, Deadline deadline);
Result RecvAll(const Fd& socket, std::span<std::byte> data, Deadline deadline);
// A 32-bit length, then so many bytes. A length above `limit` is refused before anything is allocated.
Result SendFrame(const Fd& socket, std::string_view frame, Deadline deadline);
Expected<std::string> RecvFrame(const Fd& socket, std::size_t limit, Deadline deadline);

// File descriptors over a Unix socket, with one byte each.
Result SendDescriptors(const Fd& socket, const std::vector<int>& descriptors, Deadline deadline);
Expected<std::vector<Fd>> RecvDescriptors(const Fd& socket, std::size_t count, Deadline deadline);
// Whether the process at the other end of a Unix socket belongs to this user.
bool SameUser(const Fd& socket);
// A descriptor that can be read once the process at the other end of a Unix socket has ended, also while children that
// it forked hold its sockets open. Invalid for this process itself, over TCP, or where the kernel cannot tell.
Fd PeerProcess(const Fd& socket);

// Addresses of the interfaces that are up and have a carrier, loopback last.
struct InterfaceAddress {
  std::string name;
  std::string address;  // "10.0.0.1" or "fd00::1"
  int prefix = 0;       // bits of the network's part
  bool loopback = false;
};
// Whether an address of another host lies in this interface's network.
bool InSubnet(const InterfaceAddress& own, const std::string& address);
std::vector<InterfaceAddress> InterfaceAddresses();
std::string TcpAddress(const std::string& host, int port);

// Tunes a connection that carries control or data: no delay, keepalive within `peer_timeout` seconds. Unix: nothing.
void TuneTcp(const Fd& socket, double peer_timeout);

}  // namespace ronde
