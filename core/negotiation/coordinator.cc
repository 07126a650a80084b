#include "negotiation/coordinator.h"

#include <algorithm>

#include "negotiation/agreement.h"

namespace ronde {

void Coordinator::Decide(const PendingEntry& entry, const std::vector<int>& members, const std::set<int>& joined,
                         const std::set<int>& departed) {
  DecidedEntry decided;
  decided.known = entry.variants.front().definition;
  decided.number = entry.number;
  std::vector<Opinion> opinions;
  std::map<int, const Values*> values;
  for (const auto& variant : entry.variants) {
    Opinion opinion{&variant.definition->definition, {}};
    for (const auto& contribution : variant.contributions) {
      opinion.ranks.push_back(contribution.rank);
      values[contribution.rank] = &contribution.values;
    }
    if (!opinion.ranks.empty()) opinions.push_back(std::move(opinion));
  }
  const Definition& definition = decided.known->definition;
  const OpInfo& op = Info(definition.op);
  for (int member : members) {
    if (values.count(member)) continue;
    if (departed.count(member)) {
      decided.error = Result(Code::kShutdown, Describe(definition) + ": rank " + std::to_string(member) + " (host " +
                                                  config_.host_names[member] + ") has shut down");
    } else if (joined.count(member)) {
      decided.joined.push_back(member);
    }
  }
  if (decided.error.ok()) decided.error = CheckAgreement(opinions);
  if (decided.error.ok() && op.rooted &&
      std::find(decided.joined.begin(), decided.joined.end(), definition.root) != decided.joined.end()) {
    decided.error = Result(Code::kMismatch, Describe(definition) + ": its root, rank " +
                                                std::to_string(definition.root) + ", has joined and sends nothing");
  }
  if (decided.error.ok() && op.ragged) {
    std::size_t count = definition.tensors.size() * (op.splits ? members.size() : 1);
    for (int member : members) {
      auto found = values.find(member);
      decided.values.push_back(found == values.end() ? Values(count, 0) : *found->second);
      bool valid = decided.values.back().size() == count;
      for (auto rows : decided.values.back()) valid = valid && rows >= 0;
      if (!valid) {
        decided.error = Result(Code::kInternal, Describe(definition) + ": rank " + std::to_string(member) +
                                                    " reported impossible row counts");
      }
    }
  }
  queues_[definition.set].ready.push_back(std::move(decided));
}

std::optional<DecidedBatch> Coordinator::Next(TimePoint now, int last_joined) {
  next_wake_ = TimePoint::max();
  bool empty = true;
  for (auto& [id, queue] : queues_) {
    if (queue.ready.empty()) continue;
    empty = false;
    if (queue.next_number - queue.finished >= static_cast<std::uint64_t>(config_.max_unfinished_batches)) continue;
    if (config_.linger > Duration::zero()) {
      if (!queue.lingering) {
        queue.lingering = true;
        queue.ready_since = now;
      }
      if (now - queue.ready_since < config_.linger) {
        next_wake_ = std::min(next_wake_, queue.ready_since + config_.linger);
        continue;
      }
    }
    queue.lingering = false;
    DecidedBatch batch;
    batch.set = id;
    batch.number = queue.next_number++;
    batch.entries.swap(queue.ready);
    return batch;
  }
  if (empty && last_joined >= 0) {
    DecidedBatch batch;
    batch.number = queues_[kGlobalSet].next_number++;
    Definition join;
    join.op = Op::kJoin;
    DecidedEntry entry;
    entry.known = definitions_.Intern(join);
    entry.last_joined = last_joined;
    batch.entries.push_back(std::move(entry));
    return batch;
  }
  return std::nullopt;
}

std::vector<std::uint64_t> Coordinator::AssignIds(DecidedBatch& batch) {
  std::vector<std::uint64_t> evicted;
  if (config_.cache_capacity <= 0) return evicted;
  for (auto& entry : batch.entries) {
    if (!entry.error.ok() || !Info(entry.known->definition.op).tensors) continue;
    // Entries of one batch may share a definition that had no id when they were decided.
    entry.known = definitions_.Intern(entry.known->definition);
    if (entry.known->id != 0) {
      Touch(entry.known->id);
      continue;
    }
    entry.assigned = ++last_id_;
    definitions_.Assign(entry.known, entry.assigned);
    Touch(entry.assigned);
  }
  while (static_cast<std::int64_t>(by_use_.size()) > config_.cache_capacity) {
    evicted.push_back(by_use_.front());
    use_.erase(by_use_.front());
    by_use_.pop_front();
  }
  return evicted;
}

void Coordinator::Touch(std::uint64_t id) {
  if (auto found = use_.find(id); found != use_.end()) by_use_.erase(found->second);
  use_[id] = by_use_.insert(by_use_.end(), id);
}

void Coordinator::Finished(SetId set, std::uint64_t number) {
  auto found = queues_.find(set);
  if (found != queues_.end()) found->second.finished = std::max(found->second.finished, number + 1);
}

}  // namespace ronde
