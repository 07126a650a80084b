// Definitions by id, and entries by key: the two tables every node keeps.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "wire/codec.h"
#include "wire/definition.h"

namespace ronde {

// A definition as it is known at one node. `id` is 0 while rank 0 has given none, and again after eviction.
struct KnownDefinition {
  Definition definition;
  std::string bytes;  // encoded; also what it is found by
  std::uint64_t id = 0;
};
using DefinitionPtr = std::shared_ptr<KnownDefinition>;

// Ids are never reused and never change their meaning. An evicted id is no longer written at this node, but stays
// readable until Forget.
class DefinitionTable {
 public:
  DefinitionPtr Intern(const Definition& definition);
  void Assign(const DefinitionPtr& definition, std::uint64_t id);
  void Evict(std::uint64_t id);   // stop writing it
  void Forget(std::uint64_t id);  // stop reading it
  DefinitionPtr Find(std::uint64_t id) const;
  std::size_t num_ids() const { return by_bytes_.size(); }

  // A definition as its id, or whole.
  static void Write(Writer& writer, const KnownDefinition& definition);
  DefinitionPtr Read(Reader& reader);

 private:
  std::unordered_map<std::string, DefinitionPtr> by_bytes_;  // those with a live id
  std::unordered_map<std::uint64_t, DefinitionPtr> by_id_;
};

// Identity of an entry, the same on all ranks: (set, name), or for unnamed operations (set, op, submission number).
std::string KeyOf(const Definition& definition, std::uint64_t number);

// What one rank brought to an entry.
struct Contribution {
  int rank = 0;
  Values values;
};
struct Variant {
  DefinitionPtr definition;
  std::vector<Contribution> contributions;
};
struct PendingEntry {
  std::uint64_t number = 0;
  std::vector<Variant> variants;  // one, unless ranks disagree
  std::size_t ready = 0;          // ranks heard of
  TimePoint since;
  bool reported = false;          // as stalled, to the parent
  std::set<int> ready_elsewhere;  // at rank 0: ranks that a node below reported ready in a partial, stalled entry
  Duration next_warning{};        // at rank 0

  bool Has(int rank) const;
  SetId set() const { return variants.front().definition->definition.set; }
};
// Ordered by key, so that whatever walks it does so in the same order in every run.
using PendingTable = std::map<std::string, PendingEntry>;

}  // namespace ronde
