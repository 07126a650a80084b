// Definitions by id: the table every node keeps, and how an id leaves it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "negotiation/key_table.h"
#include "wire/codec.h"
#include "wire/definition.h"

namespace ronde {

// A definition as it is known at one node, with what is made of it again and again. `id` is 0 while rank 0 has given
// none, and again after eviction.
struct KnownDefinition {
  KnownDefinition(Definition what, std::string_view encoded);
  const Definition definition;
  const std::string bytes;         // encoded; also what it is found by
  const Key key;                   // of its entries; nothing if it is unnamed
  const std::vector<Key> members;  // of a named group: keys of the other names it reserves, those of its tensors
  std::uint64_t id = 0;
};
using DefinitionPtr = std::shared_ptr<KnownDefinition>;

// Ids are never reused and never change their meaning, so a new definition for a live name needs no coordination: it is
// another definition with another id. An evicted id is no longer written at this node, but stays readable until Forget.
class DefinitionTable {
 public:
  DefinitionPtr Intern(const Definition& definition);
  void Assign(const DefinitionPtr& definition, std::uint64_t id);
  void Evict(std::uint64_t id);   // stop writing it
  void Forget(std::uint64_t id);  // stop reading it
  DefinitionPtr Find(std::uint64_t id) const;

  // A definition as its id, or whole.
  static void Write(Writer& writer, const KnownDefinition& definition);
  DefinitionPtr Read(Reader& reader);

 private:
  // Bytes are looked for as a view of the writer's, without a string of their own.
  struct BytesHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>{}(bytes); }
  };
  std::unordered_map<std::string, DefinitionPtr, BytesHash, std::equal_to<>> by_bytes_;  // those with a live id
  std::unordered_map<std::uint64_t, DefinitionPtr> by_id_;
  Writer scratch_;  // of Intern
};

// Evicted ids that children may still write. A child acknowledges after the last report in which it used the id, and
// since links keep their order nothing that arrives later can name it.
class Evictions {
 public:
  // True: nobody is waited for.
  bool Begin(std::uint64_t id, const std::vector<int>& children) {
    if (children.empty()) return true;
    waiting_[id].insert(children.begin(), children.end());
    return false;
  }
  // True: that was the last acknowledgement.
  bool Acknowledge(std::uint64_t id, int child) {
    auto found = waiting_.find(id);
    if (found == waiting_.end() || found->second.erase(child) == 0 || !found->second.empty()) return false;
    waiting_.erase(found);
    return true;
  }
  // The child has left and writes nothing any more. Returns the ids that waited for it alone.
  std::vector<std::uint64_t> Gone(int child);

 private:
  std::map<std::uint64_t, std::set<int>> waiting_;
};

// Identity of an entry, the same on all ranks: (set, name), or for unnamed operations (set, op, submission number).
std::string KeyOf(const Definition& definition, std::uint64_t number);
std::string KeyOf(SetId set, const std::string& name);
// The same, without allocating. Valid as long as the definition, and until `scratch` changes.
KeyView KeyOf(const KnownDefinition& known, std::uint64_t number, std::string* scratch);

}  // namespace ronde
