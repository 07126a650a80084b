// Negotiation: one rank's part in agreeing which operations run, in which order, on all ranks. Pure: no thread, socket,
// clock or device. Time comes in as an argument, messages go in and out as bytes, decisions come out as actions.
//
// Vocabulary.
//   entry       one submitted operation (a single tensor or a group), matched across ranks by its key: (set, name), or
//               for unnamed operations (set, op, submission number).
//   definition  what must agree (wire/definition.h). Rank 0 gives each an id. Ids are never reused and never change
//   their
//               meaning, so a report by id always means the same definition, also while another one for the same name
//               is under way; an evicted id stays readable until everybody below acknowledged the eviction.
//   report      "these ranks are ready for this entry", going up the tree; merged by a node when all members below it
//               (joined ranks aside) are ready.
//   batch       the entries of one process set that rank 0 commits together. Batches of all sets form one total order,
//               equal on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/result.h"
#include "negotiation/ledger.h"
#include "wire/definition.h"

namespace ronde {

// After this a stall aborts the job when every missing rank is itself blocked inside ronde, unless the user set a
// limit.
constexpr Duration kDefaultStallAbort = std::chrono::seconds(600);

struct NegotiatorConfig {
  int rank = 0;
  int parent = -1;                      // -1: rank 0
  std::vector<int> children;            // direct ones
  std::vector<int> parents;             // by rank: the whole tree, to know who is below whom
  std::vector<std::string> host_names;  // by rank, for messages
  std::int64_t cache_capacity = 65536;
  Duration linger{};  // "cycle time"
  bool stall_check = true;
  Duration stall_warning{};
  std::optional<Duration> stall_abort;  // set: always applies. Zero: never. Unset: the default rule (see stall.h)
  int max_unfinished_batches = 2;       // credit per set
};

// A ticket names a local submission; the engine chooses it, never 0.
using Ticket = std::uint64_t;

struct AgreedEntry {
  std::shared_ptr<const Definition> definition;
  std::uint64_t number = 0;    // submission number, if it is unnamed
  Ticket ticket = 0;           // 0: not submitted here (not a member, or joined)
  std::vector<int> joined;     // members (job ranks) that take part with the neutral element
  std::vector<Values> values;  // ragged operations: by member, in member order; a joined member's: zeros
  Result error;                // not ok: the entry fails everywhere with this
  SetId new_set = 0;           // AddProcessSet: the id given (that of an equal older set when `existed`)
  bool existed = false;
  int last_joined = -1;  // Join: the last rank to join
};

struct Batch {
  SetId set = kGlobalSet;
  std::uint64_t number = 0;  // per set
  std::vector<AgreedEntry> entries;
};

// What this rank's threads wait in, for stall reports. Given by the engine on demand.
struct BlockedReport {
  bool blocked = false;  // a thread of this rank is inside a ronde wait now
  std::string where;     // "allreduce x", or "not inside ronde"
};

// A rank was heard to be ready for an entry; at a node of the tree these are the ranks below it. For timelines.
struct Readiness {
  std::shared_ptr<const Definition> definition;
  std::uint64_t number = 0;  // as in AgreedEntry
  int rank = 0;
  Ticket ticket = 0;  // of a local submission
  TimePoint time;
};

struct NegotiatorCounts {
  std::int64_t cache_hits = 0;    // local submissions whose definition travels as an id
  std::int64_t cache_misses = 0;  // those that travel whole
  std::int64_t stalls = 0;        // warnings, at rank 0
};

using Messages = std::vector<std::pair<int, std::vector<std::byte>>>;

struct Actions {
  Messages messages;                              // to peers, in this order
  std::vector<Batch> batches;                     // to execute, in this order; sets not ours included
  std::vector<std::pair<Ticket, Result>> failed;  // local submissions that end without a batch
  std::vector<std::pair<LogLevel, std::string>> logs;
  std::vector<Readiness> ready;  // only after RecordReadiness(true)
  // Not ok: the tree is gone because its upper end left in good order. What was committed still runs; everything else,
  // now and later, fails with this.
  Result closed;
  Result abort;  // not ok: the engine must stop for good with this cause; all later submissions fail with it
};

class Negotiator {
 public:
  virtual ~Negotiator() = default;
  // Local submissions. A name already in flight here (a group reserves its members' names) fails at once in `failed`,
  // so does one on an unknown set, a set without this rank, or after goodbye, abort or while joined.
  virtual void Submit(Ticket ticket, const DefinitionPtr& definition, const Values& values, TimePoint now) = 0;
  // The definition as it is known here. Keep it for the next submission: as long as it has an id, this returns the
  // same.
  virtual DefinitionPtr Intern(const Definition& definition) = 0;
  virtual void Receive(int peer, std::span<const std::byte> message, TimePoint now) = 0;
  // The executor finished a batch of this set here (only the set's lowest member's report travels).
  virtual void Finished(SetId set, std::uint64_t number, TimePoint now) = 0;
  // Stall timers, linger. Call when NextWake() has come (calling early is harmless).
  virtual void Tick(TimePoint now, const BlockedReport& blocked) = 0;
  virtual TimePoint NextWake() const = 0;  // TimePoint::max(): no timer needed
  // This rank leaves: its pending submissions fail here with ShutdownError; operations that need it fail everywhere
  // with an error that names it. `goodbye_complete()` once all direct neighbours said goodbye or were lost.
  virtual void Goodbye(TimePoint now) = 0;
  virtual bool goodbye_complete() const = 0;
  // A direct neighbour's connection ended without goodbye, or this rank fails: everybody aborts with the cause.
  // After a goodbye from that peer, Lost is no error.
  virtual void Lost(int peer, const Result& cause, TimePoint now) = 0;
  virtual bool HasSaidGoodbye(int peer) const = 0;
  virtual void Abort(const Result& cause) = 0;
  // Members of a live set, ascending; null if unknown. `kGlobalSet` always exists.
  virtual const std::vector<int>* Members(SetId set) const = 0;
  // All that has been decided since the last call, in place of what is there. Memory of the lists that are there is
  // used again, that of batches and messages included: give back what Take filled.
  virtual void Take(Actions* actions) = 0;
  // Something is pending here: the control thread should poll eagerly before it sleeps.
  virtual bool busy() const = 0;
  // Whether Actions::ready is filled from now on.
  virtual void RecordReadiness(bool on) = 0;
  virtual NegotiatorCounts counts() const = 0;
};

std::unique_ptr<Negotiator> CreateNegotiator(const NegotiatorConfig& config);

}  // namespace ronde
