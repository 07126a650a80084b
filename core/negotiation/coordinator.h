// Rank 0's decisions: do the ranks agree, which id does a definition get, what is committed next.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <unordered_map>
#include <vector>

#include "negotiation/exchange.h"
#include "negotiation/negotiator.h"
#include "negotiation/pending_table.h"

namespace ronde {

class Coordinator {
 public:
  Coordinator(const NegotiatorConfig& config, DefinitionTable& definitions)
      : config_(config), definitions_(definitions) {}

  // All members are ready, have joined or have left. `conflict`: why it fails even if they agree.
  void Decide(const EntryReport& report, const Result& conflict, const std::vector<int>& members,
              const Absence& absence);
  // The next batch that credit and linger allow. `last_joined` >= 0: all ranks have joined, so once nothing else is
  // left a batch releases them.
  // It comes in place of what is in `batch`, whose memory is used again. False: there is none.
  bool Next(TimePoint now, int last_joined, DecidedBatch* batch);
  // Gives ids to new definitions of the batch, just before it is written. Returns the ids to evict.
  std::vector<std::uint64_t> AssignIds(DecidedBatch& batch);
  void Finished(SetId set, std::uint64_t number);
  // The lowest member has left, so nobody reports finished batches of this set any more. What can still be committed
  // there are errors, which nobody has to be kept from.
  void LiftCredit(SetId set) { queues_[set].has_credit_limit = false; }
  void DropSet(SetId set) { queues_.erase(set); }
  TimePoint next_wake() const { return next_wake_; }

 private:
  struct Queue {
    std::vector<DecidedEntry> ready;
    TimePoint ready_since{};
    bool lingering = false;
    bool has_credit_limit = true;
    std::uint64_t next_number = 0;
    std::uint64_t finished = 0;  // batches
  };
  Result Check(const EntryReport& report, const std::vector<int>& members, const Absence& absence) const;
  void Touch(std::uint64_t id);

  const NegotiatorConfig& config_;
  DefinitionTable& definitions_;
  std::map<SetId, Queue> queues_;
  std::vector<const EntryReport::Contribution*> brought_;  // to the entry that is decided, by rank; null: not ready
  TimePoint next_wake_ = TimePoint::max();
  std::uint64_t last_id_ = 0;
  std::list<std::uint64_t> by_use_;  // least recently used first
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> use_;
};

// "allreduce 'x': rank 2 (host b) has shut down".
Result HasLeft(const Definition& definition, int rank, const NegotiatorConfig& config);

}  // namespace ronde
