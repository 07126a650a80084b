// The process sets that live at this point of the order, and the ranks that nobody waits for any more.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/result.h"
#include "negotiation/tree.h"
#include "wire/definition.h"

namespace ronde {

struct ProcessSet {
  std::vector<int> members;  // ascending
  std::vector<int> below;    // those in this node's subtree, itself included
};

// Every node applies the same additions and removals in the same order. Ids count up and are never used again.
class ProcessSets {
 public:
  explicit ProcessSets(const TreePosition& tree);

  const ProcessSet* Find(SetId id) const {
    auto found = sets_.find(id);
    return found == sets_.end() ? nullptr : &found->second;
  }
  // May this set be added or removed now?
  Result Check(const Definition& change) const;
  std::optional<SetId> FindEqual(const std::vector<int>& members) const;
  void Add(SetId id, const std::vector<int>& members);
  void Remove(SetId id) { sets_.erase(id); }
  SetId next_id() const { return last_id_ + 1; }
  const std::map<SetId, ProcessSet>& all() const { return sets_; }

 private:
  const TreePosition& tree_;
  std::map<SetId, ProcessSet> sets_;
  SetId last_id_ = kGlobalSet;
};

// Ranks in this node's subtree that bring nothing: operations are complete without them.
struct Absence {
  std::set<int> joined;
  // A rank that has left, or that was cut off because one between it and rank 0 left -> the one that left.
  std::map<int, int> departed;

  bool empty() const { return joined.empty() && departed.empty(); }
  bool Has(int rank) const { return joined.count(rank) > 0 || departed.count(rank) > 0; }
};

}  // namespace ronde
