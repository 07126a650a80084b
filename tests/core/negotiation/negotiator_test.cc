#include <gtest/gtest.h>

#include <algorithm>

#include "negotiation/fusion.h"
#include "negotiation/simulation.h"

namespace ronde {
namespace {

TEST(Negotiator, RunsOnceAllAreReadyAndThenByItsId) {
  Simulation job({Star(3)});
  for (int step = 0; step < 3; ++step) {
    std::vector<Ticket> tickets;
    for (int r : {2, 0}) tickets.push_back(job.Submit(r, Reduce("x")));
    job.Run();
    EXPECT_EQ(job.ended[2][tickets[0]].times, 0);
    Ticket last = job.Submit(1, Reduce("x"));
    job.Run();
    EXPECT_TRUE(job.ended[2][tickets[0]].in_batch);
    EXPECT_TRUE(job.ended[0][tickets[1]].in_batch);
    EXPECT_TRUE(job.ended[1][last].in_batch);
  }
}

struct Difference {
  const char* field;
  Definition a, b;
  std::string text;
};

TEST(Negotiator, MismatchNamesFieldValuesAndRanksAlikeEverywhereAndTheJobGoesOn) {
  std::vector<Difference> cases;
  cases.push_back({"dtype", Reduce("x"), Reduce("x", {4}, DType::kFloat64),
                   "allreduce 'x': ranks disagree about dtype: float32 on ranks 0, 2; float64 on rank 1"});
  cases.push_back({"shape", Reduce("x"), Reduce("x", {5}),
                   "allreduce 'x': ranks disagree about shape: [4] on ranks 0, 2; [5] on rank 1"});
  Definition other = Reduce("x");
  other.op = Op::kBroadcast;
  cases.push_back({"op", Reduce("x"), other,
                   "allreduce 'x': ranks disagree about the operation: allreduce on ranks 0, 2; broadcast on rank 1"});
  other = Reduce("x");
  other.reduction = Reduction::kMin;
  cases.push_back({"reduction", Reduce("x"), other,
                   "allreduce 'x': ranks disagree about the reduction: sum on ranks 0, 2; min on rank 1"});
  other = Reduce("x");
  other.prescale = 0.5;
  cases.push_back({"prescale", Reduce("x"), other,
                   "allreduce 'x': ranks disagree about the prescale factor: 1 on ranks 0, 2; 0.5 on rank 1"});
  Definition root = Reduce("x");
  root.op = Op::kBroadcast;
  other = root;
  other.root = 1;
  cases.push_back(
      {"root", root, other, "broadcast 'x': ranks disagree about the root rank: 0 on ranks 0, 2; 1 on rank 1"});
  other = Reduce("x");
  other.device = 0;
  cases.push_back({"device", Reduce("x"), other,
                   "allreduce 'x': ranks disagree about the device: host on ranks 0, 2; device 0 on rank 1"});
  for (unsigned seed = 1; seed < 6; ++seed) {
    for (const auto& tree : {Star(3), Chain(3)}) {
      for (const auto& item : cases) {
        Simulation job({tree, 65536, 60, {}, seed});
        std::vector<Ticket> tickets;
        for (int r = 0; r < 3; ++r) tickets.push_back(job.Submit(r, r == 1 ? item.b : item.a));
        job.Run();
        for (int r = 0; r < 3; ++r) {
          const auto& end = job.ended[r][tickets[r]];
          EXPECT_EQ(end.result.code(), Code::kMismatch) << item.field;
          EXPECT_EQ(end.result.message(), item.text);
        }
        tickets.clear();
        for (int r = 0; r < 3; ++r) tickets.push_back(job.Submit(r, Reduce("y")));
        job.Run();
        for (int r = 0; r < 3; ++r) EXPECT_TRUE(job.ended[r][tickets[r]].result.ok());
      }
    }
  }
}

TEST(Negotiator, ASecondSubmissionOfANameInFlightFailsAtOnceAndAGroupReservesItsMembers) {
  Simulation job({Star(2)});
  job.Submit(0, Reduce("x"));
  Ticket again = job.Submit(0, Reduce("x"));
  EXPECT_EQ(job.ended[0][again].result.code(), Code::kArgument);
  Definition group = Reduce("g");
  group.tensors = {TensorSpec{"g.0", DType::kFloat32, {2}}, TensorSpec{"g.1", DType::kFloat64, {3}}};
  job.Submit(0, group);
  Ticket member = job.Submit(0, Reduce("g.1"));
  EXPECT_NE(job.ended[0][member].result.message().find("'g.1'"), std::string::npos);
}

TEST(Negotiator, UnnamedOperationsPairByOrderWithinTheirSetAndRepeatTheirIds) {
  Simulation job({Star(3)});
  Definition add;
  add.op = Op::kAddProcessSet;
  add.name = "set";
  add.ranks = {0, 2};
  for (int r = 0; r < 3; ++r) job.Submit(r, add);
  job.Run();
  SetId set = job.batches[0].back().entries[0].new_set;
  Definition unnamed = Reduce("");
  Definition on_set = unnamed;
  on_set.set = set;
  std::vector<Ticket> tickets;
  for (int r : {0, 2}) tickets.push_back(job.Submit(r, on_set));
  for (int r = 0; r < 3; ++r) tickets.push_back(job.Submit(r, unnamed));
  job.Run();
  EXPECT_TRUE(job.ended[0][tickets[0]].in_batch);
  EXPECT_TRUE(job.ended[1][tickets[3]].in_batch);
  EXPECT_TRUE(job.ended[2][tickets[4]].in_batch);
}

TEST(Negotiator, JoinStandsInWithTheNeutralElementAndNamesTheLast) {
  for (const auto& tree : {Star(3), Chain(3)}) {
    Simulation job({tree});
    Definition join;
    join.op = Op::kJoin;
    Ticket first = job.Submit(1, join);
    job.Run();
    std::vector<Ticket> tickets;
    for (int r : {0, 2}) tickets.push_back(job.Submit(r, Reduce("x")));
    job.Run();
    ASSERT_TRUE(job.ended[0][tickets[0]].in_batch);
    EXPECT_EQ(job.ended[0][tickets[0]].entry.joined, std::vector<int>{1});
    Definition broadcast = Reduce("b");
    broadcast.op = Op::kBroadcast;
    broadcast.root = 1;
    Ticket lost = job.Submit(0, broadcast);
    job.Submit(2, broadcast);
    job.Run();
    EXPECT_EQ(job.ended[0][lost].result.code(), Code::kMismatch);
    job.Submit(0, join);
    job.Run();
    EXPECT_EQ(job.ended[1][first].times, 0);
    job.Submit(2, join);
    job.Run();
    ASSERT_EQ(job.ended[1][first].times, 1);
    EXPECT_EQ(job.ended[1][first].entry.last_joined, 2);
    Ticket after = 0;
    for (int r = 0; r < 3; ++r) after = job.Submit(r, Reduce(""));
    job.Run();
    EXPECT_TRUE(job.ended[2][after].entry.joined.empty());
    EXPECT_TRUE(job.ended[2][after].in_batch);
  }
}

TEST(Negotiator, CreditKeepsAtMostTwoBatchesOfASetUnfinishedAndGathersTheRest) {
  NegotiatorConfig config;
  config.parents = {-1};
  config.host_names = {"h"};
  config.stall_warning = std::chrono::seconds(60);
  auto node = CreateNegotiator(config);
  TimePoint now{std::chrono::hours(1)};
  std::vector<std::size_t> sizes;
  Actions actions;
  for (int i = 0; i < 6; ++i) {
    node->Submit(i + 1, node->Intern(Reduce("t" + std::to_string(i))), {}, now);
    node->Take(&actions);
    for (auto& batch : actions.batches) sizes.push_back(batch.entries.size());
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{1, 1}));
  node->Finished(kGlobalSet, 0, now);
  node->Take(&actions);
  for (auto& batch : actions.batches) sizes.push_back(batch.entries.size());
  EXPECT_EQ(sizes, (std::vector<std::size_t>{1, 1, 4}));
}

TEST(Negotiator, RemovalFailsWhatPendsAndIdsOfSetsAreNotUsedAgain) {
  Simulation job({Star(2)});
  auto everywhere = [&](Definition d) {
    for (int r = 0; r < 2; ++r) job.Submit(r, d);
    job.Run();
    return job.batches[0].back().entries[0];
  };
  Definition add;
  add.op = Op::kAddProcessSet;
  add.name = "add";
  add.ranks = {1};
  SetId first = everywhere(add).new_set;
  EXPECT_TRUE(everywhere(add).existed);
  Definition pending = Reduce("p");
  pending.set = first;
  add.ranks = {0, 1};
  EXPECT_EQ(everywhere(add).new_set, kGlobalSet);
  Definition remove;
  remove.op = Op::kRemoveProcessSet;
  remove.name = "remove";
  remove.ranks = {static_cast<int>(first)};
  EXPECT_TRUE(everywhere(remove).error.ok());
  EXPECT_EQ(everywhere(remove).error.code(), Code::kArgument);
  Ticket late = job.Submit(1, pending);
  EXPECT_EQ(job.ended[1][late].result.code(), Code::kArgument);
  add.ranks = {1};
  EXPECT_GT(everywhere(add).new_set, first);
}

TEST(Negotiator, AnIdleNodeNeedsNoTimer) {
  Simulation job({Star(2)});
  for (int r = 0; r < 2; ++r) job.Submit(r, Reduce("x"));
  job.Run();
  for (int r = 0; r < 2; ++r) EXPECT_EQ(job.node(r).NextWake(), TimePoint::max());
}

TEST(Negotiator, ALostNeighbourAbortsEverybodyWithTheSameText) {
  Simulation job({Chain(4)});
  Ticket ticket = job.Submit(3, Reduce("x"));
  job.node(0).Lost(1, Result(Code::kPeerLost, "rank 1 (host h1) died: signal 9"), job.now);
  job.Collect(0);
  job.node(2).Lost(1, Result(Code::kPeerLost, "rank 1 (host h1) died: signal 9"), job.now);
  job.Collect(2);
  job.Run();
  EXPECT_EQ(job.ended[3][ticket].result.message(), "rank 1 (host h1) died: signal 9");
  EXPECT_EQ(job.aborts[0].message(), "rank 1 (host h1) died: signal 9");
}

TEST(Negotiator, OperationsThatNeedALeftRankFailAndNameIt) {
  Simulation job({Star(3)});
  Ticket before = job.Submit(1, Reduce("x"));
  job.node(2).Goodbye(job.now);
  job.Collect(2);
  job.Run();
  job.Submit(0, Reduce("x"));
  job.Run();
  EXPECT_EQ(job.ended[1][before].result.message(), "allreduce 'x': rank 2 (host h2) has shut down");
  EXPECT_EQ(job.ended[1][before].result.code(), Code::kShutdown);
  EXPECT_TRUE(job.node(2).goodbye_complete());
  EXPECT_TRUE(job.aborts[1].ok());
}

TEST(Negotiator, WhenTheRootLeavesWhatWasCommittedStandsAndTheRestFails) {
  Simulation job({Chain(3)});
  std::vector<Ticket> committed;
  for (int r = 0; r < 3; ++r) committed.push_back(job.Submit(r, Reduce("x")));
  job.Run();
  Ticket open = job.Submit(2, Reduce("y"));
  job.node(0).Goodbye(job.now);
  job.Collect(0);
  job.Run();
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(job.ended[r][committed[r]].result.ok());
    EXPECT_TRUE(job.aborts[r].ok()) << job.aborts[r].message();
  }
  EXPECT_EQ(job.ended[2][open].result.message(), "rank 0 (host h0) has shut down");
  Ticket late = job.Submit(1, Reduce("z"));
  EXPECT_EQ(job.ended[1][late].result.code(), Code::kShutdown);
  EXPECT_TRUE(job.node(0).goodbye_complete());
}

