// Random programs for all ranks of a job: operations of all kinds, process sets that come and go, ranks that join.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "negotiation/simulation.h"

namespace ronde {

// One operation of the program, and who takes part.
struct Planned {
  Definition definition;            // `set` is an index into Program::sets until it runs
  std::vector<int> members;         // of its set
  std::map<int, Definition> other;  // ranks that submit something else under this name
  std::vector<int> skipped;         // members that join instead
  bool removed = false;             // its set is removed while it may be in flight, so that it may fail for that
};
struct Step {
  enum { kOperation, kJoin, kAdd, kRemove, kSync } kind = kOperation;
  std::size_t index = 0;  // of the operation or of the set
};
struct Program {
  int size = 0;
  std::vector<std::vector<int>> sets;  // members by set index; 0 is the global one
  std::vector<Planned> operations;
  std::vector<std::vector<Step>> steps;  // by rank
};

inline Values RowsOf(const Planned& op, std::size_t index, int rank) {
  const Definition& d = op.definition;
  if (!Info(d.op).ragged) return {};
  std::size_t count = d.tensors.size() * (Info(d.op).splits ? op.members.size() : 1);
  Values values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(static_cast<std::int64_t>(index * 100 + rank * 10 + i));
  return values;
}

class ProgramMaker {
 public:
  explicit ProgramMaker(std::mt19937& random) : random_(random) {}

  Program Make(int size) {
    program_.size = size;
    program_.steps.resize(size);
    program_.sets.push_back({});
    for (int r = 0; r < size; ++r) program_.sets[0].push_back(r);
    live_ = {0};
    for (int round = 0; round < 4; ++round) Round();
    return std::move(program_);
  }

 private:
  bool Chance(unsigned one_in) { return random_() % one_in == 0; }

  Definition RandomDefinition(std::size_t set, const std::string& name) {
    Definition d = Reduce(name, {static_cast<std::int64_t>(random_() % 3 + 1), 2});
    d.set = static_cast<SetId>(set);
    const auto& members = program_.sets[set];
    switch (random_() % 6) {
      case 0: d.op = Op::kAllgather; break;
      case 1: d.op = Op::kAlltoall; break;
      case 2:
        d.op = Op::kBroadcast;
        d.root = members[random_() % members.size()];
        break;
      case 3: d.op = Op::kReducescatter; break;
      default: break;
    }
    if (Info(d.op).ragged) d.tensors[0].shape[0] = 0;
    if (!name.empty() && Chance(5)) {
      d.tensors.push_back(TensorSpec{name + ".b", DType::kFloat64, d.tensors[0].shape});
      d.tensors[0].name = name + ".a";
    }
    return d;
  }

  Definition Changed(Definition d) {
    switch (random_() % 4) {
      case 0: d.tensors.back().dtype = DType::kInt32; break;
      case 1: d.tensors.back().shape.push_back(7); break;
      case 2: d.prescale = 0.25; break;
      default: d.device = 3; break;
    }
    return d;
  }

