#include "transport/tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace ronde {
namespace {

TEST(TreeTest, OneRank) {
  Tree tree = BuildTree({"a"});
  EXPECT_EQ(tree.parent, (std::vector<int>{-1}));
  EXPECT_EQ(tree.children, (std::vector<std::vector<int>>{{}}));
}

TEST(TreeTest, RanksOfAHostGoUnderItsLowestRank) {
  // Worked out by hand: leaders 0 (a), 1 (b), 4 (c), 5 (d), 6 (e); arity 2, so 1 and 4 under 0, 5 and 6 under 1.
  Tree tree = BuildTree({"a", "b", "a", "b", "c", "d", "e", "d", "a"}, 2);
  EXPECT_EQ(tree.parent, (std::vector<int>{-1, 0, 0, 1, 0, 1, 1, 5, 0}));
  EXPECT_EQ(tree.children, (std::vector<std::vector<int>>{{1, 2, 4, 8}, {3, 5, 6}, {}, {}, {}, {7}, {}, {}, {}}));
}

TEST(TreeTest, EveryLayoutGivesATree) {
  std::mt19937 random(20240607);
  for (int round = 0; round < 300; ++round) {
    const int size = 1 + static_cast<int>(random() % 120);
    const int hosts = 1 + static_cast<int>(random() % 40);
    const int arity = 1 + static_cast<int>(random() % 9);
    std::vector<std::string> host_ids;
    std::map<std::string, int> lowest;
    for (int rank = 0; rank < size; ++rank) {
      host_ids.push_back("host" + std::to_string(random() % hosts));
      lowest.try_emplace(host_ids.back(), rank);
    }
    Tree tree = BuildTree(host_ids, arity);
    ASSERT_EQ(tree.parent.size(), host_ids.size());
    ASSERT_EQ(tree.children.size(), host_ids.size());
    for (int rank = 0; rank < size; ++rank) {
      const int parent = tree.parent[rank];
      const bool leads = lowest[host_ids[rank]] == rank;
      if (rank == 0) {
        EXPECT_EQ(parent, -1);
      } else {
        ASSERT_GE(parent, 0);
        EXPECT_LT(parent, rank);  // hence no cycle, and all lead to 0
        EXPECT_EQ(std::count(tree.children[parent].begin(), tree.children[parent].end(), rank), 1);
        if (leads) {
          EXPECT_EQ(lowest[host_ids[parent]], parent);
        } else {
          EXPECT_EQ(parent, lowest[host_ids[rank]]);
        }
      }
      EXPECT_TRUE(std::is_sorted(tree.children[rank].begin(), tree.children[rank].end()));
      int leaders = 0;
      for (int child : tree.children[rank]) {
        EXPECT_EQ(tree.parent[child], rank);
        leaders += lowest[host_ids[child]] == child;
      }
      EXPECT_LE(leaders, arity);
    }
  }
}

}  // namespace
}  // namespace ronde
