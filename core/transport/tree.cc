#include "transport/tree.h"

#include <map>

namespace ronde {

Tree BuildTree(const std::vector<std::string>& host_ids, int arity) {
  Tree tree;
  tree.parent.assign(host_ids.size(), -1);
  tree.children.resize(host_ids.size());
  std::map<std::string, int> leader_of_host;
  std::vector<int> leaders;  // in the order of their ranks, so rank 0 is the first
  for (int rank = 0; rank < static_cast<int>(host_ids.size()); ++rank) {
    auto [entry, is_leader] = leader_of_host.try_emplace(host_ids[rank], rank);
    if (is_leader) {
      if (!leaders.empty()) tree.parent[rank] = leaders[(leaders.size() - 1) / arity];
      leaders.push_back(rank);
    } else {
      tree.parent[rank] = entry->second;
    }
    if (tree.parent[rank] >= 0) tree.children[tree.parent[rank]].push_back(rank);
  }
  return tree;
}

}  // namespace ronde
