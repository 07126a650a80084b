// Rank 0's decisions: do the ranks agree, which id does a definition get, what is committed next.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "negotiation/ledger.h"
#include "negotiation/negotiator.h"

namespace ronde {

struct DecidedEntry {
  DefinitionPtr known;
  std::uint64_t number = 0;
  std::uint64_t assigned = 0;  // the id that `known` gets with this batch; 0: none
  std::vector<int> joined;
  std::vector<Values> values;
  Result error;
  SetId new_set = 0;
  bool existed = false;
  int last_joined = -1;
};
struct DecidedBatch {
  SetId set = kGlobalSet;
  std::uint64_t number = 0;
  std::vector<DecidedEntry> entries;
};

class Coordinator {
 public:
  Coordinator(const NegotiatorConfig& config, DefinitionTable& definitions)
      : config_(config), definitions_(definitions) {}

  // All members are ready, have joined or have left.
  void Decide(const PendingEntry& entry, const std::vector<int>& members, const std::set<int>& joined,
              const std::set<int>& departed);
  // The next batch that credit and linger allow. `last_joined` >= 0: all ranks have joined, so once nothing else is
  // left a batch releases them.
  std::optional<DecidedBatch> Next(TimePoint now, int last_joined);
  // Gives ids to new definitions of the batch, just before it is written. Returns the ids to evict.
  std::vector<std::uint64_t> AssignIds(DecidedBatch& batch);
  void Finished(SetId set, std::uint64_t number);
  void DropSet(SetId set) { queues_.erase(set); }
  TimePoint next_wake() const { return next_wake_; }

 private:
  struct Queue {
    std::vector<DecidedEntry> ready;
    TimePoint ready_since{};
    bool lingering = false;
    std::uint64_t next_number = 0;
    std::uint64_t finished = 0;  // batches
  };
  void Touch(std::uint64_t id);

  const NegotiatorConfig& config_;
  DefinitionTable& definitions_;
  std::map<SetId, Queue> queues_;
  TimePoint next_wake_ = TimePoint::max();
  std::uint64_t last_id_ = 0;
  std::list<std::uint64_t> by_use_;  // least recently used first
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> use_;
};

}  // namespace ronde
