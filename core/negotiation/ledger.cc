#include "negotiation/ledger.h"

#include <algorithm>

namespace ronde {

DefinitionPtr DefinitionTable::Intern(const Definition& definition) {
  Writer writer;
  ronde::Write(writer, definition);
  auto encoded = writer.Take();
  std::string bytes(reinterpret_cast<const char*>(encoded.data()), encoded.size());
  if (auto found = by_bytes_.find(bytes); found != by_bytes_.end()) return found->second;
  return std::make_shared<KnownDefinition>(KnownDefinition{definition, std::move(bytes), 0});
}

void DefinitionTable::Assign(const DefinitionPtr& definition, std::uint64_t id) {
  definition->id = id;
  by_bytes_[definition->bytes] = definition;
  by_id_[id] = definition;
}

void DefinitionTable::Evict(std::uint64_t id) {
  if (auto found = by_id_.find(id); found != by_id_.end() && found->second->id == id) {
    by_bytes_.erase(found->second->bytes);
    found->second->id = 0;
  }
}

void DefinitionTable::Forget(std::uint64_t id) { by_id_.erase(id); }

DefinitionPtr DefinitionTable::Find(std::uint64_t id) const {
  auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second;
}

void DefinitionTable::Write(Writer& writer, const KnownDefinition& definition) {
  writer.Unsigned(definition.id);
  if (definition.id == 0) writer.Raw(definition.bytes);
}

DefinitionPtr DefinitionTable::Read(Reader& reader) {
  std::uint64_t id = reader.Unsigned();
  if (!reader.ok()) return nullptr;
  if (id == 0) {
    Definition definition = ReadDefinition(reader);
    return reader.ok() ? Intern(definition) : nullptr;
  }
  DefinitionPtr known = Find(id);
  if (!known) reader.Fail("unknown definition id");
  return known;
}

std::string KeyOf(const Definition& definition, std::uint64_t number) {
  std::string key = std::to_string(definition.set);
  if (definition.name.empty()) {
    return key + '\1' + static_cast<char>('a' + static_cast<int>(definition.op)) + std::to_string(number);
  }
  return key + '\2' + definition.name;
}

bool PendingEntry::Has(int rank) const {
  return std::any_of(variants.begin(), variants.end(), [&](const Variant& v) {
    return std::any_of(v.contributions.begin(), v.contributions.end(),
                       [&](const Contribution& c) { return c.rank == rank; });
  });
}

}  // namespace ronde