  void Round() {
    bool joins = Chance(3);
    std::size_t removed = 0;
    if (!joins && live_.size() > 1 && Chance(3)) removed = live_[1 + random_() % (live_.size() - 1)];
    std::set<int> joiners;
    for (int r = 0; joins && r < program_.size; ++r) {
      if (Chance(2)) joiners.insert(r);
    }
    std::size_t first = program_.operations.size();
    std::map<std::pair<std::size_t, Op>, int> unnamed;
    int count = static_cast<int>(random_() % 12);
    for (int i = 0; i < count; ++i) {
      std::size_t set = live_[random_() % live_.size()];
      std::string name = Chance(4) ? "" : "t" + std::to_string(i);  // names come again in the next round
      Planned op{RandomDefinition(set, name), program_.sets[set], {}, {}, false};
      bool first_of_kind = unnamed[{set, op.definition.op}]++ == 0;
      for (int member : op.members) {
        // Unnamed operations pair by number, so a rank may only leave out the last ones of a kind.
        bool may_skip = !name.empty() || (i > count / 2 && !first_of_kind);
        if (joiners.count(member) && may_skip && (Chance(2) || Stopped(first, set, op.definition.op, name, member))) {
          op.skipped.push_back(member);
        } else if (joiners.count(member) && name.empty() && Stopped(first, set, op.definition.op, name, member)) {
          op.skipped.push_back(member);
        }
      }
      if (Chance(8)) {
        for (int member : op.members) {
          if (Chance(2)) op.other[member] = Changed(op.definition);
        }
      }
      program_.operations.push_back(std::move(op));
    }
    for (auto& op : program_.operations) op.removed |= removed != 0 && op.definition.set == removed;
    std::size_t added = 0;
    if (!joins && Chance(2)) {
      std::vector<int> members;
      for (int r = 0; r < program_.size; ++r) {
        if (Chance(2)) members.push_back(r);
      }
      if (!members.empty()) {
        added = program_.sets.size();
        program_.sets.push_back(members);
      }
    }
    for (int r = 0; r < program_.size; ++r) Order(r, first, joins, removed, added);
    // A set that equals a live one is found alive, if that one was not removed before; nothing runs on it then.
    if (added && std::none_of(live_.begin(), live_.end(),
                              [&](std::size_t s) { return program_.sets[s] == program_.sets[added]; })) {
      live_.push_back(added);
    }
    std::erase_if(live_, [&](std::size_t s) { return removed != 0 && s == removed; });
  }

  // Has the member left out an earlier unnamed operation of this kind?
  bool Stopped(std::size_t first, std::size_t set, Op op, const std::string& name, int member) const {
    if (!name.empty()) return false;
    for (std::size_t i = first; i < program_.operations.size(); ++i) {
      const Planned& earlier = program_.operations[i];
      if (earlier.definition.set == set && earlier.definition.op == op && earlier.definition.name.empty() &&
          std::count(earlier.skipped.begin(), earlier.skipped.end(), member)) {
        return true;
      }
    }
    return false;
  }

  // This rank's order of the round: shuffled, but unnamed operations of a kind keep theirs.
  void Order(int rank, std::size_t first, bool joins, std::size_t removed, std::size_t added) {
    std::vector<Step> mine;
    for (std::size_t i = first; i < program_.operations.size(); ++i) {
      const Planned& op = program_.operations[i];
      if (!std::count(op.members.begin(), op.members.end(), rank)) continue;
      if (std::count(op.skipped.begin(), op.skipped.end(), rank)) continue;
      mine.push_back(Step{Step::kOperation, i});
    }
    if (removed) mine.push_back(Step{Step::kRemove, removed});
    if (added) mine.push_back(Step{Step::kAdd, added});
    std::shuffle(mine.begin(), mine.end(), random_);
    std::map<std::pair<SetId, Op>, std::vector<std::size_t>> places;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (mine[i].kind != Step::kOperation) continue;
      const Definition& d = program_.operations[mine[i].index].definition;
      if (d.name.empty()) places[{d.set, d.op}].push_back(i);
    }
    for (auto& [kind, at] : places) {
      std::vector<std::size_t> indexes;
      for (auto i : at) indexes.push_back(mine[i].index);
      std::sort(indexes.begin(), indexes.end());
      for (std::size_t i = 0; i < at.size(); ++i) mine[at[i]].index = indexes[i];
    }
    if (joins) mine.push_back(Step{Step::kJoin, 0});
    if (joins || removed || added) mine.push_back(Step{Step::kSync, 0});
    auto& steps = program_.steps[rank];
    steps.insert(steps.end(), mine.begin(), mine.end());
  }

  std::mt19937& random_;
  Program program_;
  std::vector<std::size_t> live_;  // set indexes
};

}  // namespace ronde
