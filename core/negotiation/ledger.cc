#include "negotiation/ledger.h"

namespace ronde {

DefinitionPtr DefinitionTable::Intern(const Definition& definition) {
  scratch_.Clear();
  ronde::Write(scratch_, definition);
  if (auto found = by_bytes_.find(scratch_.bytes()); found != by_bytes_.end()) return found->second;
  return std::make_shared<KnownDefinition>(KnownDefinition{definition, std::string(scratch_.bytes()), 0});
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

std::vector<std::uint64_t> Evictions::Gone(int child) {
  std::vector<std::uint64_t> done;
  for (auto item = waiting_.begin(); item != waiting_.end();) {
    if (item->second.erase(child) > 0 && item->second.empty()) {
      done.push_back(item->first);
      item = waiting_.erase(item);
    } else {
      ++item;
    }
  }
  return done;
}

std::string KeyOf(const Definition& definition, std::uint64_t number) {
  if (!definition.name.empty()) return KeyOf(definition.set, definition.name);
  return std::to_string(definition.set) + '\1' + static_cast<char>('a' + static_cast<int>(definition.op)) +
         std::to_string(number);
}

std::string KeyOf(SetId set, const std::string& name) {
  std::string key = std::to_string(set);
  key.reserve(key.size() + 1 + name.size());
  key += '\2';
  key += name;
  return key;
}

}  // namespace ronde
