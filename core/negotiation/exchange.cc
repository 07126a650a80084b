#include "negotiation/exchange.h"

#include <algorithm>

namespace ronde {

void Write(Writer& writer, const Result& error) {
  writer.Byte(static_cast<std::uint8_t>(error.code()));
  if (!error.ok()) writer.Text(error.message());
}

Result ReadError(Reader& reader) {
  auto code = static_cast<Code>(reader.Byte());
  if (code == Code::kOk) return Ok();
  if (CodeName(code) == "Unknown") reader.Fail("unknown kind of error");
  return Result(code, reader.Text());
}

void Write(Writer& writer, const DecidedBatch& batch) {
  writer.Unsigned(batch.set);
  writer.Unsigned(batch.number);
  writer.Unsigned(batch.entries.size());
  for (const auto& entry : batch.entries) {
    // An id that is given in this batch travels with the whole definition.
    writer.Unsigned(entry.assigned);
    writer.Unsigned(entry.assigned ? 0 : entry.known->id);
    if (entry.assigned || entry.known->id == 0) writer.Raw(entry.known->bytes);
    writer.Unsigned(entry.number);
    Write(writer, entry.error);
    if (!entry.error.ok()) continue;
    writer.Signeds(entry.joined);
    writer.Unsigned(entry.values.size());
    for (const auto& values : entry.values) writer.Signeds(values);
    writer.Unsigned(entry.new_set);
    writer.Byte(entry.existed);
    writer.Signed(entry.last_joined);
  }
}

namespace {

// Nothing that executes the entry has to look again: its members are members, its rows are there.
bool Consistent(const DecidedEntry& entry, const std::vector<int>& members, const ProcessSets& sets) {
  const Definition& definition = entry.known->definition;
  const OpInfo& op = Info(definition.op);
  auto is_member = [&](int rank) { return std::binary_search(members.begin(), members.end(), rank); };
  if (definition.op == Op::kAddProcessSet && !sets.Check(definition).ok()) return false;
  // A removed set may be one that an earlier entry of the batch adds.
  if (definition.op == Op::kRemoveProcessSet && definition.ranks.front() == static_cast<int>(kGlobalSet)) return false;
  if (!std::all_of(entry.joined.begin(), entry.joined.end(), is_member)) return false;
  if (op.rooted && !is_member(definition.root)) return false;
  if (entry.values.size() != (op.ragged ? members.size() : 0)) return false;
  return std::all_of(entry.values.begin(), entry.values.end(), [&](const Values& rows) {
    return rows.size() == RowsNeeded(definition, members.size()) &&
           std::all_of(rows.begin(), rows.end(), [](std::int64_t n) { return n >= 0; });
  });
}

}  // namespace

void ReadBatch(Reader& reader, DefinitionTable& definitions, const ProcessSets& sets, DecidedBatch* batch) {
  batch->entries.clear();
  batch->set = static_cast<SetId>(reader.Unsigned());
  batch->number = reader.Unsigned();
  const ProcessSet* set = sets.Find(batch->set);
  if (set == nullptr) reader.Fail("a batch of an unknown process set");
  for (std::size_t n = reader.Count(); n > 0 && reader.ok(); --n) {
    DecidedEntry entry;
    entry.assigned = reader.Unsigned();
    entry.known = definitions.Read(reader);
    entry.number = reader.Unsigned();
    entry.error = ReadError(reader);
    if (!reader.ok()) break;
    if (entry.known->definition.set != batch->set) reader.Fail("an entry of another process set");
    if (entry.assigned) definitions.Assign(entry.known, entry.assigned);
    if (entry.error.ok()) {
      entry.joined = reader.Signeds<int>();
      for (std::size_t m = reader.Count(); m > 0 && reader.ok(); --m) {
        entry.values.push_back(reader.Signeds<std::int64_t>());
      }
      entry.new_set = static_cast<SetId>(reader.Unsigned());
      entry.existed = reader.Byte() != 0;
      entry.last_joined = static_cast<int>(reader.Signed());
      if (reader.ok() && !Consistent(entry, set->members, sets)) reader.Fail("an impossible entry");
    }
    batch->entries.push_back(std::move(entry));
  }
}

AgreedEntry Agreed(DecidedEntry& entry) {
  AgreedEntry agreed;
  agreed.definition = std::shared_ptr<const Definition>(entry.known, &entry.known->definition);
  agreed.number = entry.number;
  agreed.joined = std::move(entry.joined);
  agreed.values = std::move(entry.values);
  agreed.error = entry.error;
  agreed.new_set = entry.new_set;
  agreed.existed = entry.existed;
  agreed.last_joined = entry.last_joined;
  return agreed;
}

void Write(Writer& writer, const EntryReport& report) {
  writer.Unsigned(report.number);
  writer.Unsigned(report.variants.size());
  for (std::uint32_t v = 0; v < report.variants.size(); ++v) {
    auto says = [v](const EntryReport::Contribution& c) { return c.variant == v; };
    DefinitionTable::Write(writer, *report.variants[v]);
    writer.Unsigned(
        static_cast<std::uint64_t>(std::count_if(report.contributions.begin(), report.contributions.end(), says)));
    for (const auto& contribution : report.contributions) {
      if (!says(contribution)) continue;
      writer.Signed(contribution.rank);
      writer.Signeds(report.ValuesOf(contribution));
    }
  }
}

void ReadReport(Reader& reader, int peer, DefinitionTable& definitions, const ProcessSets& sets,
                const TreePosition& tree, EntryReport* report) {
  report->Clear();
  report->number = reader.Unsigned();
  for (std::size_t n = reader.Count(); n > 0 && reader.ok(); --n) {
    const DefinitionPtr known = definitions.Read(reader);
    std::size_t ranks = reader.Count();
    if (!reader.ok()) break;
    const auto variant = report->Add(known);
    const Definition& definition = known->definition;
    const Definition& first = report->variants.front()->definition;
    if (variant > 0 && KeyOf(definition, report->number) != KeyOf(first, report->number)) {
      reader.Fail("a report of several operations");
    }
    const ProcessSet* set = sets.Find(definition.set);  // null: it was removed meanwhile
    for (; ranks > 0 && reader.ok(); --ranks) {
      auto rank = static_cast<int>(reader.Signed());
      if (tree.Via(rank) != peer) reader.Fail("a rank that is not below the sender");
      if (set != nullptr && !std::binary_search(set->members.begin(), set->members.end(), rank)) {
        reader.Fail("a rank that is not in the process set");
      }
      const std::size_t first_value = report->values.size();
      reader.Signeds(&report->values);
      report->contributions.push_back({rank, variant, first_value, report->values.size() - first_value});
    }
  }
}

}  // namespace ronde
