#include "negotiation/coordinator.h"

#include <algorithm>
#include <span>

#include "negotiation/agreement.h"

namespace ronde {

Result HasLeft(const Definition& definition, int rank, const NegotiatorConfig& config) {
  return Result(Code::kShutdown, Describe(definition) + ": rank " + std::to_string(rank) + " (host " +
                                     config.host_names[rank] + ") has shut down");
}

namespace {

// Row counts that a ragged operation travels with: are there as many as it needs, and can they be?
Result CheckRows(const Definition& definition, int member, std::span<const std::int64_t> rows, std::size_t members) {
  std::size_t count = RowsNeeded(definition, members);
  auto wrong = [&](const std::string& what) {
    return Result(Code::kMismatch, Describe(definition) + ": rank " + std::to_string(member) + " gave " + what);
  };
  if (rows.size() != count) {
    return wrong(std::to_string(rows.size()) + " row counts where " + std::to_string(count) + " are needed");
  }
  auto negative = std::find_if(rows.begin(), rows.end(), [](std::int64_t n) { return n < 0; });
  return negative == rows.end() ? Ok() : wrong("a negative row count, " + std::to_string(*negative));
}

}  // namespace

Result Coordinator::Check(const EntryReport& report, const std::vector<int>& members, const Absence& absence) const {
  const Definition& definition = report.variants.front()->definition;
  const OpInfo& op = Info(definition.op);
  if (!absence.departed.empty()) {
    for (int member : members) {
      auto left = absence.departed.find(member);
      if (!brought_[member] && left != absence.departed.end()) return HasLeft(definition, left->second, config_);
    }
  }
  if (report.variants.size() > 1) RONDE_RETURN_IF_ERROR(CheckAgreement(report.Opinions()));
  if (op.rooted && !std::binary_search(members.begin(), members.end(), definition.root)) {
    return Result(Code::kArgument, Describe(definition) + ": its root, rank " + std::to_string(definition.root) +
                                       ", is not in process set " + std::to_string(definition.set));
  }
  if (op.rooted && !brought_[definition.root]) {
    return Result(Code::kMismatch, Describe(definition) + ": its root, rank " + std::to_string(definition.root) +
                                       ", has joined and sends nothing");
  }
  if (!op.ragged) return Ok();
  for (int member : members) {
    if (!brought_[member]) continue;
    RONDE_RETURN_IF_ERROR(CheckRows(definition, member, report.ValuesOf(*brought_[member]), members.size()));
  }
  return Ok();
}

void Coordinator::Decide(const EntryReport& report, const Result& conflict, const std::vector<int>& members,
                         const Absence& absence) {
  brought_.assign(config_.parents.size(), nullptr);
  for (const auto& contribution : report.contributions) brought_[contribution.rank] = &contribution;
  const Definition& definition = report.variants.front()->definition;
  DecidedEntry& decided = queues_[definition.set].ready.emplace_back();
  decided.known = report.variants.front();
  decided.number = report.number;
  decided.error = conflict.ok() ? Check(report, members, absence) : conflict;
  if (!decided.error.ok()) return;
  const OpInfo& op = Info(definition.op);
  std::size_t count = RowsNeeded(definition, members.size());
  for (int member : members) {
    const auto* brought = brought_[member];
    if (brought == nullptr) decided.joined.push_back(member);
    if (!op.ragged) continue;
    Values& values = decided.values.emplace_back(count, 0);
    if (brought != nullptr) std::ranges::copy(report.ValuesOf(*brought), values.begin());
  }
}

bool Coordinator::Next(TimePoint now, int last_joined, DecidedBatch* batch) {
  next_wake_ = TimePoint::max();
  batch->entries.clear();
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
    batch->set = id;
    batch->number = queue.next_number++;
    batch->entries.swap(queue.ready);
    return true;
  }
  if (!empty || last_joined < 0) return false;
  batch->set = kGlobalSet;
  batch->number = queues_[kGlobalSet].next_number++;
  Definition join;
  join.op = Op::kJoin;
  DecidedEntry& entry = batch->entries.emplace_back();
  entry.known = definitions_.Intern(join);
  entry.last_joined = last_joined;
  return true;
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
