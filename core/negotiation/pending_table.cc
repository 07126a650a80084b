#include "negotiation/pending_table.h"

#include <algorithm>
#include <utility>

#include "negotiation/agreement.h"

namespace ronde {

std::vector<int> PendingEntry::ReadyRanks() const {
  std::vector<int> ranks;
  for (const auto& variant : variants) {
    for (const auto& c : variant.contributions) ranks.push_back(c.rank);
  }
  return ranks;
}

Opinion OpinionOf(const Variant& variant) {
  Opinion opinion{&variant.definition->definition, {}};
  for (const auto& c : variant.contributions) opinion.ranks.push_back(c.rank);
  return opinion;
}

bool PendingTable::Report(EntryReport report, TimePoint now) {
  std::vector<Variant>& variants = report.variants;
  // What a rank said that has left since counts no more: its operation failed there.
  if (!absence_.departed.empty()) {
    for (auto& variant : variants) {
      std::erase_if(variant.contributions, [&](const Contribution& c) { return absence_.departed.count(c.rank) > 0; });
    }
  }
  std::erase_if(variants, [](const Variant& variant) { return variant.contributions.empty(); });
  if (variants.empty()) return true;
  const ProcessSet* set = sets_.Find(variants.front().definition->definition.set);
  // A set removed meanwhile: each rank's submission fails when it hears of that.
  if (set == nullptr) return true;
  auto [place, added] = entries_.try_emplace(KeyOf(variants.front().definition->definition, report.number));
  PendingEntry& entry = place->second;
  if (added) {
    entry.number = report.number;
    entry.since = now;
    entry.heard.resize(static_cast<std::size_t>(tree_.size()));
  }
  for (auto& variant : variants) {
    for (const auto& contribution : variant.contributions) {
      if (entry.heard[contribution.rank]) return false;
      entry.heard[contribution.rank] = true;
      ++entry.ready;
    }
    auto same = std::find_if(entry.variants.begin(), entry.variants.end(),
                             [&](const Variant& v) { return v.definition->bytes == variant.definition->bytes; });
    if (same == entry.variants.end()) {
      entry.variants.push_back(std::move(variant));
    } else {
      same->contributions.insert(same->contributions.end(), std::make_move_iterator(variant.contributions.begin()),
                                 std::make_move_iterator(variant.contributions.end()));
    }
  }
  if (Covered(entry, set->below)) Finish(place, Ok());
  return true;
}

PendingEntry& PendingTable::ReportPartial(const DefinitionPtr& definition, std::uint64_t number, TimePoint since) {
  auto [place, added] = entries_.try_emplace(KeyOf(definition->definition, number));
  PendingEntry& entry = place->second;
  if (added) {
    entry.number = number;
    entry.since = since;
    entry.heard.resize(static_cast<std::size_t>(tree_.size()));
    entry.variants.push_back(Variant{definition, {}});
  }
  return entry;
}

bool PendingTable::Covered(const PendingEntry& entry, const std::vector<int>& below) const {
  if (entry.ready >= below.size()) return true;
  if (absence_.empty()) return false;
  return std::all_of(below.begin(), below.end(), [&](int rank) { return entry.heard[rank] || absence_.Has(rank); });
}

void PendingTable::Finish(Entries::iterator place, const Result& conflict) {
  PendingEntry entry = std::move(place->second);
  entries_.erase(place);
  // Known from a node below as stalled only, and those who were ready have left: nobody is left to tell.
  std::erase_if(entry.variants, [](const Variant& variant) { return variant.contributions.empty(); });
  if (!entry.variants.empty()) complete_(std::move(entry), conflict);
}

void PendingTable::Reconsider() {
  for (auto place = entries_.begin(); place != entries_.end();) {
    auto next = std::next(place);
    const ProcessSet* set = sets_.Find(place->second.set());
    if (set != nullptr && Covered(place->second, set->below)) Finish(place, Ok());
    place = next;
  }
}

void PendingTable::RemoveSet(SetId set) {
  std::erase_if(entries_, [&](const auto& item) { return item.second.set() == set; });
}

namespace {

// The names that an operation in flight reserves, each with its set.
std::set<std::string> Reserved(const PendingEntry& entry) {
  std::set<std::string> names;
  for (const auto& variant : entry.variants) {
    const Definition& d = variant.definition->definition;
    if (d.name.empty()) continue;
    std::string prefix = std::to_string(d.set) + ' ';
    names.insert(prefix + d.name);
    if (d.tensors.size() < 2) continue;
    for (const auto& tensor : d.tensors) {
      if (!tensor.name.empty()) names.insert(prefix + tensor.name);
    }
  }
  return names;
}

}  // namespace

void PendingTable::CompleteConflicting() {
  bool groups = std::any_of(entries_.begin(), entries_.end(), [](const auto& item) {
    const auto& variants = item.second.variants;
    return std::any_of(variants.begin(), variants.end(),
                       [](const Variant& v) { return v.definition->definition.tensors.size() > 1; });
  });
  if (!groups) return;  // single operations of one name are one entry

  // Entries that share a name, directly or through others, go together (union-find).
  std::vector<Entries::iterator> entries;
  std::vector<std::size_t> leader;
  auto lead = [&](std::size_t i) {
    while (leader[i] != i) i = leader[i] = leader[leader[i]];
    return i;
  };
  std::map<std::string, std::vector<std::size_t>> holders;
  for (auto place = entries_.begin(); place != entries_.end(); ++place) {
    std::size_t i = entries.size();
    entries.push_back(place);
    leader.push_back(i);
    for (const auto& name : Reserved(place->second)) {
      auto& holding = holders[name];
      holding.push_back(i);
      leader[lead(i)] = lead(holding.front());
    }
  }
  std::vector<Result> conflicts(entries.size());
  for (const auto& [name, holding] : holders) {
    if (holding.size() < 2) continue;
    std::vector<Opinion> opinions;
    for (auto i : holding) {
      for (const auto& variant : entries[i]->second.variants) {
        if (!variant.contributions.empty()) opinions.push_back(OpinionOf(variant));
      }
    }
    Result conflict = DisagreeAboutGroup(name.substr(name.find(' ') + 1), std::move(opinions));
    for (auto i : holding) {
      if (conflicts[i].ok()) conflicts[i] = conflict;
    }
  }
  std::map<std::size_t, std::vector<std::size_t>> lists;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!conflicts[i].ok()) lists[lead(i)].push_back(i);
  }
  for (const auto& [leading, list] : lists) {
    auto is_ready = [&, &list = list](int rank) {
      return absence_.Has(rank) ||
             std::any_of(list.begin(), list.end(), [&](std::size_t i) { return entries[i]->second.heard[rank]; });
    };
    const ProcessSet* set = sets_.Find(entries[leading]->second.set());
    if (set == nullptr || !std::all_of(set->below.begin(), set->below.end(), is_ready)) continue;
    for (auto i : list) Finish(entries[i], conflicts[i]);
  }
}

}  // namespace ronde