TEST(Negotiator, ARankThatLeavesBetweenReadyAndCommitFailsTheOperationForAll) {
  for (unsigned seed = 1; seed < 40; ++seed) {
    for (const auto& tree : {Star(3), Chain(3)}) {
      Simulation job({tree, 65536, 60, {}, seed});
      std::vector<Ticket> tickets;
      for (int r = 0; r < 3; ++r) tickets.push_back(job.Submit(r, Reduce("x")));
      for (unsigned i = 0; i < seed % 5; ++i) job.Step();
      bool was_committed = !job.batches[2].empty();
      job.node(2).Goodbye(job.now);
      job.Collect(2);
      job.Run();
      for (int r = 0; r < 2; ++r) {
        const auto& end = job.ended[r][tickets[r]];
        EXPECT_EQ(end.times, 1);
        // Either everybody has it, or nobody waits for rank 2's data.
        bool runs_without = end.result.ok() && !was_committed && job.batches[2].empty() && job.aborts[r].ok();
        EXPECT_FALSE(runs_without) << "seed " << seed << " rank " << r;
      }
    }
  }
}

// Any interleaving: the same batches in the same order on every rank, each submission ends exactly once.
TEST(Negotiator, AnyInterleavingGivesOneOrder) {
  for (unsigned seed = 1; seed <= 300; ++seed) {
    std::mt19937 choose(seed);
    int size = std::vector<int>{1, 2, 3, 5, 9}[choose() % 5];
    auto tree = std::vector<std::vector<int>>{Star(size), Chain(size), Binary(size)}[choose() % 3];
    Simulation job({tree, choose() % 2 ? 4 : 65536, 60, {}, seed});

    // One list of operations for all; each rank submits it in its own order (unnamed ones in theirs).
    std::vector<Definition> list;
    int count = 5 + static_cast<int>(choose() % 30);
    for (int i = 0; i < count; ++i) {
      std::string name = "t" + std::to_string(i);
      Definition d = Reduce(name, {static_cast<std::int64_t>(choose() % 5)});
      if (choose() % 5 == 0) d.op = Op::kAllgather, d.reduction = Reduction::kAverage, d.tensors[0].shape = {0, 3};
      if (choose() % 6 == 0) d.tensors.push_back(TensorSpec{name + ".b", DType::kFloat64, d.tensors[0].shape});
      list.push_back(d);
    }
    int bad = static_cast<int>(choose() % 40);  // rank size-1 submits this one with another dtype
    std::vector<std::vector<int>> orders(size);
    for (auto& order : orders) {
      for (int i = 0; i < count; ++i) order.push_back(i);
      std::shuffle(order.begin(), order.end(), choose);
    }
    for (int round = 0; round < 2; ++round) {
      std::vector<std::size_t> next(size, 0);
      std::vector<int> unnamed(size, 0);
      bool left = true;
      while (left) {
        left = false;
        for (int r = 0; r < size; ++r) {
          if (next[r] < orders[r].size() && choose() % 3 == 0) {
            int i = orders[r][next[r]++];
            Definition d = list[i];
            if (i == bad && r == size - 1) d.tensors[0].dtype = DType::kInt32;
            Values values;
            if (d.op == Op::kAllgather) values.assign(d.tensors.size(), r + i);
            job.Submit(r, d, values);
          }
          if (unnamed[r] < 3 && choose() % 4 == 0) {
            job.Submit(r, Reduce("", {++unnamed[r]}));
          }
          left |= next[r] < orders[r].size() || unnamed[r] < 3;
        }
        for (int i = static_cast<int>(choose() % 4); i > 0; --i) job.Step();
      }
      job.Run();
    }
    for (int r = 0; r < size; ++r) {
      for (auto& [ticket, end] : job.ended[r]) {
        ASSERT_EQ(end.times, 1) << "seed " << seed << " rank " << r;
        if (!end.result.ok()) {
          ASSERT_EQ(end.result.code(), Code::kMismatch);
        }
      }
      ASSERT_EQ(job.batches[r].size(), job.batches[0].size()) << "seed " << seed;
      for (std::size_t b = 0; b < job.batches[r].size(); ++b) {
        const Batch& mine = job.batches[r][b];
        const Batch& root = job.batches[0][b];
        ASSERT_EQ(mine.set, root.set);
        ASSERT_EQ(mine.number, root.number);
        ASSERT_EQ(mine.entries.size(), root.entries.size());
        for (std::size_t e = 0; e < mine.entries.size(); ++e) {
          ASSERT_EQ(*mine.entries[e].definition, *root.entries[e].definition);
          ASSERT_EQ(mine.entries[e].values, root.entries[e].values);
          ASSERT_EQ(mine.entries[e].error.message(), root.entries[e].error.message());
        }
        Plan plan = PlanFusion(mine, FusionLimits{64, false}, 1),
             expected = PlanFusion(root, FusionLimits{64, false}, 1);
        ASSERT_EQ(plan.size(), expected.size());
      }
    }
  }
}

}  // namespace
}  // namespace ronde
