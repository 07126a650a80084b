// This rank's own operations in flight: ticket by key, the names they reserve, the numbers of unnamed ones.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "negotiation/key_table.h"
#include "negotiation/ledger.h"
#include "negotiation/negotiator.h"

namespace ronde {

class Submissions {
 public:
  using Failed = std::vector<std::pair<Ticket, Result>>;

  // Reserves the name, or all names of a group, and gives an unnamed operation its number. An error names the tensor
  // that is in flight already; nothing has changed then.
  Result Add(Ticket ticket, const DefinitionPtr& definition, std::uint64_t* number);
  void AddJoin(Ticket ticket) { joined_ = ticket; }
  bool joined() const { return joined_ != 0; }

  // The entry was committed: its ticket, 0 when it was not submitted here.
  Ticket End(const KnownDefinition& definition, std::uint64_t number);
  // All ranks have joined: the numbers of unnamed operations start again, since ranks left off at different ones.
  Ticket EndJoin();
  void FailAll(const Result& why, Failed* failed);
  void FailSet(SetId set, const Result& why, Failed* failed);

  bool empty() const { return by_key_.empty() && joined_ == 0; }

 private:
  struct Mine {
    Ticket ticket = 0;
    DefinitionPtr definition;  // of a group: it has the keys that are held of members_
  };
  struct Nothing {};
  bool Holds(const KeyView& key) { return by_key_.Find(key) != nullptr || members_.Find(key) != nullptr; }
  // The names of the first `count` members.
  void Free(const KnownDefinition& group, std::size_t count);

  // A name is reserved by the key of its operation, or by that of a group's member.
  KeyTable<Mine> by_key_;
  KeyTable<Nothing> members_;
  std::map<std::pair<SetId, Op>, std::uint64_t> next_number_;
  Ticket joined_ = 0;
  std::string scratch_;  // of keys of unnamed operations
};

}  // namespace ronde
