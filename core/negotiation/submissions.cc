#include "negotiation/submissions.h"

#include "negotiation/agreement.h"

namespace ronde {

Result Submissions::Add(Ticket ticket, const DefinitionPtr& definition, std::uint64_t* number) {
  const Definition& what = definition->definition;
  auto in_flight = [&](const std::string& name) {
    return Result(Code::kArgument, Describe(what) + ": an operation named '" + name +
                                       "' is already in flight on this rank; wait for it first");
  };
  *number = what.name.empty() ? next_number_[{what.set, what.op}]++ : 0;
  const KeyView key = KeyOf(*definition, *number, &scratch_);
  if (Holds(key)) return in_flight(what.name);
  const std::vector<Key>& members = definition->members;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (Holds(members[i])) {
      Free(*definition, i);
      return in_flight(members[i].text.substr(members[i].text.find('\2') + 1));
    }
    members_.Add(members[i]);
  }
  Mine& mine = by_key_.Add(key);
  mine.ticket = ticket;
  mine.definition = definition;
  return Ok();
}

Ticket Submissions::End(const KnownDefinition& definition, std::uint64_t number) {
  const KeyView key = KeyOf(definition, number, &scratch_);
  Mine* mine = by_key_.Find(key);
  if (mine == nullptr) return 0;
  Free(*mine->definition, mine->definition->members.size());
  mine->definition = nullptr;
  const Ticket ticket = mine->ticket;
  by_key_.Erase(key);
  return ticket;
}

Ticket Submissions::EndJoin() {
  next_number_.clear();
  return std::exchange(joined_, 0);
}

void Submissions::FailAll(const Result& why, Failed* failed) {
  by_key_.EraseIf([&](const Mine& mine) {
    failed->emplace_back(mine.ticket, why);
    return true;
  });
  if (joined_ != 0) failed->emplace_back(std::exchange(joined_, 0), why);
  members_.Clear();
}

void Submissions::FailSet(SetId set, const Result& why, Failed* failed) {
  by_key_.EraseIf([&](const Mine& mine) {
    if (mine.definition->definition.set != set) return false;
    failed->emplace_back(mine.ticket, why);
    Free(*mine.definition, mine.definition->members.size());
    return true;
  });
  std::erase_if(next_number_, [&](const auto& item) { return item.first.first == set; });
}

void Submissions::Free(const KnownDefinition& group, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) members_.Erase(group.members[i]);
}

}  // namespace ronde
