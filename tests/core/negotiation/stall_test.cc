// Operations that some ranks never submit: who is named, when, and when the job ends.
#include <gtest/gtest.h>

#include <chrono>

#include "negotiation/simulation.h"

namespace ronde {
namespace {

TEST(Stall, IsReportedWithWhatTheMissingWaitInAndAbortsAtTheUsersLimit) {
  for (const auto& tree : {Star(3), Chain(3)}) {
    Simulation job({tree, 65536, 1, 3.0});
    job.blocked[1] = {true, "waiting in broadcast 'y'"};
    Ticket ticket = job.Submit(2, Reduce("x"));
    job.Run();
    for (int i = 0; i < 15; ++i) job.Tick(0.1);
    ASSERT_EQ(job.logs.size(), 1u);
    EXPECT_NE(job.logs[0].find("allreduce 'x' has waited"), std::string::npos) << job.logs[0];
    EXPECT_NE(
        job.logs[0].find("ready on rank 2; missing: rank 0 (host h0: not inside ronde), rank 1 (host h1: waiting in "
                         "broadcast 'y')"),
        std::string::npos)
        << job.logs[0];
    EXPECT_EQ(job.ended[2][ticket].times, 0);
    for (int i = 0; i < 20; ++i) job.Tick(0.1);
    std::string text = "allreduce 'x': ready on rank 2, but ranks 0, 1 did not submit it within 3 s";
    EXPECT_EQ(job.ended[2][ticket].result.message(), text);
    for (int r = 0; r < 3; ++r) EXPECT_EQ(job.aborts[r].message(), text);
    Ticket late = job.Submit(1, Reduce("x"));
    EXPECT_EQ(job.ended[1][late].result.message(), text);
  }
}

TEST(Stall, ByDefaultOnlyADeadlockAbortsAtTenMinutes) {
  for (bool blocked : {false, true}) {
    Simulation job({Star(2)});
    job.blocked[1] = {blocked, blocked ? "waiting in barrier" : "not inside ronde"};
    job.Submit(0, Reduce("x"));
    job.Run();
    for (int i = 0; i < 650; ++i) job.Tick(1);
    EXPECT_EQ(job.aborts[0].code(), blocked ? Code::kStall : Code::kOk);
    if (blocked) continue;
    EXPECT_EQ(job.logs.size(), 4u);  // after 60, 120, 240 and 480 seconds
    for (int i = 0; i < 660; ++i) job.Tick(10);
    EXPECT_EQ(job.aborts[0].code(), Code::kStall);
  }
}

TEST(Stall, RanksThatBecomeReadyLaterAreNamedAsReady) {
  Simulation job({Chain(4), 65536, /*stall_warning=*/1});
  job.Submit(3, Reduce("x"));
  job.Run();
  for (int i = 0; i < 15; ++i) job.Tick(0.1);
  ASSERT_EQ(job.logs.size(), 1u);
  EXPECT_NE(job.logs[0].find("ready on rank 3; missing: rank 0 "), std::string::npos) << job.logs[0];
  job.Submit(2, Reduce("x"));
  job.Run();
  for (int i = 0; i < 15; ++i) job.Tick(0.1);
  ASSERT_EQ(job.logs.size(), 2u);
  EXPECT_NE(job.logs[1].find("ready on ranks 2, 3; missing: rank 0 "), std::string::npos) << job.logs[1];
}

TEST(Stall, ARankThatDoesNotAnswerIsSaidToAndDoesNotHoldUpTheReport) {
  Simulation job({Star(3), 65536, /*stall_warning=*/1});
  job.Submit(0, Reduce("x"));
  job.tamper = [](Simulation::Link link, std::vector<std::byte>& message) {
    if (link.second == 2) message.resize(1);  // rank 2 hears nothing
  };
  job.Run();
  for (int i = 0; i < 25; ++i) job.Tick(0.1);
  EXPECT_TRUE(job.logs.empty());
  for (int i = 0; i < 20; ++i) job.Tick(0.1);
  ASSERT_EQ(job.logs.size(), 1u);
  EXPECT_NE(job.logs[0].find("rank 1 (host h1: not inside ronde), rank 2 (host h2: no answer)"), std::string::npos)
      << job.logs[0];
}

TEST(Stall, AnAskedRankWantsToBeWokenAtOnce) {
  Simulation job({Star(2), 65536, /*stall_warning=*/1});
  job.Submit(0, Reduce("x"));
  job.now += std::chrono::seconds(2);
  job.node(0).Tick(job.now, {});
  job.Collect(0);
  job.Run();
  EXPECT_LE(job.node(1).NextWake(), job.now);
}

TEST(Stall, ALimitOfZeroNeverAborts) {
  Simulation job({Star(2), 65536, 60, 0.0});
  job.blocked[1] = {true, "waiting in barrier"};
  job.Submit(0, Reduce("x"));
  job.Run();
  for (int i = 0; i < 1000; ++i) job.Tick(20);
  EXPECT_TRUE(job.aborts[0].ok());
  EXPECT_FALSE(job.logs.empty());
}

TEST(Stall, AJoinedRankIsExempt) {
  for (bool joined : {false, true}) {
    Simulation job({Star(3)});
    job.blocked[2] = {true, "waiting in join"};
    if (joined) job.Submit(2, Control(Op::kJoin));
    job.Submit(0, Reduce("x"));
    job.Run();
    for (int i = 0; i < 650; ++i) job.Tick(1);
    ASSERT_FALSE(job.logs.empty());
    EXPECT_EQ(job.logs[0].find("rank 2 (host h2") == std::string::npos, joined) << job.logs[0];
    EXPECT_TRUE(job.aborts[0].ok());  // rank 1 is outside of ronde
  }
}

}  // namespace
}  // namespace ronde
