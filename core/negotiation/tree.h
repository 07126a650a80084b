// The tree of ranks as one of them sees it: who is reached through which neighbour.
#pragma once

#include <vector>

#include "negotiation/negotiator.h"

namespace ronde {

class TreePosition {
 public:
  explicit TreePosition(const NegotiatorConfig& config) : rank_(config.rank), parents_(config.parents) {
    for (int r = 0; r < size(); ++r) via_.push_back(Climb(r));
  }

  int size() const { return static_cast<int>(parents_.size()); }
  bool Has(int rank) const { return rank >= 0 && rank < size(); }
  // This rank itself, the child whose subtree holds `rank`, or -1: not below this rank.
  int Via(int rank) const { return Has(rank) ? via_[rank] : -1; }
  bool IsBelow(int rank) const { return Via(rank) >= 0; }
  // `top` and all below it: the ranks that are cut off when it leaves.
  std::vector<int> Subtree(int top) const {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      int at = r;
      while (at >= 0 && at != top) at = parents_[at];
      if (at == top) ranks.push_back(r);
    }
    return ranks;
  }

 private:
  int Climb(int rank) const {
    int from = rank;
    while (rank >= 0 && rank != rank_) {
      from = rank;
      rank = parents_[rank];
    }
    return rank == rank_ ? from : -1;
  }

  int rank_;
  std::vector<int> parents_;
  std::vector<int> via_;  // by rank
};

}  // namespace ronde
