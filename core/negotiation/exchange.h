// What travels in the tree and its bytes: reports on their way up, and batches as rank 0 decided them on their way
// down.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "negotiation/ledger.h"
#include "negotiation/negotiator.h"
#include "negotiation/pending_table.h"
#include "negotiation/process_sets.h"
#include "negotiation/tree.h"

namespace ronde {

struct DecidedEntry {
  DefinitionPtr known;
  std::uint64_t number = 0;
  std::uint64_t assigned = 0;  // the id that `known` gets with this batch; 0: none
  std::vector<int> joined;
  std::vector<Values> values;
  Result error;
  SetId new_set = 0;
  bool existed = false;
  int last_joined = -1;
};
struct DecidedBatch {
  SetId set = kGlobalSet;
  std::uint64_t number = 0;
  std::vector<DecidedEntry> entries;
};

void Write(Writer& writer, const DecidedBatch& batch);
// Both readers put what they read in place of what is there, whose memory they use.
// Gives the ids of the batch to their definitions.
void ReadBatch(Reader& reader, DefinitionTable& definitions, const ProcessSets& sets, DecidedBatch* batch);
// What the engine gets of it; the ticket is the rank's own matter. Takes the entry's lists.
AgreedEntry Agreed(DecidedEntry& entry);

void Write(Writer& writer, const EntryReport& report);
// `peer`: the child that sent it; it may speak for its subtree only.
void ReadReport(Reader& reader, int peer, DefinitionTable& definitions, const ProcessSets& sets,
                const TreePosition& tree, EntryReport* report);

// How many row counts each member of a ragged operation brings.
inline std::size_t RowsNeeded(const Definition& definition, std::size_t members) {
  return definition.tensors.size() * (Info(definition.op).splits ? members : 1);
}

// An error as code and text.
void Write(Writer& writer, const Result& error);
Result ReadError(Reader& reader);

}  // namespace ronde
