// Parts of the engine that need no threads.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "engine/checks.h"
#include "engine/inbox.h"
#include "engine/known_requests.h"
#include "engine/live_sets.h"
#include "engine/tickets.h"

namespace ronde {
namespace {

std::shared_ptr<Operation> Named(const std::string& name) {
  Request request;
  request.name = name;
  return std::make_shared<Operation>(std::move(request));
}

TEST(Tickets, GrowAroundThoseThatStay) {
  Tickets tickets;
  std::mt19937 random(5);
  std::map<Ticket, std::string> expected;
  Ticket last = 0;
  for (int i = 0; i < 20000; ++i) {
    // Up to some hundreds in flight, a few of them very old.
    const bool add = expected.empty() || random() % (expected.size() > 300 ? 3 : 2) == 0;
    if (add) {
      const Ticket ticket = tickets.Add(Named("t" + std::to_string(i)));
      EXPECT_GT(ticket, last);
      last = ticket;
      expected[ticket] = "t" + std::to_string(i);
    } else {
      auto gone = std::prev(expected.end(), 1 + static_cast<int>(random() % ((expected.size() + 1) / 2)));
      ASSERT_NE(tickets.Find(gone->first), nullptr);
      auto operation = tickets.Take(gone->first);
      ASSERT_NE(operation, nullptr);
      EXPECT_EQ(operation->request().name, gone->second);
      EXPECT_EQ(tickets.Take(gone->first), nullptr);
      EXPECT_EQ(tickets.Find(gone->first), nullptr);
      expected.erase(gone);
    }
  }
  EXPECT_EQ(tickets.Take(0), nullptr);
  std::map<Ticket, std::string> left;
  tickets.ForEach([&](Ticket ticket, const Operation& o) { left[ticket] = o.request().name; });
  EXPECT_EQ(left, expected);
  std::size_t taken = 0;
  tickets.TakeAll([&](std::shared_ptr<Operation>) { ++taken; });
  EXPECT_EQ(taken, expected.size());
  tickets.ForEach([&](Ticket, const Operation&) { FAIL() << "one is left"; });
}

Request Ask(Op op = Op::kAllreduce, int tensors = 1) {
  Request request;
  request.op = op;
  request.name = "x";
  for (int i = 0; i < tensors; ++i) request.tensors.push_back({"", nullptr, nullptr, DType::kFloat32, {i + 2, 3}});
  return request;
}

// A change of any field is a match exactly when it makes no other definition.
TEST(Matches, AgreesWithTheDefinition) {
  const std::vector<std::function<void(Request&)>> changes = {
      [](Request&) {},
      [](Request& r) { r.op = Op::kBarrier; },
      [](Request& r) { r.op = r.op == Op::kAllreduce ? Op::kReducescatter : Op::kAllreduce; },
      [](Request& r) { r.reduction = Reduction::kMax; },
      [](Request& r) { r.prescale = 2; },
      [](Request& r) { r.postscale = 0; },
      [](Request& r) { r.postscale = -0.0; },
      [](Request& r) { r.postscale = std::nan(""); },
      [](Request& r) { r.root = 1; },
      [](Request& r) { r.set = 3; },
      [](Request& r) { r.device = 0; },
      [](Request& r) { r.name = "y"; },
      [](Request& r) { r.name = ""; },
      [](Request& r) { r.ranks = {0, 1}; },
      [](Request& r) { r.caller_waits = true; },
      [](Request& r) { r.splits = {1, 1}; },
      [](Request& r) { r.tensors[0].name = "x"; },
      [](Request& r) { r.tensors[0].name = "x.0"; },
      [](Request& r) { r.tensors[0].name = "x.00"; },
      [](Request& r) { r.tensors.back().name = "x.11"; },
      [](Request& r) { r.tensors[0].dtype = DType::kFloat64; },
      [](Request& r) { r.tensors[0].shape = {7, 3}; },
      [](Request& r) { r.tensors.back().shape = {13, 4}; },
      [](Request& r) { r.tensors[0].shape = {2}; },
      [](Request& r) { r.tensors.push_back(r.tensors.front()); },
      [](Request& r) { r.tensors.erase(r.tensors.begin()); },
  };
  auto bytes = [](const Request& request) {
    Writer writer;
    Write(writer, DefinitionOf(request));
    return std::string(writer.bytes());
  };
  for (Op op : {Op::kAllreduce, Op::kBroadcast, Op::kAllgather, Op::kAlltoall, Op::kReducescatter}) {
    for (int tensors : {1, 2, 12}) {
      for (std::size_t a = 0; a < changes.size(); ++a) {
        for (std::size_t b = 0; b < changes.size(); ++b) {
          Request one = Ask(op, tensors), other = one;
          changes[a](one);
          changes[b](other);
          EXPECT_EQ(Matches(other, DefinitionOf(one)), bytes(one) == bytes(other))
              << Info(op).name << ", " << tensors << " tensors, changes " << a << " and " << b;
        }
      }
    }
  }
}

TEST(KnownRequests, FindWhatHasAnIdAndStaysBelowTheCapacity) {
  DefinitionTable table;
  KnownRequests known(2);
  Request x = Ask();
  auto keep = [&](const Request& request, std::uint64_t id) {
    DefinitionPtr made = table.Intern(DefinitionOf(request));
    known.Keep(made);
    if (id != 0) table.Assign(made, id);
    return made;
  };
  EXPECT_EQ(known.Find(x), nullptr);
  DefinitionPtr made = keep(x, 0);
  EXPECT_EQ(known.Find(x), nullptr);  // no id yet: rank 0 may have given one to an equal definition
  table.Assign(made, 1);
  ASSERT_NE(known.Find(x), nullptr);
  EXPECT_EQ(*known.Find(x), made);

  Request wider = x;  // another shape under the same name takes the place
  wider.tensors[0].shape = {2, 4};
  EXPECT_EQ(known.Find(wider), nullptr);
  keep(wider, 2);
  EXPECT_NE(known.Find(wider), nullptr);
  EXPECT_EQ(known.Find(x), nullptr);

  Request elsewhere = wider;  // in another set it has a place of its own
  elsewhere.set = 1;
  EXPECT_EQ(known.Find(elsewhere), nullptr);
  keep(elsewhere, 3);
  EXPECT_NE(known.Find(wider), nullptr);
  EXPECT_NE(known.Find(elsewhere), nullptr);

  Request third = wider;
  third.name = "z";
  keep(third, 4);
  EXPECT_NE(known.Find(third), nullptr);
  EXPECT_EQ((known.Find(wider) != nullptr) + (known.Find(elsewhere) != nullptr), 0);
  table.Evict(4);
  EXPECT_EQ(known.Find(third), nullptr);

  KnownRequests none(0);
  none.Keep(made);
  EXPECT_EQ(none.Find(x), nullptr);
}

TEST(Inbox, EachFailureAndTheLeaveAreTakenOnce) {
  Inbox inbox;
  Inbox::Taken taken;
  EXPECT_TRUE(inbox.empty());
  EXPECT_TRUE(inbox.Submit({Named("a"), {}}).ok());
  inbox.Finished(3, 7);
  inbox.Fail(Result(Code::kTransport, "first"), false);
  inbox.Fail(Result(Code::kTransport, "second"), true);
  EXPECT_FALSE(inbox.empty());
  inbox.Take(&taken);
  ASSERT_EQ(taken.submissions.size(), 1u);
  EXPECT_EQ(taken.finished, (std::vector<std::pair<SetId, std::uint64_t>>{{3, 7}}));
  EXPECT_EQ(taken.failure.message(), "first");
  EXPECT_FALSE(taken.final_failure || taken.leave);
  EXPECT_TRUE(inbox.empty());
  inbox.Fail(Result(Code::kTransport, "third"), true);
  inbox.Take(&taken);
  EXPECT_TRUE(taken.empty());

  inbox.Close(Result(Code::kShutdown, "closed"));
  inbox.Close(Result(Code::kShutdown, "closed again"));
  EXPECT_EQ(inbox.Submit({Named("b"), {}}).message(), "closed");
  inbox.CloseFinally(Result(Code::kStall, "aborted"));
  EXPECT_EQ(inbox.Submit({Named("c"), {}}).message(), "aborted");
  for (int i = 0; i < 2; ++i) inbox.Leave();
  inbox.Take(&taken);
  EXPECT_TRUE(taken.leave && taken.submissions.empty());
  inbox.Leave();
  inbox.Take(&taken);
  EXPECT_FALSE(taken.leave);
}

TEST(LiveSets, ChangeInTheOrderOfBatches) {
  LiveSets sets(3);
  EXPECT_EQ(*sets.Find(kGlobalSet), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(sets.Find(1), nullptr);
  auto change = [](Op op, std::vector<int> ranks, SetId made, bool fails) {
    auto definition = std::make_shared<Definition>();
    definition->op = op;
    definition->ranks = std::move(ranks);
    AgreedEntry entry;
    entry.definition = definition;
    entry.new_set = made;
    if (fails) entry.error = Result(Code::kMismatch, "no");
    return entry;
  };
  Batch batch;
  batch.entries = {change(Op::kAddProcessSet, {0, 2}, 1, false), change(Op::kAddProcessSet, {1}, 2, true)};
  EXPECT_EQ(sets.Apply(batch)->size(), 3u);
  ASSERT_NE(sets.Find(1), nullptr);
  EXPECT_EQ(*sets.Find(1), (std::vector<int>{0, 2}));
  EXPECT_EQ(sets.Find(2), nullptr);
  batch.set = 1;  // that removes its own set still has its members
  batch.entries = {change(Op::kRemoveProcessSet, {1}, 0, false)};
  EXPECT_EQ(sets.Apply(batch)->size(), 2u);
  EXPECT_EQ(sets.Find(1), nullptr);
  EXPECT_TRUE(sets.Apply(batch)->empty());
}

}  // namespace
}  // namespace ronde
