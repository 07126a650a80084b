// Tables by the keys of entries (see ledger.h), made to be filled and emptied over and over by the same keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ronde {

// A key with its hash, which known definitions keep. Borrows the text.
struct KeyView {
  explicit KeyView(std::string_view key) : text(key), hash(std::hash<std::string_view>{}(key)) {}
  KeyView(std::string_view key, std::size_t hash_of_key) : text(key), hash(hash_of_key) {}
  std::string_view text;
  std::size_t hash;
};
struct Key {
  explicit Key(std::string key) : text(std::move(key)), hash(KeyView(text).hash) {}
  explicit Key(const KeyView& key) : text(key.text), hash(key.hash) {}
  operator KeyView() const { return {text, hash}; }  // NOLINT: implicit on purpose
  std::string text;
  std::size_t hash;
};

// What was erased is kept for what is added next, with all memory that it holds: a table that has been as full before
// allocates nothing. So an added value is as it was left when it was erased, or new.
template <class Value>
class KeyTable {
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(const KeyView& key) const noexcept { return key.hash; }
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(const KeyView& a, const KeyView& b) const { return a.hash == b.hash && a.text == b.text; }
  };
  using Map = std::unordered_map<Key, Value, Hash, Equal>;

 public:
  bool empty() const { return map_.empty(); }
  Value* Find(const KeyView& key) {
    auto found = map_.find(key);
    return found == map_.end() ? nullptr : &found->second;
  }
  // The key is not in the table. The value stays where it is until it is erased.
  Value& Add(const KeyView& key) {
    if (spare_.empty()) return map_.try_emplace(Key(key)).first->second;
    auto node = std::move(spare_.back());
    spare_.pop_back();
    node.key().text = key.text;
    node.key().hash = key.hash;
    return map_.insert(std::move(node)).position->second;
  }
  // Nothing happens if it is not in the table.
  void Erase(const KeyView& key) {
    if (auto found = map_.find(key); found != map_.end()) spare_.push_back(map_.extract(found));
  }
  template <class Predicate>
  void EraseIf(Predicate&& predicate) {
    std::erase_if(map_, [&](auto& item) { return predicate(item.second); });
  }
  void Clear() { map_.clear(); }

  // All values, by key: whatever walks them does so in the same order in every run.
  std::vector<Value*> Sorted() {
    std::vector<typename Map::value_type*> items;
    items.reserve(map_.size());
    for (auto& item : map_) items.push_back(&item);
    std::sort(items.begin(), items.end(), [](auto* a, auto* b) { return a->first.text < b->first.text; });
    std::vector<Value*> values;
    values.reserve(items.size());
    for (auto* item : items) values.push_back(&item->second);
    return values;
  }

 private:
  Map map_;
  std::vector<typename Map::node_type> spare_;
};

}  // namespace ronde
