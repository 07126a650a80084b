// How two processes of a job recognise each other when one connects to the other: both prove that they know the job's
// secret over what the connection is for, without blocking, any number of them at a time.
//
//   dialer -> acceptor   hello: generation, purpose, both ranks, nonce A
//   acceptor -> dialer   nonce B, HMAC(secret, "accept", B, hello)
//   dialer -> acceptor   HMAC(secret, "dial", B, hello)
//   acceptor -> dialer   "welcome"
//
// The dialer may try several addresses side by side; it goes on past the second step with one of them only, so both
// sides keep the same connection.
#pragma once

#include <poll.h>

#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "net/socket.h"

namespace ronde {

struct Meeting;

// Frames (32-bit length, bytes) over a non-blocking socket. Never reads beyond the frame it is in: what follows the
// last one belongs to whoever gets the socket.
class FramePipe {
 public:
  enum class Step { kWaiting, kFrame, kEnded };

  explicit FramePipe(Fd socket) : socket_(std::move(socket)) {}
  void Queue(std::string_view frame);
  // Sends what the socket takes. False: it is broken.
  bool Flush();
  // Flushes, then reads. kFrame: Take() has it. kEnded: closed, broken or not talking in frames.
  Step Move();
  std::string Take();
  bool sent() const { return out_.empty(); }
  pollfd Watch() const { return {socket_.get(), static_cast<short>(sent() ? POLLIN : POLLOUT), 0}; }
  const Fd& socket() const { return socket_; }
  Fd Release() { return std::move(socket_); }

 private:
  Fd socket_;
  std::string out_;
  std::string in_;
};

struct Hello {
  std::uint64_t generation = 0;
  std::string purpose;
  int from = -1, to = -1;
  std::string nonce;

  std::string Encode() const;
  static bool Decode(const std::string& text, Hello* hello);
};

// The accepting side of this rank's listeners. Strangers cost a file descriptor for some seconds, never a wait. Used by
// one thread at a time: the one in Endpoint::Connect, later the transport's.
class Acceptor {
 public:
  explicit Acceptor(const Meeting* meeting) : meeting_(*meeting) {}  // owns this object
  // Goes on with all that wait. Whether anything moved.
  bool Progress();
  // The connection that `peer` made for this purpose, if it is there.
  Fd Take(const std::string& purpose, int peer);
  // Adds what to poll before the next Progress. Returns when to call it without.
  Deadline Watch(std::vector<pollfd>* polled) const;

 private:
  struct Pending {
    FramePipe pipe;
    TimePoint since;
    Hello hello;
    std::string said;   // the hello's bytes
    std::string nonce;  // ours; empty before the hello came
    bool proved = false;
  };
  enum class State { kOpen, kProved, kOver };
  void Welcome();
  State Advance(Pending& pending, bool* moved);
  void Refuse(const char* why) const;

  const Meeting& meeting_;
  std::list<Pending> pending_;
  std::map<std::pair<std::string, int>, Fd> proved_;
  TimePoint paused_until_{};  // after a failure to accept
};

// One connection to `peer`: tries its addresses, the best first, each next one a moment later or once the ones before
// failed; what failed is tried again after a while.
class Dialer {
 public:
  Dialer(const Meeting* meeting, int peer, std::string purpose);  // `meeting` outlives this object
  // Whether anything moved.
  bool Progress();
  bool done() const { return done_.valid(); }
  Fd Take() { return std::move(done_); }
  Deadline Watch(std::vector<pollfd>* polled) const;
  // What went wrong last, and since when no address of the peer takes a connection.
  const Result& last() const { return last_; }
  TimePoint unheard_since() const { return unheard_since_; }

 private:
  struct Attempt {
    FramePipe pipe;
    Hello hello;
    TimePoint since;
    bool connected = false;
  };
  struct Candidate {
    std::string address;
    TimePoint start;  // when to try it (again)
    bool tried = false;
    std::optional<Attempt> attempt;
  };
  Result Start(Candidate& candidate);
  Result Advance(Candidate& candidate, bool* moved);

  const Meeting& meeting_;
  const int peer_;
  const std::string purpose_;
  std::vector<Candidate> candidates_;
  Candidate* chosen_ = nullptr;  // gave the right answer; the others rest
  Fd done_;
  Result last_;
  TimePoint unheard_since_;
};

}  // namespace ronde
