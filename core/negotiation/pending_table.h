// Entries that some ranks below this node are ready for and others are not yet.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "negotiation/agreement.h"
#include "negotiation/key_table.h"
#include "negotiation/ledger.h"
#include "negotiation/process_sets.h"

namespace ronde {

// What ranks say of one entry. Flat, so that one that is cleared and filled again allocates nothing.
struct EntryReport {
  // What one rank brought.
  struct Contribution {
    int rank = 0;
    std::uint32_t variant = 0;  // index
    std::size_t first_value = 0;
    std::size_t num_values = 0;
  };
  std::uint64_t number = 0;
  std::vector<DefinitionPtr> variants;  // one, unless ranks disagree. All have the entry's key
  std::vector<Contribution> contributions;
  std::vector<std::int64_t> values;  // those of all contributions

  void Clear();
  void Add(int rank, std::uint32_t variant, std::span<const std::int64_t> brought);
  std::uint32_t Add(const DefinitionPtr& definition);  // its index; equal definitions are one variant
  std::span<const std::int64_t> ValuesOf(const Contribution& c) const {
    return {values.data() + c.first_value, c.num_values};
  }
  void DropVariantsOfNobody();
  // Those of some rank, in the order of the variants.
  std::vector<Opinion> Opinions() const;
};

struct PendingEntry {
  EntryReport report;       // of the ranks heard of
  std::vector<bool> heard;  // which, by rank
  TimePoint since;
  std::size_t reported = 0;       // how many the parent was told of, because the entry stalls
  std::set<int> ready_elsewhere;  // at rank 0: ranks that a node below reported ready in a partial, stalled entry
  Duration next_warning{};        // at rank 0

  const Definition& definition() const { return report.variants.front()->definition; }
  SetId set() const { return definition().set; }
  std::size_t ready() const { return report.contributions.size(); }
  std::vector<int> ReadyRanks() const;
};

// An entry is complete when every member of its set below this node is ready, has joined or has departed. What ranks
// have to say of an entry leaves a node in one message, all variants together.
class PendingTable {
 public:
  // Gets what the ranks said of each complete entry, and must not come back here. `conflict`: why it must fail although
  // its own reports may agree.
  using Complete = std::function<void(const EntryReport& report, const Result& conflict)>;

  PendingTable(const TreePosition& tree, const ProcessSets& sets, const Absence& absence, Complete complete)
      : tree_(tree), sets_(sets), absence_(absence), complete_(std::move(complete)) {}

  // False: a rank reports twice.
  bool Report(const EntryReport& report, TimePoint now);
  // The entry, made if it is new: a node below reports it although nothing complete has come from there.
  PendingEntry& ReportPartial(const DefinitionPtr& definition, std::uint64_t number, TimePoint since);
  // Somebody joined or left, so entries may have become complete.
  void Reconsider();
  // Completes entries that can only wait for each other: a tensor is in a group on one rank and alone, or in another
  // group, on another rank, and every member is ready for one of them. None of them could ever be ready everywhere,
  // because a name in flight is not given away. Off the fast path: called now and then while something is pending.
  void CompleteConflicting();
  void RemoveSet(SetId set);
  void Clear() { entries_.Clear(); }

  bool empty() const { return entries_.empty(); }
  std::vector<PendingEntry*> Sorted() { return entries_.Sorted(); }

 private:
  PendingEntry& Entry(const DefinitionPtr& definition, std::uint64_t number, TimePoint since);
  bool Covered(const PendingEntry& entry, const std::vector<int>& below) const;
  void Finish(PendingEntry& entry, const Result& conflict);

  const TreePosition& tree_;
  const ProcessSets& sets_;
  const Absence& absence_;
  const Complete complete_;
  KeyTable<PendingEntry> entries_;
  std::string scratch_;  // of keys of unnamed operations
};

}  // namespace ronde
