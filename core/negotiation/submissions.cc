#include "negotiation/submissions.h"

#include "negotiation/agreement.h"
#include "negotiation/ledger.h"

namespace ronde {

Result Submissions::Add(Ticket ticket, const Definition& definition, std::uint64_t* number) {
  *number = definition.name.empty() ? next_number_[{definition.set, definition.op}]++ : 0;
  Mine mine{ticket, definition.set, {}};
  std::string key = KeyOf(definition, *number);
  auto in_flight = [&](const std::string& name) {
    Free(mine);
    return Result(Code::kArgument, Describe(definition) + ": an operation named '" + name +
                                       "' is already in flight on this rank; wait for it first");
  };
  if (by_key_.count(key) > 0 || members_.count(key) > 0) return in_flight(definition.name);
  if (!definition.name.empty() && definition.tensors.size() > 1) {
    for (const auto& tensor : definition.tensors) {
      if (tensor.name.empty() || tensor.name == definition.name) continue;
      std::string member = KeyOf(definition.set, tensor.name);
      if (by_key_.count(member) > 0 || !members_.insert(member).second) return in_flight(tensor.name);
      mine.members.push_back(std::move(member));
    }
  }
  by_key_.emplace(std::move(key), std::move(mine));
  return Ok();
}

Ticket Submissions::End(const Definition& definition, std::uint64_t number) {
  auto found = by_key_.find(KeyOf(definition, number));
  if (found == by_key_.end()) return 0;
  Ticket ticket = found->second.ticket;
  Free(found->second);
  by_key_.erase(found);
  return ticket;
}

Ticket Submissions::EndJoin() {
  next_number_.clear();
  return std::exchange(joined_, 0);
}

void Submissions::FailAll(const Result& why, Failed* failed) {
  for (const auto& [key, mine] : by_key_) failed->emplace_back(mine.ticket, why);
  if (joined_ != 0) failed->emplace_back(std::exchange(joined_, 0), why);
  by_key_.clear();
  members_.clear();
}

void Submissions::FailSet(SetId set, const Result& why, Failed* failed) {
  std::erase_if(by_key_, [&](const auto& item) {
    const Mine& mine = item.second;
    if (mine.set != set) return false;
    failed->emplace_back(mine.ticket, why);
    Free(mine);
    return true;
  });
  std::erase_if(next_number_, [&](const auto& item) { return item.first.first == set; });
}

void Submissions::Free(const Mine& mine) {
  for (const auto& member : mine.members) members_.erase(member);
}

}  // namespace ronde
