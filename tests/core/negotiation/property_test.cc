// Random programs on random trees with random interleavings. What must come of each operation is computed from the
// program, without a negotiator.
#include <gtest/gtest.h>

#include <algorithm>

#include "negotiation/fusion.h"
#include "negotiation/program.h"
#include "negotiation/simulation.h"

namespace ronde {
namespace {

// What happens to the job besides its program.
enum class Trouble { kNone, kAbort, kLost, kGoodbye };

class Runner {
 public:
  Runner(const Program& program, std::vector<int> parents, Simulation& job, std::mt19937& random, Trouble trouble)
      : program_(program),
        parents_(std::move(parents)),
        job_(job),
        random_(random),
        trouble_(trouble),
        ranks_(program.size) {
    for (auto& rank : ranks_) rank.sets[0] = kGlobalSet;
  }

  void Run() {
    std::size_t until_trouble = random_() % 200;
    int idle = 0;
    while (idle < 3) {
      bool active = false;
      for (int r = 0; r < program_.size; ++r) {
        if (random_() % 3 == 0) active |= Advance(r);
      }
      for (auto i = random_() % 5; i > 0; --i) active |= job_.Step();
      if (until_trouble-- == 0) Cause();
      if (!active) {  // really? let everybody try
        for (int r = 0; r < program_.size; ++r) active |= Advance(r);
        active |= job_.Step();
      }
      idle = active ? 0 : idle + 1;
      if (!active) job_.Wake();
    }
  }

  void Check() {
    std::size_t longest = 0;
    for (int r = 0; r < program_.size; ++r) {
      if (job_.batches[r].size() > job_.batches[longest].size()) longest = r;
    }
    bool aborted = std::any_of(job_.aborts.begin(), job_.aborts.end(), [](const Result& a) { return !a.ok(); });
    if (trouble_ == Trouble::kNone) {
      ASSERT_FALSE(aborted) << job_.aborts[0].message();
    }
    for (int r = 0; r < program_.size; ++r) {
      for (auto& [ticket, end] : job_.ended[r]) ASSERT_EQ(end.times, 1) << "rank " << r << " ticket " << ticket;
      if (!job_.left[r]) {
        ASSERT_EQ(ranks_[r].next, program_.steps[r].size()) << "rank " << r << " is stuck";
      }
      ASSERT_NO_FATAL_FAILURE(CheckOrder(r, longest));
      ASSERT_NO_FATAL_FAILURE(CheckTexts(r));
      if (!job_.left[r] && !aborted) {
        ASSERT_FALSE(job_.node(r).busy());
      }
      if (trouble_ == Trouble::kNone) {
        ASSERT_EQ(job_.batches[r].size(), job_.batches[0].size());
      }
      if (trouble_ != Trouble::kGoodbye) {
        ASSERT_EQ(!job_.aborts[r].ok(), aborted) << "rank " << r;
      }
      if (trouble_ == Trouble::kAbort) {
        ASSERT_EQ(job_.aborts[r].message(), job_.aborts[0].message());
      }
    }
    if (trouble_ == Trouble::kNone) {
      for (int r = 0; r < program_.size; ++r) ASSERT_EQ(job_.node(r).NextWake(), TimePoint::max());
      ASSERT_NO_FATAL_FAILURE(CheckSets());
      ASSERT_NO_FATAL_FAILURE(CheckOutcomes());
    }
    if (!aborted) {
      ASSERT_NO_FATAL_FAILURE(CheckNobodyWaits(longest));
    }
  }

 private:
  struct Rank {
    std::size_t next = 0;
    std::map<Ticket, std::size_t> waits;   // for joins, changes of sets: the new set's index, or 0
    std::map<std::string, Ticket> flying;  // by set and name
    std::map<std::size_t, SetId> sets;     // by set index
  };

