// The engine of one rank: joins negotiation to execution. An object; several live in one process.
//
// Threads (docs/threads.md): the control thread owns the negotiator and the mailbox; the executor thread owns the
// backends and runs batches in their order; users' threads submit and wait.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "base/log.h"
#include "base/options.h"
#include "engine/metrics.h"
#include "engine/operation.h"
#include "transport/transport.h"

namespace ronde {

struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<std::string> host_ids;    // by rank
  std::vector<std::string> host_names;  // by rank

  int local_rank() const;  // among the ranks of this host
  int local_size() const;
  int cross_rank() const;  // of this host among those that have this local rank
  int cross_size() const;
  bool is_homogeneous() const;
  std::string Describe(int other) const;  // "rank 2 (host b)"
};

struct EngineConfig {
  Options options;
  Topology topology;
  Log log;
  std::unique_ptr<Mailbox> mailbox;
  std::vector<std::unique_ptr<Backend>> backends;  // the first that supports a row runs it
  // Kept alive behind the backends, which borrow them; destroyed after them.
  std::unique_ptr<Segment> segment;
  std::unique_ptr<Transport> transport;
  // Why a rank died ("signal 9"), if somebody knows it within a moment; empty: nobody does. Called on the control
  // thread; may block until the deadline.
  std::function<std::string(int rank, Deadline deadline)> cause_of_death;
};

class Engine {
 public:
  static std::unique_ptr<Engine> Create(EngineConfig config);
  // Ends as Shutdown would if that was not called.
  virtual ~Engine() = default;

  virtual const Topology& topology() const = 0;
  virtual bool has_shared_memory() const = 0;
  // What Submit would refuse at once. Memory may still be missing or move until then: only its presence is looked at.
  virtual Result Check(const Request& request) const = 0;
  // On error nothing was submitted and `done` is not called; else the operation ends exactly once.
  virtual Result Submit(std::shared_ptr<Operation> operation) = 0;
  // Waits for a submitted operation and counts as "blocked in it" for stall reports. False: the deadline passed.
  virtual bool Wait(Operation& operation, Deadline deadline) = 0;
  // Memory that the ranks of this host reach without copies, ordinary memory where they share none. At least 64-byte
  // aligned; may outlive the engine. Any thread.
  virtual Expected<std::shared_ptr<std::byte>> AllocateShared(std::size_t bytes) const = 0;
  // Members of a live process set, ascending; an error when there is none of this id.
  virtual Expected<std::vector<int>> Members(SetId set) const = 0;
  // Starts to write what this rank does to a file, and ends it. An error when a timeline is open already or the file
  // cannot be written; stopping without one is no error. Ranks but 0 write only with the option TIMELINE_ALL_RANKS,
  // each a file of its own (TimelinePath). Any thread but the engine's own.
  virtual Result StartTimeline(const std::string& path, bool mark_cycles) = 0;
  virtual void StopTimeline() = 0;
  // What it did so far.
  virtual MetricRows Metrics() const = 0;
  // Ends the engine. An empty failure says goodbye: running operations finish, pending ones fail with ShutdownError.
  // Else the other ranks abort and are told the failure. Idempotent; any thread but the engine's own.
  virtual void Shutdown(const std::string& failure) = 0;
};

}  // namespace ronde
