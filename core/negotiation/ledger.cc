#include "negotiation/ledger.h"

#include <charconv>

namespace ronde {
namespace {

void Append(std::string* text, std::uint64_t number) {
  char digits[20];
  text->append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

void AppendUnnamedKey(std::string* text, const Definition& definition, std::uint64_t number) {
  Append(text, definition.set);
  *text += '\1';
  *text += static_cast<char>('a' + static_cast<int>(definition.op));
  Append(text, number);
}

std::vector<Key> MemberKeys(const Definition& definition) {
  std::vector<Key> keys;
  if (definition.name.empty() || definition.tensors.size() < 2) return keys;
  for (const auto& tensor : definition.tensors) {
    if (!tensor.name.empty() && tensor.name != definition.name) keys.emplace_back(KeyOf(definition.set, tensor.name));
  }
  return keys;
}

}  // namespace

KnownDefinition::KnownDefinition(Definition what, std::string_view encoded)
    : definition(std::move(what)),
      bytes(encoded),
      key(definition.name.empty() ? std::string() : KeyOf(definition.set, definition.name)),
      members(MemberKeys(definition)) {}

DefinitionPtr DefinitionTable::Intern(const Definition& definition) {
  scratch_.Clear();
  ronde::Write(scratch_, definition);
  if (auto found = by_bytes_.find(scratch_.bytes()); found != by_bytes_.end()) return found->second;
  return std::make_shared<KnownDefinition>(definition, scratch_.bytes());
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
  std::string key;
  AppendUnnamedKey(&key, definition, number);
  return key;
}

std::string KeyOf(SetId set, const std::string& name) {
  std::string key = std::to_string(set);
  key.reserve(key.size() + 1 + name.size());
  key += '\2';
  key += name;
  return key;
}

KeyView KeyOf(const KnownDefinition& known, std::uint64_t number, std::string* scratch) {
  if (!known.definition.name.empty()) return known.key;
  scratch->clear();
  AppendUnnamedKey(scratch, known.definition, number);
  return KeyView(*scratch);
}

}  // namespace ronde