  bool Advance(int r) {
    Rank& rank = ranks_[r];
    if (job_.left[r] || rank.next == program_.steps[r].size()) return false;
    const Step& step = program_.steps[r][rank.next];
    switch (step.kind) {
      case Step::kJoin: rank.waits[job_.Submit(r, Control(Op::kJoin))] = 0; break;
      case Step::kAdd:
        rank.waits[job_.Submit(r, Control(Op::kAddProcessSet, program_.sets[step.index]))] = step.index;
        break;
      case Step::kRemove:
        if (!rank.sets.count(step.index)) break;
        rank.waits[job_.Submit(r, Control(Op::kRemoveProcessSet, {static_cast<int>(rank.sets[step.index])}))] = 0;
        break;
      case Step::kSync:
        for (auto [ticket, set] : rank.waits) {
          if (job_.ended[r][ticket].times == 0) return false;
        }
        for (auto [ticket, set] : rank.waits) {
          const auto& end = job_.ended[r][ticket];
          if (set != 0 && end.result.ok()) rank.sets[set] = end.entry.new_set;
        }
        rank.waits.clear();
        break;
      case Step::kOperation: {
        const Planned& op = program_.operations[step.index];
        Definition d = op.other.count(r) ? op.other.at(r) : op.definition;
        if (!rank.sets.count(d.set)) break;  // the set was not made, because of some trouble
        d.set = rank.sets[d.set];
        std::string key = std::to_string(d.set) + ' ' + d.name;
        if (!d.name.empty() && rank.flying.count(key) && job_.ended[r][rank.flying[key]].times == 0) return false;
        tickets_[{step.index, r}] = rank.flying[key] = job_.Submit(r, d, RowsOf(op, step.index, r));
        break;
      }
    }
    ++rank.next;
    return true;
  }

  void Cause() {
    int r = static_cast<int>(random_() % program_.size);
    switch (trouble_) {
      case Trouble::kNone: return;
      case Trouble::kAbort: job_.node(r).Abort(Result(Code::kInternal, "boom on rank " + std::to_string(r))); break;
      case Trouble::kLost:
        if (program_.size > 1) job_.Break(std::max(r, 1), parents_[std::max(r, 1)]);
        return;
      case Trouble::kGoodbye: return job_.Goodbye(r);
    }
    job_.Collect(r);
  }

  // This rank's batches are the first ones of the longest order, and say the same.
  void CheckOrder(int r, std::size_t longest) {
    ASSERT_LE(job_.batches[r].size(), job_.batches[longest].size());
    std::map<SetId, std::uint64_t> numbers;
    for (std::size_t b = 0; b < job_.batches[r].size(); ++b) {
      const Batch& mine = job_.batches[r][b];
      const Batch& other = job_.batches[longest][b];
      ASSERT_EQ(mine.set, other.set);
      ASSERT_EQ(mine.number, other.number);
      ASSERT_EQ(mine.number, numbers[mine.set]++);
      ASSERT_EQ(mine.entries.size(), other.entries.size());
      for (std::size_t e = 0; e < mine.entries.size(); ++e) {
        const AgreedEntry &a = mine.entries[e], &b2 = other.entries[e];
        ASSERT_EQ(*a.definition, *b2.definition);
        ASSERT_EQ(a.values, b2.values);
        ASSERT_EQ(a.joined, b2.joined);
        ASSERT_EQ(a.error.code(), b2.error.code());
        ASSERT_EQ(a.error.message(), b2.error.message());
        ASSERT_EQ(a.new_set, b2.new_set);
        ASSERT_EQ(a.existed, b2.existed);
        ASSERT_EQ(a.last_joined, b2.last_joined);
      }
    }
  }

  void CheckTexts(int r) {
    for (auto& [ticket, end] : job_.ended[r]) {
      if (end.result.ok()) continue;
      ASSERT_NE(end.result.message(), "");
      bool may_shut_down = trouble_ == Trouble::kGoodbye && end.result.code() == Code::kShutdown;
      bool abort = !job_.aborts[r].ok() && end.result.message() == job_.aborts[r].message();
      bool expected = end.result.code() == Code::kMismatch || end.result.code() == Code::kArgument;
      ASSERT_TRUE(may_shut_down || abort || expected) << end.result.message();
    }
  }

  // Process sets follow from the order alone.
  void CheckSets() {
    std::map<SetId, std::vector<int>> live{{kGlobalSet, program_.sets[0]}};
    SetId last = kGlobalSet;
    for (const Batch& batch : job_.batches[0]) {
      for (const AgreedEntry& entry : batch.entries) {
        const Definition& d = *entry.definition;
        if (d.op == Op::kRemoveProcessSet) {
          auto id = static_cast<SetId>(d.ranks.front());
          ASSERT_EQ(entry.error.ok(), id != kGlobalSet && live.erase(id) == 1) << entry.error.message();
        } else if (d.op == Op::kAddProcessSet) {
          ASSERT_TRUE(entry.error.ok());
          auto equal = std::find_if(live.begin(), live.end(), [&](const auto& set) { return set.second == d.ranks; });
          ASSERT_EQ(entry.existed, equal != live.end());
          ASSERT_EQ(entry.new_set, entry.existed ? equal->first : last + 1);
          if (!entry.existed) live[last = entry.new_set] = d.ranks;
        }
      }
    }
    for (int r = 0; r < program_.size; ++r) {
      for (SetId id = 0; id <= last; ++id) {
        const auto* members = job_.node(r).Members(id);
        ASSERT_EQ(members != nullptr, live.count(id) == 1);
        if (members) {
          ASSERT_EQ(*members, live[id]);
        }
      }
    }
  }

