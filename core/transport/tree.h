// The tree of the control plane: ranks of a host under the host's lowest rank (its leader), leaders in a k-ary tree
// under rank 0. A pure function of what is equal on all ranks.
#pragma once

#include <string>
#include <vector>

namespace ronde {

constexpr int kTreeArity = 8;

struct Tree {
  std::vector<int> parent;                 // by rank; -1 for rank 0
  std::vector<std::vector<int>> children;  // by rank, ascending
};
// host_ids by rank. Rank 0 must be the root, so it leads its host.
Tree BuildTree(const std::vector<std::string>& host_ids, int arity = kTreeArity);

}  // namespace ronde
