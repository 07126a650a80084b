// The members of the process sets that live at this point of the batches.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "negotiation/negotiator.h"

namespace ronde {

using Members = std::shared_ptr<const std::vector<int>>;  // ascending

// Any thread may look, whoever drives the engine changes.
class LiveSets {
 public:
  explicit LiveSets(int size);
  // Null: there is none of this id.
  Members Find(SetId set) const;
  // The members of the batch's set (nobody if there is no such set), before the batch changes sets. Sets change in the
  // order of the batches; one is usable as soon as its batch is here, since all later batches come later on every rank.
  Members Apply(const Batch& batch);

 private:
  const Members everyone_;         // of the global set, which never changes
  mutable std::mutex mutex_;       // guards sets_
  std::map<SetId, Members> sets_;  // all others
};

}  // namespace ronde
