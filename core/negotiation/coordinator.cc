#include "negotiation/coordinator.h"

#include <algorithm>

#include "negotiation/agreement.h"

namespace ronde {

Result HasLeft(const Definition& definition, int rank, const NegotiatorConfig& config) {
  return Result(Code::kShutdown, Describe(definition) + ": rank " + std::to_string(rank) + " (host " +
                                     config.host_names[rank] + ") has shut down");
}

namespace {

// Row counts that a ragged operation travels with: are there as many as it needs, and can they be?
Result CheckRows(const Definition& definition, int member, const Values& rows, std::size_t members) {
  std::size_t count = RowsNeeded(definition, members);
  std::string who = Describe(definition) + ": rank " + std::to_string(member);
  if (rows.size() != count) {
    return Result(Code::kMismatch, who + " gave " + std::to_string(rows.size()) + " row counts where " +
                                       std::to_string(count) + " are needed");
  }
  auto negative = std::find_if(rows.begin(), rows.end(), [](std::int64_t n) { return n < 0; });
  if (negative == rows.end()) return Ok();
  return Result(Code::kMismatch, who + " gave a negative row count, " + std::to_string(*negative));
}

}  // namespace

Result Coordinator::Check(const PendingEntry& entry, const std::vector<int>& members, const Absence& absence) const {
  const Definition& definition = entry.variants.front().definition->definition;
  const OpInfo& op = Info(definition.op);
  for (int member : members) {
    auto left = absence.departed.find(member);
    if (!values_[member] && left != absence.departed.end()) return HasLeft(definition, left->second, config_);
  }
  if (entry.variants.size() > 1) {
    std::vector<Opinion> opinions;
    for (const auto& variant : entry.variants) opinions.push_back(OpinionOf(variant));
    RONDE_RETURN_IF_ERROR(CheckAgreement(opinions));
  }
  if (op.rooted && !std::binary_search(members.begin(), members.end(), definition.root)) {
    return Result(Code::kArgument, Describe(definition) + ": its root, rank " + std::to_string(definition.root) +
                                       ", is not in process set " + std::to_string(definition.set));
  }
  if (op.rooted && !values_[definition.root]) {
    return Result(Code::kMismatch, Describe(definition) + ": its root, rank " + std::to_string(definition.root) +
                                       ", has joined and sends nothing");
  }
  if (!op.ragged) return Ok();
  for (int member : members) {
    if (values_[member]) RONDE_RETURN_IF_ERROR(CheckRows(definition, member, *values_[member], members.size()));
  }
  return Ok();
}

void Coordinator::Decide(const PendingEntry& entry, const Result& conflict, const std::vector<int>& members,
                         const Absence& absence) {
  values_.assign(config_.parents.size(), nullptr);
  for (const auto& variant : entry.variants) {
    for (const auto& contribution : variant.contributions) values_[contribution.rank] = &contribution.values;
  }
  DecidedEntry decided;
  decided.known = entry.variants.front().definition;
  decided.number = entry.number;
  decided.error = conflict.ok() ? Check(entry, members, absence) : conflict;
  const Definition& definition = decided.known->definition;
  if (decided.error.ok()) {
    const OpInfo& op = Info(definition.op);
    std::size_t count = RowsNeeded(definition, members.size());
    for (int member : members) {
      const Values* values = values_[member];
      if (values == nullptr) decided.joined.push_back(member);
      if (op.ragged) decided.values.push_back(values == nullptr ? Values(count, 0) : *values);
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
    auto unfinished = static_cast<int>(queue.next_number - queue.finished);
    if (queue.has_credit_limit && unfinished >= config_.max_unfinished_batches) continue;
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
    if (entry.known->id == 0) entry.known = definitions_.Intern(entry.known->definition);
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
  if (auto found = use_.find(id); found != use_.end()) {
    by_use_.splice(by_use_.end(), by_use_, found->second);
  } else {
    use_[id] = by_use_.insert(by_use_.end(), id);
  }
}

void Coordinator::Finished(SetId set, std::uint64_t number) {
  auto found = queues_.find(set);
  if (found == queues_.end() || number >= found->second.next_number) return;
  found->second.finished = std::max(found->second.finished, number + 1);
}

}  // namespace ronde
