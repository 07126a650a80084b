#include "negotiation/process_sets.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>

namespace ronde {

ProcessSets::ProcessSets(const TreePosition& tree) : tree_(tree) {
  std::vector<int> everyone;
  for (int r = 0; r < tree.size(); ++r) everyone.push_back(r);
  Add(kGlobalSet, everyone);
}

std::optional<SetId> ProcessSets::FindEqual(const std::vector<int>& members) const {
  for (const auto& [id, set] : sets_) {
    if (set.members == members) return id;
  }
  return std::nullopt;
}

void ProcessSets::Add(SetId id, const std::vector<int>& members) {
  ProcessSet set{members, {}};
  std::copy_if(members.begin(), members.end(), std::back_inserter(set.below), [&](int m) { return tree_.IsBelow(m); });
  sets_[id] = std::move(set);
  last_id_ = std::max(last_id_, id);
}

Result ProcessSets::Check(const Definition& change) const {
  const std::vector<int>& ranks = change.ranks;
  if (change.op == Op::kRemoveProcessSet) {
    auto id = static_cast<SetId>(ranks.front());
    if (id == kGlobalSet) return Result(Code::kArgument, "the global process set cannot be removed");
    if (Find(id) == nullptr) return Result(Code::kArgument, "there is no process set " + std::to_string(id));
    return Ok();
  }
  bool ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<int>()) == ranks.end();
  if (!ranks.empty() && ascending && tree_.Has(ranks.front()) && tree_.Has(ranks.back())) return Ok();
  return Result(Code::kArgument, "a process set needs distinct ascending ranks below " + std::to_string(tree_.size()));
}

}  // namespace ronde
