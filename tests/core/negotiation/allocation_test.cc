// What has been negotiated before costs no allocation: a number up and down the tree, in memory that is there.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "negotiation/simulation.h"

namespace ronde {
namespace {

std::size_t allocations = 0;  // of this program, which has one thread

// A job whose links deliver everything at once, and allocate nothing themselves.
class SteadyJob {
 public:
  SteadyJob(const std::vector<int>& parents, std::vector<Definition> definitions, Values values = {})
      : parents_(parents), definitions_(std::move(definitions)), values_(std::move(values)) {
    for (int r = 0; r < size(); ++r) {
      NegotiatorConfig config;
      config.rank = r;
      config.parent = parents[r];
      config.parents = parents;
      for (int c = 0; c < size(); ++c) {
        if (parents[c] == r) config.children.push_back(c);
        config.host_names.push_back("h");
      }
      config.stall_warning = std::chrono::seconds(60);
      nodes_.push_back(CreateNegotiator(config));
      known_.emplace_back(definitions_.size());
    }
    actions_.resize(parents.size());
    committed_.resize(parents.size());
  }

  // Every rank submits everything, each in an order of its own, and the batches are finished. Returns how many times
  // memory was allocated.
  std::size_t Step() {
    const std::size_t before = allocations;
    const std::size_t count = definitions_.size();
    std::fill(committed_.begin(), committed_.end(), 0);
    for (int r = size() - 1; r >= 0; --r) {
      for (std::size_t k = 0; k < count; ++k) {
        const std::size_t i = (k * 7 + static_cast<std::size_t>(r) * 3) % count;
        DefinitionPtr& known = known_[r][i];
        if (!known || known->id == 0) known = nodes_[r]->Intern(definitions_[i]);
        nodes_[r]->Submit(++last_ticket_, known, values_, now_);
      }
      Deliver(r);
    }
    for (int r = 0; r < size(); ++r) Deliver(r);       // down
    for (int r = size() - 1; r >= 0; --r) Deliver(r);  // "finished", up
    for (std::size_t committed : committed_) EXPECT_EQ(committed, count);
    return allocations - before;
  }

 private:
  int size() const { return static_cast<int>(parents_.size()); }
  void Deliver(int r) {
    Actions& actions = actions_[r];
    nodes_[r]->Take(&actions);
    EXPECT_TRUE(actions.failed.empty());
    for (const auto& [peer, message] : actions.messages) nodes_[peer]->Receive(r, message, now_);
    for (const auto& batch : actions.batches) {
      for (const auto& entry : batch.entries) EXPECT_TRUE(entry.error.ok() && entry.ticket != 0);
      committed_[r] += batch.entries.size();
      if (r == 0) nodes_[r]->Finished(batch.set, batch.number, now_);
    }
  }

  const std::vector<int> parents_;
  const std::vector<Definition> definitions_;
  const Values values_;  // of each of them
  const TimePoint now_{std::chrono::hours(1)};
  std::vector<std::unique_ptr<Negotiator>> nodes_;
  std::vector<std::vector<DefinitionPtr>> known_;  // by rank
  std::vector<Actions> actions_;
  std::vector<std::size_t> committed_;  // entries in this step, by rank
  Ticket last_ticket_ = 0;
};

// So many that lists grow in the first steps; 31 has no factor in common with the order's 7.
constexpr int kEntries = 31;
std::string LongName(int i) { return "gradient.of.a.layer.with.a.long.name." + std::to_string(i); }

TEST(Allocations, NoneInTheSteadyState) {
  std::map<std::string, std::vector<Definition>> kinds;
  for (int i = 0; i < kEntries; ++i) {
    kinds["single"].push_back(Reduce(LongName(i), {i + 1, 3, 5}));
    kinds["group"].push_back(Group(LongName(i), {LongName(i) + ".a", LongName(i) + ".b", LongName(i) + ".c"}));
    kinds["unnamed"].push_back(Reduce(""));
  }
  for (const auto& parents : {Star(1), Star(2), Star(4), Chain(3)}) {
    for (const auto& [kind, definitions] : kinds) {
      SteadyJob job(parents, definitions);
      EXPECT_GT(job.Step(), kEntries * parents.size()) << "the counter does not count";
      for (int step = 0; step < 3; ++step) job.Step();
      for (int step = 0; step < 10; ++step) EXPECT_EQ(job.Step(), 0u) << kind << " on " << parents.size() << " ranks";
    }
  }
}

// Row counts are lists of the decided entry: one, and one for each member.
TEST(Allocations, OfARaggedOperationOnlyItsRowCounts) {
  std::vector<Definition> definitions;
  for (int i = 0; i < kEntries; ++i) {
    definitions.push_back(Reduce(LongName(i), {0, 3}));
    definitions.back().op = Op::kAllgather;
  }
  SteadyJob job(Star(1), definitions, {5});
  for (int step = 0; step < 4; ++step) job.Step();
  for (int step = 0; step < 10; ++step) EXPECT_LE(job.Step(), 2u * kEntries);
}

TEST(KeyTable, KeepsWhatItErases) {
  KeyTable<std::vector<int>> table;
  auto fill = [&](int from) {
    for (int i = from; i < from + 50; ++i) {
      auto& list = table.Add(KeyView(LongName(i)));
      list.assign(20, i);
    }
    for (int i = from; i < from + 50; ++i) {
      auto* list = table.Find(KeyView(LongName(i)));
      ASSERT_NE(list, nullptr);
      EXPECT_EQ(*list, std::vector<int>(20, i));
      table.Erase(KeyView(LongName(i)));
      EXPECT_EQ(table.Find(KeyView(LongName(i))), nullptr);
    }
    EXPECT_TRUE(table.empty());
  };
  fill(100);
  fill(200);
  for (int i : {5, 3, 9, 1}) table.Add(KeyView(std::to_string(i))).assign(1, i);
  std::vector<int> walked;
  for (const auto* list : table.Sorted()) walked.push_back(list->front());
  EXPECT_EQ(walked, (std::vector<int>{1, 3, 5, 9}));
  table.EraseIf([](const std::vector<int>& list) { return list.front() == 5; });
  EXPECT_EQ(table.Find(KeyView("5")), nullptr);
  EXPECT_NE(table.Find(KeyView("9")), nullptr);
}

}  // namespace
}  // namespace ronde

// For the whole program. Not inlined, so that the compiler does not take free() for a mistake.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  ++ronde::allocations;
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
