// Entries that some ranks below this node are ready for and others are not yet.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "negotiation/agreement.h"
#include "negotiation/ledger.h"
#include "negotiation/process_sets.h"

namespace ronde {

// What one rank brought to an entry.
struct Contribution {
  int rank = 0;
  Values values;
};
struct Variant {
  DefinitionPtr definition;
  std::vector<Contribution> contributions;
};
Opinion OpinionOf(const Variant& variant);
// What ranks say of one entry: all variants have its key.
struct EntryReport {
  std::uint64_t number = 0;
  std::vector<Variant> variants;
};

struct PendingEntry {
  std::uint64_t number = 0;
  std::vector<Variant> variants;  // one, unless ranks disagree
  std::size_t ready = 0;          // ranks heard of
  std::vector<bool> heard;        // which, by rank
  TimePoint since;
  std::size_t reported = 0;       // how many the parent was told of, because the entry stalls
  std::set<int> ready_elsewhere;  // at rank 0: ranks that a node below reported ready in a partial, stalled entry
  Duration next_warning{};        // at rank 0

  SetId set() const { return variants.front().definition->definition.set; }
  std::vector<int> ReadyRanks() const;
};

// An entry is complete when every member of its set below this node is ready, has joined or has departed. What ranks
// have to say of an entry leaves a node in one message, all variants together.
class PendingTable {
 public:
  // Gets each complete entry, which is no longer in the table. `conflict`: why it must fail although its own reports
  // may agree.
  using Complete = std::function<void(PendingEntry entry, const Result& conflict)>;
  // Ordered by key, so that whatever walks it does so in the same order in every run.
  using Entries = std::map<std::string, PendingEntry>;

  PendingTable(const TreePosition& tree, const ProcessSets& sets, const Absence& absence, Complete complete)
      : tree_(tree), sets_(sets), absence_(absence), complete_(std::move(complete)) {}

  // False: a rank reports twice.
  bool Report(EntryReport report, TimePoint now);
  // The entry, made if it is new: a node below reports it although nothing complete has come from there.
  PendingEntry& ReportPartial(const DefinitionPtr& definition, std::uint64_t number, TimePoint since);
  // Somebody joined or left, so entries may have become complete.
  void Reconsider();
  // Completes entries that can only wait for each other: a tensor is in a group on one rank and alone, or in another
  // group, on another rank, and every member is ready for one of them. None of them could ever be ready everywhere,
  // because a name in flight is not given away. Off the fast path: called now and then while something is pending.
  void CompleteConflicting();
  void RemoveSet(SetId set);
  void Clear() { entries_.clear(); }

  bool empty() const { return entries_.empty(); }
  Entries& entries() { return entries_; }

 private:
  bool Covered(const PendingEntry& entry, const std::vector<int>& below) const;
  void Finish(Entries::iterator place, const Result& conflict);

  const TreePosition& tree_;
  const ProcessSets& sets_;
  const Absence& absence_;
  const Complete complete_;
  Entries entries_;
};

}  // namespace ronde