  void CheckOutcomes() {
    for (std::size_t i = 0; i < program_.operations.size(); ++i) {
      const Planned& op = program_.operations[i];
      std::map<int, Definition> said;
      for (int member : op.members) {
        if (std::count(op.skipped.begin(), op.skipped.end(), member)) continue;
        said[member] = op.other.count(member) ? op.other.at(member) : op.definition;
      }
      bool agree = true, root_joined = false;
      for (auto& [rank, definition] : said) agree = agree && definition == said.begin()->second;
      root_joined = op.definition.op == Op::kBroadcast && !said.count(op.definition.root);
      std::vector<Values> values;
      for (int member : op.members) {
        Values rows = RowsOf(op, i, member);
        if (!said.count(member)) rows.assign(rows.size(), 0);
        if (Info(op.definition.op).ragged) values.push_back(rows);
      }
      for (auto& [rank, definition] : said) {
        ASSERT_TRUE((tickets_.count({i, rank})));
        const auto& end = job_.ended[rank][tickets_[{i, rank}]];
        if (op.removed && end.result.code() == Code::kArgument) continue;
        if (!agree || root_joined) {
          ASSERT_EQ(end.result.code(), Code::kMismatch) << end.result.message();
          ASSERT_NE(end.result.message().find(agree ? "has joined" : "ranks disagree about"), std::string::npos);
          int first = said.begin()->first;
          Ticket ticket = tickets_[std::pair(i, first)];
          ASSERT_EQ(end.result.message(), job_.ended[first][ticket].result.message());
          continue;
        }
        ASSERT_TRUE(end.result.ok()) << end.result.message();
        ASSERT_TRUE(end.in_batch);
        definition.set = end.entry.definition->set;
        ASSERT_EQ(*end.entry.definition, definition);
        ASSERT_EQ(end.entry.joined, op.skipped);
        ASSERT_EQ(end.entry.values, values);
      }
    }
  }

  // Nobody runs an operation that counts on the data of a rank that has given it up.
  void CheckNobodyWaits(std::size_t longest) {
    std::map<SetId, std::vector<int>> live{{kGlobalSet, program_.sets[0]}};
    for (std::size_t b = 0; b < job_.batches[longest].size(); ++b) {
      const Batch& batch = job_.batches[longest][b];
      for (std::size_t e = 0; e < batch.entries.size(); ++e) {
        const AgreedEntry& entry = batch.entries[e];
        const Definition& d = *entry.definition;
        if (entry.error.ok() && d.op == Op::kAddProcessSet) live[entry.new_set] = d.ranks;
        if (!entry.error.ok() || !Info(d.op).tensors) continue;
        for (int member : live[batch.set]) {
          if (std::count(entry.joined.begin(), entry.joined.end(), member)) continue;
          ASSERT_LT(b, job_.batches[member].size()) << "rank " << member << " never hears of " << d.name;
          ASSERT_NE(job_.batches[member][b].entries[e].ticket, 0u);
        }
      }
    }
  }

  const Program& program_;
  const std::vector<int> parents_;
  Simulation& job_;
  std::mt19937& random_;
  const Trouble trouble_;
  std::vector<Rank> ranks_;
  std::map<std::pair<std::size_t, int>, Ticket> tickets_;  // by operation and rank
};

void RunMany(Trouble trouble, unsigned seeds) {
  for (unsigned seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    int size = std::vector<int>{1, 2, 3, 5, 9}[random() % 5];
    Simulation::Settings settings;
    settings.parents = std::vector<std::vector<int>>{Star(size), Chain(size), Binary(size)}[random() % 3];
    settings.cache_capacity = std::vector<int>{0, 1, 4, 65536}[random() % 4];
    settings.linger = random() % 4 == 0 ? 0.001 : 0;
    settings.seed = seed;
    Simulation job(settings);
    Program program = ProgramMaker(random).Make(size);
    Runner runner(program, settings.parents, job, random, trouble);
    runner.Run();
    ASSERT_NO_FATAL_FAILURE(runner.Check());
  }
}

TEST(AnyProgram, EndsAsItsOperationsSay) { RunMany(Trouble::kNone, 2000); }
TEST(AnyProgram, EndsEverywhereWhenOneRankAborts) { RunMany(Trouble::kAbort, 1000); }
TEST(AnyProgram, EndsEverywhereWhenANeighbourIsLost) { RunMany(Trouble::kLost, 1000); }
TEST(AnyProgram, EndsWhenARankLeaves) { RunMany(Trouble::kGoodbye, 2000); }

}  // namespace
}  // namespace ronde
