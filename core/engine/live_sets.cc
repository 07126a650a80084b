#include "engine/live_sets.h"

#include <numeric>
#include <utility>

namespace ronde {
namespace {

Members Everyone(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<const std::vector<int>>(std::move(ranks));
}

}  // namespace

LiveSets::LiveSets(int size) : everyone_(Everyone(size)) {}

Members LiveSets::Find(SetId set) const {
  if (set == kGlobalSet) return everyone_;
  std::lock_guard lock(mutex_);
  auto found = sets_.find(set);
  return found == sets_.end() ? nullptr : found->second;
}

Members LiveSets::Apply(const Batch& batch) {
  Members members = Find(batch.set);
  for (const auto& entry : batch.entries) {
    const Definition& definition = *entry.definition;
    if (!entry.error.ok() || Info(definition.op).tensors) continue;
    std::lock_guard lock(mutex_);
    if (definition.op == Op::kAddProcessSet && !entry.existed) {
      sets_[entry.new_set] = std::make_shared<const std::vector<int>>(definition.ranks);
    } else if (definition.op == Op::kRemoveProcessSet) {
      sets_.erase(static_cast<SetId>(definition.ranks.front()));
    }
  }
  return members ? members : std::make_shared<const std::vector<int>>();
}

}  // namespace ronde
