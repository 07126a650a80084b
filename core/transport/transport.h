// Bytes between ranks: the three seams over which everything distributed is written. `local/` (threads of one process),
// `shm/` and `tcp/` implement them; each of those folders exports only its factory.h.
//
// Ranks are those of the job. Every wait takes a deadline. Abort wakes every waiter of the object, now and later, with
// the cause; it may be called from any thread, more than once (the first cause stays).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "transport/shared_heap.h"

namespace ronde {

// Data between a pair of ranks, matched by tag. Used by one thread at a time (the executor), Abort aside.
class Transport {
 public:
  using Handle = std::uint64_t;
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Starts a transfer. The span is borrowed until Wait(handle) returned. Transfers of a pair with equal tags match in
  // the order of the calls; a size other than the sender's is an error on the receiver.
  virtual Handle Send(int peer, std::uint64_t tag, std::span<const std::byte> data) = 0;
  virtual Handle Recv(int peer, std::uint64_t tag, std::span<std::byte> data) = 0;
  // Makes progress on all transfers until this one is complete. Each handle is waited for once.
  virtual Result Wait(Handle handle, Deadline deadline) = 0;
  virtual void Abort(const Result& cause) = 0;
};

// Small whole messages of the control plane, ordered per pair of ranks. Used by one thread at a time (whoever drives
// the engine), except Ring, which any thread may call, and Wait, which the control thread may be in meanwhile.
class Mailbox {
 public:
  struct Event {
    int peer = -1;
    std::vector<std::byte> message;
    // Not ok: the connection to `peer` ended (its process died or the link broke); `message` is empty. A peer that
    // closed after both sides said goodbye gives no event: the engine decides by its own messages what an end means.
    Result lost;
  };
  virtual ~Mailbox() = default;
  // Queues a copy; never blocks for the peer. A lost peer's messages are dropped (its Event says so).
  virtual void Post(int peer, std::span<const std::byte> message) = 0;
  // The next event that has arrived, without waiting. False: none.
  virtual bool Take(Event* event) = 0;
  // Sleeps until an event can be taken, Ring was called since the last Wait, or the deadline (Deadline::max(): none
  // needed, the caller has nothing that could stall). Yields a few times before it sleeps when `eager`.
  virtual void Wait(Deadline deadline, bool eager) = 0;
  // Any thread, async: makes the present or next Wait return, once; Take leaves it alone.
  virtual void Ring() = 0;
  // Sends what Post queued, waiting at most until the deadline. For shutdown.
  virtual Result Flush(Deadline deadline) = 0;
};

// Memory that the ranks of one host read in each other: every rank owns a ring of bytes, three progress counters and a
// heap of memory to lend, out of which its process may have tensors.
// Counters are 64-bit, only grow, and count chunks job-wide in Go order (see collectives/chunks.h). The owner writes
// its ring and counters; the others only read, but for what it lends of its heap. Used by the executor thread, Abort
// aside.
class Segment {
 public:
  enum Stage : int {
    kPacked = 0,    // chunks below the count are in the ring, as sources
    kReduced = 1,   // ... the owner's shards of those chunks are in the ring, as results
    kConsumed = 2,  // ... this rank has read all it needs of everybody's chunks
    kNumStages = 3,
  };
  virtual ~Segment() = default;
  // Job ranks that share this segment, ascending, this rank among them.
  virtual const std::vector<int>& ranks() const = 0;
  virtual int rank() const = 0;
  virtual std::size_t ring_bytes() const = 0;
  // The ring of a rank (job rank) in this process's address space, 64-byte aligned. Write only your own.
  virtual std::byte* Peer(int rank) const = 0;
  // Sets this rank's counter (release order: what was written before is visible to who awaits it).
  virtual void Publish(Stage stage, std::uint64_t count) = 0;
  // Returns when the peer's counter is at least `count` (acquire order).
  virtual Result Await(int peer, Stage stage, std::uint64_t count, Deadline deadline) = 0;
  virtual void Abort(const Result& cause) = 0;

  // This rank's heap; null: it has none. Outlives the segment as long as somebody holds it.
  virtual std::shared_ptr<SharedHeap> heap() const = 0;
  // A rank's heap in this process's address space; empty: it has none.
  virtual std::span<std::byte> PeerHeap(int rank) const = 0;
  // For good: this rank touches no neighbour's memory any more, whatever it has consumed. Any thread.
  virtual void Leave() = 0;
  // Waits until the peer has consumed `count` chunks or left. False: the deadline passed first. Abort does not end it.
  virtual bool AwaitLeft(int peer, std::uint64_t count, Deadline deadline) = 0;
};

}  // namespace ronde
