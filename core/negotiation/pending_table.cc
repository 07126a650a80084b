#include "negotiation/pending_table.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ronde {

void EntryReport::Clear() {
  number = 0;
  variants.clear();
  contributions.clear();
  values.clear();
}

void EntryReport::Add(int rank, std::uint32_t variant, std::span<const std::int64_t> brought) {
  contributions.push_back({rank, variant, values.size(), brought.size()});
  values.insert(values.end(), brought.begin(), brought.end());
}

std::uint32_t EntryReport::Add(const DefinitionPtr& definition) {
  auto same = std::find_if(variants.begin(), variants.end(), [&](const DefinitionPtr& variant) {
    return variant == definition || variant->bytes == definition->bytes;
  });
  const auto index = static_cast<std::uint32_t>(same - variants.begin());
  if (same == variants.end()) variants.push_back(definition);
  return index;
}

void EntryReport::DropVariantsOfNobody() {
  for (auto v = static_cast<std::uint32_t>(variants.size()); v-- > 0;) {
    auto says = [v](const Contribution& c) { return c.variant == v; };
    if (std::any_of(contributions.begin(), contributions.end(), says)) continue;
    variants.erase(variants.begin() + v);
    for (auto& c : contributions) c.variant -= c.variant > v;
  }
}

std::vector<Opinion> EntryReport::Opinions() const {
  std::vector<Opinion> opinions;
  for (std::uint32_t v = 0; v < variants.size(); ++v) {
    Opinion opinion{&variants[v]->definition, {}};
    for (const auto& c : contributions) {
      if (c.variant == v) opinion.ranks.push_back(c.rank);
    }
    if (!opinion.ranks.empty()) opinions.push_back(std::move(opinion));
  }
  return opinions;
}

std::vector<int> PendingEntry::ReadyRanks() const {
  std::vector<int> ranks;
  for (const auto& c : report.contributions) ranks.push_back(c.rank);
  return ranks;
}

PendingEntry& PendingTable::Entry(const DefinitionPtr& definition, std::uint64_t number, TimePoint since) {
  const KeyView key = KeyOf(*definition, number, &scratch_);
  if (PendingEntry* found = entries_.Find(key)) return *found;
  PendingEntry& entry = entries_.Add(key);
  entry.report.number = number;
  entry.report.variants.push_back(definition);
  entry.heard.assign(static_cast<std::size_t>(tree_.size()), false);
  entry.since = since;
  entry.reported = 0;
  entry.ready_elsewhere.clear();
  entry.next_warning = {};
  return entry;
}

bool PendingTable::Report(const EntryReport& report, TimePoint now) {
  // What a rank said that has left since counts no more: its operation failed there.
  auto counts = [&](const EntryReport::Contribution& c) { return absence_.departed.count(c.rank) == 0; };
  auto first = std::find_if(report.contributions.begin(), report.contributions.end(), counts);
  if (first == report.contributions.end()) return true;
  const DefinitionPtr& definition = report.variants[first->variant];
  const ProcessSet* set = sets_.Find(definition->definition.set);
  // A set removed meanwhile: each rank's submission fails when it hears of that.
  if (set == nullptr) return true;
  PendingEntry& entry = Entry(definition, report.number, now);
  for (auto c = first; c != report.contributions.end(); ++c) {
    if (!counts(*c)) continue;
    if (entry.heard[c->rank]) return false;
    entry.heard[c->rank] = true;
    entry.report.Add(c->rank, entry.report.Add(report.variants[c->variant]), report.ValuesOf(*c));
  }
  if (Covered(entry, set->below)) Finish(entry, Ok());
  return true;
}

PendingEntry& PendingTable::ReportPartial(const DefinitionPtr& definition, std::uint64_t number, TimePoint since) {
  return Entry(definition, number, since);
}

bool PendingTable::Covered(const PendingEntry& entry, const std::vector<int>& below) const {
  if (entry.ready() >= below.size()) return true;
  if (absence_.empty()) return false;
  return std::all_of(below.begin(), below.end(), [&](int rank) { return entry.heard[rank] || absence_.Has(rank); });
}

void PendingTable::Finish(PendingEntry& entry, const Result& conflict) {
  EntryReport& report = entry.report;
  const DefinitionPtr definition = report.variants.front();  // has the key
  const std::uint64_t number = report.number;
  if (report.variants.size() > 1) report.DropVariantsOfNobody();
  // Else known from a node below as stalled only, and those who were ready have left: nobody is left to tell.
  if (!report.contributions.empty()) complete_(report, conflict);
  report.Clear();
  entries_.Erase(KeyOf(*definition, number, &scratch_));
}

void PendingTable::Reconsider() {
  for (PendingEntry* entry : entries_.Sorted()) {
    const ProcessSet* set = sets_.Find(entry->set());
    if (set != nullptr && Covered(*entry, set->below)) Finish(*entry, Ok());
  }
}

void PendingTable::RemoveSet(SetId set) {
  entries_.EraseIf([&](const PendingEntry& entry) { return entry.set() == set; });
}

namespace {

// The names that an operation in flight reserves, each with its set.
std::set<std::string> Reserved(const PendingEntry& entry) {
  std::set<std::string> names;
  for (const auto& variant : entry.report.variants) {
    const Definition& d = variant->definition;
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
  const std::vector<PendingEntry*> entries = entries_.Sorted();
  bool groups = std::any_of(entries.begin(), entries.end(), [](const PendingEntry* entry) {
    const auto& variants = entry->report.variants;
    return std::any_of(variants.begin(), variants.end(),
                       [](const DefinitionPtr& v) { return v->definition.tensors.size() > 1; });
  });
  if (!groups) return;  // single operations of one name are one entry

  // Entries that share a name, directly or through others, go together (union-find).
  std::vector<std::size_t> leader;
  auto lead = [&](std::size_t i) {
    while (leader[i] != i) i = leader[i] = leader[leader[i]];
    return i;
  };
  std::map<std::string, std::vector<std::size_t>> holders;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    leader.push_back(i);
    for (const auto& name : Reserved(*entries[i])) {
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
      auto said = entries[i]->report.Opinions();
      opinions.insert(opinions.end(), said.begin(), said.end());
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
             std::any_of(list.begin(), list.end(), [&](std::size_t i) { return entries[i]->heard[rank]; });
    };
    const ProcessSet* set = sets_.Find(entries[leading]->set());
    if (set == nullptr || !std::all_of(set->below.begin(), set->below.end(), is_ready)) continue;
    for (auto i : list) Finish(*entries[i], conflicts[i]);
  }
}

}  // namespace ronde
