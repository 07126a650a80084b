// The definitions of requests that came before, so that one that comes again is recognized where it is, without making
// its definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_set>

#include "engine/operation.h"
#include "negotiation/ledger.h"

namespace ronde {

class KnownRequests {
 public:
  explicit KnownRequests(std::int64_t capacity) : capacity_(capacity) {}

  // Null: it has not been kept, or it has no id (any more).
  const DefinitionPtr* Find(const Request& request) const;
  // In place of an older one of its name.
  void Keep(const DefinitionPtr& definition);

 private:
  // What is looked up: one definition for each.
  struct Name {
    SetId set;
    Op op;
    std::string_view name;
  };
  static Name NameOf(const Definition& definition) { return {definition.set, definition.op, definition.name}; }
  static Name NameOf(const DefinitionPtr& known) { return NameOf(known->definition); }
  static Name NameOf(const Name& name) { return name; }
  struct Hash {
    using is_transparent = void;
    template <class T>
    std::size_t operator()(const T& named) const {
      const Name name = NameOf(named);
      return std::hash<std::string_view>{}(name.name) ^ (name.set * 256 + static_cast<std::size_t>(name.op));
    }
  };
  struct Equal {
    using is_transparent = void;
    template <class A, class B>
    bool operator()(const A& a, const B& b) const {
      const Name x = NameOf(a), y = NameOf(b);
      return x.set == y.set && x.op == y.op && x.name == y.name;
    }
  };

  const std::int64_t capacity_;
  std::unordered_set<DefinitionPtr, Hash, Equal> known_;
};

}  // namespace ronde
