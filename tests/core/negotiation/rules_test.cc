// Each rule that has an interleaving or a fault which breaks without it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "negotiation/coordinator.h"
#include "negotiation/simulation.h"

namespace ronde {
namespace {

std::vector<Ticket> Everywhere(Simulation& job, const Definition& definition, const std::vector<int>& ranks) {
  std::vector<Ticket> tickets;
  for (int r : ranks) tickets.push_back(job.Submit(r, definition));
  return tickets;
}
SetId NewSet(Simulation& job, const std::vector<int>& members) {
  for (int r = 0; r < job.size(); ++r) job.Submit(r, Control(Op::kAddProcessSet, members));
  job.Run();
  return job.batches[0].back().entries[0].new_set;
}
// ---- Identity and definitions ----

TEST(Definitions, ANewOneForALiveNameNeedsNoRetirement) {
  for (unsigned seed = 1; seed < 20; ++seed) {
    Simulation job({Chain(3), 65536, 60, {}, seed});
    for (std::int64_t step = 0; step < 6; ++step) {
      auto tickets = Everywhere(job, Reduce("x", {step % 2 + 1}), {0, 1, 2});
      job.Run();
      for (int r = 0; r < 3; ++r) {
        EXPECT_TRUE(job.ended[r][tickets[r]].result.ok());
        EXPECT_EQ(job.ended[r][tickets[r]].entry.definition->tensors[0].shape, (Shape{step % 2 + 1}));
      }
    }
    job.Submit(0, Reduce("x", {1}));  // both by id
    job.Submit(1, Reduce("x", {2}));
    Ticket last = job.Submit(2, Reduce("x", {1}));
    job.Run();
    EXPECT_EQ(job.ended[2][last].result.message(),
              "allreduce 'x': ranks disagree about shape: [1] on ranks 0, 2; [2] on rank 1");
  }
}

TEST(Definitions, AReportByIdIsSmallAndANodePassesOnOneForItsSubtree) {
  Simulation job({Chain(3)});
  std::string name(500, 'n');
  std::size_t first = 0;
  for (int step = 0; step < 3; ++step) {
    std::fill(job.message_bytes.begin(), job.message_bytes.end(), 0);
    for (int i = 0; i < 100; ++i) Everywhere(job, Reduce(name + std::to_string(i)), {2, 1, 0});
    job.Run();
    if (step == 0) first = job.message_bytes[1];
  }
  EXPECT_GT(first, 100u * 2 * 500);
  EXPECT_LT(job.message_bytes[2], 100u * 20);
  EXPECT_LT(job.message_bytes[1], 100u * 60);  // up and down
}

// Bytes of a report by id as rank 1 would write them.
std::vector<std::byte> ReportById(std::uint64_t id, int rank) {
  Writer writer;
  writer.Byte(1);      // version
  writer.Byte(1);      // a report
  writer.Unsigned(0);  // number
  writer.Unsigned(1);  // definitions
  writer.Unsigned(id);
  writer.Unsigned(1);  // ranks
  writer.Signed(rank);
  writer.Unsigned(0);  // values
  return writer.Take();
}

TEST(Definitions, AnEvictedIdIsReadableUntilAllBelowHaveAcknowledged) {
  for (bool acknowledged : {false, true}) {
    Simulation job({Star(3), /*cache_capacity=*/1});
    Everywhere(job, Reduce("x"), {0, 1, 2});
    job.Run();
    Everywhere(job, Reduce("y"), {0, 1, 2});
    while (job.batches[0].size() < 2 && job.Step()) {
    }
    if (acknowledged) job.Run();
    job.node(0).Receive(1, ReportById(1, 1), job.now);  // x had the first id
    job.Collect(0);
    EXPECT_EQ(job.aborts[0].ok(), !acknowledged);
    if (acknowledged) {
      EXPECT_EQ(job.aborts[0].message(), "rank 1 (host h1) sent nonsense: malformed message: unknown definition id");
    }
  }
}

TEST(Definitions, ALeftNodeAcknowledgesNothingAndIsNotWaitedFor) {
  int forgotten = 0;
  for (unsigned seed = 1; seed < 100; ++seed) {
    Simulation job({{-1, 0, 1, 0}, /*cache_capacity=*/1, 60, {}, seed});
    Everywhere(job, Reduce("x"), {0, 1, 2, 3});
    job.Run();
    Everywhere(job, Reduce("y"), {0, 1, 2, 3});
    while (job.batches[1].size() < 2 && job.Step()) {
    }
    job.tamper = [](Simulation::Link link, std::vector<std::byte>& message) {
      if (link == Simulation::Link{2, 1}) message.resize(1);  // its acknowledgement comes too late
    };
    job.Goodbye(1);
    job.Run();
    if (!job.aborts[0].ok()) continue;
    job.node(0).Receive(3, ReportById(1, 3), job.now);
    job.Collect(0);
    EXPECT_FALSE(job.aborts[0].ok());
    ++forgotten;
  }
  EXPECT_GT(forgotten, 10);
}

TEST(Definitions, WithoutACacheNothingHasAnId) {
  Simulation job({Star(2), /*cache_capacity=*/0});
  for (int step = 0; step < 3; ++step) {
    std::size_t before = job.message_bytes[1];
    Everywhere(job, Reduce(std::string(200, 'n')), {0, 1});
    job.Run();
    EXPECT_GT(job.message_bytes[1] - before, 200u);
  }
}

TEST(Definitions, TheLeastRecentlyUsedGoesFirst) {
  NegotiatorConfig config;
  config.cache_capacity = 2;
  DefinitionTable table;
  Coordinator coordinator(config, table);
  auto commit = [&](const std::string& name) {
    DecidedBatch batch;
    batch.entries.resize(1);
    batch.entries[0].known = table.Intern(Reduce(name));
    return coordinator.AssignIds(batch);
  };
  EXPECT_TRUE(commit("a").empty());
  EXPECT_TRUE(commit("b").empty());
  EXPECT_TRUE(commit("a").empty());
  EXPECT_EQ(commit("c"), (std::vector<std::uint64_t>{2}));  // b's
}

TEST(EntryReport, VariantsOfNobodyAreDropped) {
  DefinitionTable table;
  EntryReport report;
  std::vector<DefinitionPtr> made;
  for (int i = 0; i < 4; ++i) made.push_back(table.Intern(Reduce("x", {i + 1})));
  for (const auto& definition : made) report.Add(definition);
  EXPECT_EQ(report.Add(table.Intern(Reduce("x", {3}))), 2u);  // equal, though another object
  const std::vector<std::int64_t> five{5}, seven{7, 8};
  report.Add(4, 3, five);
  report.Add(2, 1, seven);
  report.DropVariantsOfNobody();
  ASSERT_EQ(report.variants.size(), 2u);
  EXPECT_EQ(report.variants[report.contributions[0].variant], made[3]);
  EXPECT_EQ(report.variants[report.contributions[1].variant], made[1]);
  EXPECT_EQ(report.ValuesOf(report.contributions[1])[1], 8);
  auto opinions = report.Opinions();
  ASSERT_EQ(opinions.size(), 2u);
  EXPECT_EQ(opinions[0].ranks, std::vector<int>{2});
  EXPECT_EQ(opinions[1].ranks, std::vector<int>{4});
}

// ---- Errors ----

TEST(Mismatch, OfAGroupNamesTheTensor) {
  Simulation job({Star(2)});
  Definition other = Group("g", {"a", "b", "c"});
  other.tensors[1].dtype = DType::kInt64;
  job.Submit(0, Group("g", {"a", "b", "c"}));
  Ticket ticket = job.Submit(1, other);
  job.Run();
  EXPECT_EQ(job.ended[1][ticket].result.message(),
            "allreduce 'g': ranks disagree about dtype (tensor 'b'): float32 on rank 0; int64 on rank 1");
  job.Submit(0, Group("g", {"a", "b", "c"}));
  ticket = job.Submit(1, Group("g", {"a", "b"}));
  job.Run();
  EXPECT_EQ(job.ended[1][ticket].result.message(),
            "allreduce 'g': ranks disagree about the number of tensors: 3 on rank 0; 2 on rank 1");
}

TEST(Mismatch, OfRaggedOperationsIsAboutTheOtherDimensionsOnly) {
  Simulation job({Star(2)});
  Definition d = Reduce("x", {0, 3});
  d.op = Op::kAllgather;
  job.Submit(0, d, {5});
  Ticket ticket = job.Submit(1, d, {7});
  job.Run();
  EXPECT_EQ(job.ended[1][ticket].entry.values, (std::vector<Values>{{5}, {7}}));
  Definition other = d;
  other.tensors[0].shape = {0, 4};
  job.Submit(0, d, {5});
  ticket = job.Submit(1, other, {7});
  job.Run();
  EXPECT_EQ(job.ended[1][ticket].result.message(),
            "allgather 'x': ranks disagree about shape: [any, 3] on rank 0; [any, 4] on rank 1");
  d.op = Op::kAlltoall;
  job.Submit(0, d, {1, 2});
  ticket = job.Submit(1, d, {1, 2, 3});
  job.Run();
  EXPECT_EQ(job.ended[1][ticket].result.message(), "alltoall 'x': rank 1 gave 3 row counts where 2 are needed");
}

TEST(Mismatch, ARootOutsideTheSet) {
  Simulation job({Star(3)});
  Definition d = Reduce("x");
  d.op = Op::kBroadcast;
  d.set = NewSet(job, {1, 2});
  auto tickets = Everywhere(job, d, {1, 2});
  job.Run();
  EXPECT_EQ(job.ended[1][tickets[0]].result.message(), "broadcast 'x': its root, rank 0, is not in process set 1");
}

TEST(Mismatch, ATensorInAGroupOnOneRankAndAloneOnAnotherIsNoStall) {
  for (const auto& tree : {Star(3), Chain(3)}) {
    Simulation job({tree});
    Ticket group = job.Submit(2, Group("g", {"a", "b"}));
    Ticket alone = job.Submit(1, Reduce("a"));
    Ticket other = job.Submit(0, Group("h", {"b", "c"}));
    Ticket innocent = job.Submit(0, Reduce("z"));
    job.Run();
    for (int i = 0; i < 10; ++i) job.Tick(0.5);
    std::string a = "tensor 'a': ranks disagree about its group: alone on rank 1; in group 'g' on rank 2";
    std::string b = "tensor 'b': ranks disagree about its group: in group 'h' on rank 0; in group 'g' on rank 2";
    EXPECT_EQ(job.ended[2][group].result.message(), a);
    EXPECT_EQ(job.ended[1][alone].result.message(), a);
    EXPECT_EQ(job.ended[0][other].result.message(), b);
    EXPECT_EQ(job.ended[0][other].result.code(), Code::kMismatch);
    EXPECT_EQ(job.ended[0][innocent].times, 0);
    EXPECT_TRUE(job.logs.empty());
  }
}

TEST(Mismatch, OverlappingGroupsThatAreReadyEverywhereRunOneAfterTheOther) {
  Simulation job({Star(2)});
  Ticket first = job.Submit(0, Group("g", {"a", "b"}));
  job.Run();
  job.Tick(5);  // rank 1 is late, no more
  EXPECT_EQ(job.ended[0][first].times, 0);
  job.Submit(1, Group("g", {"a", "b"}));
  job.Run();
  EXPECT_TRUE(job.ended[0][first].result.ok());
  auto next = Everywhere(job, Reduce("a"), {0, 1});
  job.Run();
  EXPECT_TRUE(job.ended[0][next[0]].in_batch);
}

// ---- Batches ----

TEST(Batches, ASetWithoutRank0GoesOnWhileRank0sExecutorIsBusy) {
  Simulation job({Star(3)});
  SetId set = NewSet(job, {1, 2});
  job.stuck.insert(kGlobalSet);
  Definition d = Reduce("s");
  d.set = set;
  for (int i = 0; i < 5; ++i) {
    Everywhere(job, Reduce("g" + std::to_string(i)), {0, 1, 2});
    auto tickets = Everywhere(job, d, {1, 2});
    job.Run();
    EXPECT_TRUE(job.ended[1][tickets[0]].in_batch) << i;
  }
}

TEST(Batches, LingerGathersForThatLong) {
  Simulation job({Star(2), 65536, 60, {}, 1, /*linger=*/0.005});
  auto first = Everywhere(job, Reduce("a"), {0, 1});
  job.Run();
  EXPECT_EQ(job.ended[0][first[0]].times, 0);
  job.Tick(0.004);
  auto second = Everywhere(job, Reduce("b"), {0, 1});
  job.Run();
  EXPECT_EQ(job.ended[0][first[0]].times, 0);
  EXPECT_EQ(job.node(0).NextWake(), job.now + std::chrono::milliseconds(1));
  job.Tick(0.001);
  EXPECT_TRUE(job.ended[0][first[0]].in_batch);
  EXPECT_TRUE(job.ended[1][second[1]].in_batch);
  EXPECT_EQ(job.batches[0].size(), 1u);
}

TEST(Batches, TenThousandPendingEntriesAreNoWork) {
  auto begin = std::chrono::steady_clock::now();
  Simulation job({Chain(3)});
  for (int r : {0, 2, 1}) {
    for (int i = 0; i < 10000; ++i) job.Submit(r, Reduce("tensor." + std::to_string(i)));
    job.Run();
    job.Tick(1);
  }
  std::size_t entries = 0;
  for (const auto& batch : job.batches[2]) entries += batch.entries.size();
  EXPECT_EQ(entries, 10000u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

// ---- Process sets ----

TEST(Sets, OneBatchMayRemoveASetAndAddAnEqualOne) {
  Simulation job({Star(1)});
  SetId old = NewSet(job, {0});  // equals the global set
  EXPECT_EQ(old, kGlobalSet);
  Simulation two({Star(2)});
  SetId set = NewSet(two, {1});
  two.stuck.insert(kGlobalSet);
  for (int i = 0; i < 2; ++i) Everywhere(two, Reduce("x" + std::to_string(i)), {0, 1});
  two.Run();
  for (int r = 0; r < 2; ++r) two.Submit(r, Control(Op::kRemoveProcessSet, {static_cast<int>(set)}));
  for (int r = 0; r < 2; ++r) two.Submit(r, Control(Op::kAddProcessSet, {1}));
  two.Run();
  two.node(0).Finished(kGlobalSet, two.batches[0].back().number, two.now);
  two.Collect(0);
  two.Run();
  const Batch& last = two.batches[1].back();
  ASSERT_EQ(last.entries.size(), 2u);
  EXPECT_EQ(last.entries[1].definition->op, Op::kAddProcessSet);
  EXPECT_FALSE(last.entries[1].existed);
  EXPECT_EQ(last.entries[1].new_set, set + 1);
  EXPECT_EQ(two.node(0).Members(set), nullptr);
}

TEST(Sets, WhatPendsOnARemovedSetFailsAndIsForgotten) {
  Simulation job({Chain(3)});
  SetId set = NewSet(job, {1, 2});
  Definition d = Reduce("p");
  d.set = set;
  Ticket pending = job.Submit(2, d);
  job.Run();
  Everywhere(job, Control(Op::kRemoveProcessSet, {static_cast<int>(set)}), {0, 1, 2});
  job.Run();
  EXPECT_EQ(job.ended[2][pending].result.message(), "process set 1 was removed");
  EXPECT_EQ(job.ended[2][pending].result.code(), Code::kArgument);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(job.node(r).NextWake(), TimePoint::max());
  Everywhere(job, Control(Op::kRemoveProcessSet, {0}), {0, 1, 2});
  job.Run();
  EXPECT_EQ(job.batches[1].back().entries[0].error.message(), "the global process set cannot be removed");
}

// ---- Joining and leaving ----

TEST(Join, WhatAJoinedRankSubmittedBeforeIsPartOfTheOperation) {
  for (unsigned seed = 1; seed < 200; ++seed) {
    Simulation job({{-1, 0, 1, 1}, 65536, 60, {}, seed});
    Ticket mine = job.Submit(2, Reduce("x"));
    job.Submit(0, Reduce("x"));
    Everywhere(job, Control(Op::kJoin), {2, 1, 3});
    job.Run();
    ASSERT_TRUE(job.ended[2][mine].in_batch);
    ASSERT_EQ(job.ended[2][mine].entry.joined, (std::vector<int>{1, 3}));
  }
}

TEST(Join, AJoinedRankSubmitsNothingUntilItIsReleased) {
  Simulation job({Star(2)});
  job.Submit(1, Control(Op::kJoin));
  Ticket ticket = job.Submit(1, Reduce("x"));
  EXPECT_EQ(job.ended[1][ticket].result.message(), "allreduce 'x': this rank has joined; wait for join first");
  Definition join = Control(Op::kJoin);
  join.set = NewSet(job, {0});
  Ticket wrong = job.Submit(0, join);
  EXPECT_EQ(job.ended[0][wrong].result.code(), Code::kArgument);
}

TEST(Goodbye, CutsOffWhatIsBelowAndNamesTheOneThatLeft) {
  for (unsigned seed = 1; seed < 40; ++seed) {
    Simulation job({Chain(4), 65536, 60, {}, seed});
    SetId set = NewSet(job, {0, 3});
    job.Goodbye(2);
    job.Run();
    Definition d = Reduce("x");
    d.set = set;
    Ticket above = job.Submit(0, d);
    Ticket below = job.Submit(3, d);
    job.Run();
    EXPECT_EQ(job.ended[0][above].result.message(), "allreduce 'x': rank 2 (host h2) has shut down");
    EXPECT_EQ(job.ended[3][below].result.message(), "rank 2 (host h2) has shut down");
    EXPECT_TRUE(job.aborts[0].ok());
  }
}

TEST(Goodbye, OfALowestMemberTakesNoCreditWithIt) {
  Simulation job({Star(3)});
  Definition d = Reduce("x");
  d.set = NewSet(job, {1, 2});
  job.Goodbye(1);
  job.Run();
  for (int i = 0; i < 5; ++i) {
    Ticket ticket = job.Submit(2, d);
    job.Run();
    EXPECT_EQ(job.ended[2][ticket].result.code(), Code::kShutdown) << i;
  }
}

TEST(Goodbye, WhatWaitsForARankThatLeftIsNoStall) {
  Simulation job({Star(3), 65536, 1, 3.0});
  job.Submit(2, Reduce("x"));
  job.Goodbye(2);
  job.Run();
  for (int i = 0; i < 60; ++i) job.Tick(0.1);
  EXPECT_TRUE(job.logs.empty());
  EXPECT_TRUE(job.aborts[0].ok());
}

}  // namespace
}  // namespace ronde
