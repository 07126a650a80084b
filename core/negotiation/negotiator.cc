#include "negotiation/negotiator.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "negotiation/agreement.h"
#include "negotiation/coordinator.h"
#include "negotiation/ledger.h"
#include "negotiation/stall.h"
#include "wire/codec.h"

namespace ronde {
namespace {

constexpr std::uint8_t kProtocolVersion = 1;

// Records of a message, after its version byte. Up: towards rank 0; down: away from it.
enum class Record : std::uint8_t {
  kReport = 1,       // up: definition, number, ranks with values
  kJoined = 2,       // up: rank
  kFinished = 3,     // up: set, number
  kStalled = 4,      // up: definition, number, ready ranks
  kBlocked = 5,      // up: rank, blocked, where
  kEvicted = 6,      // up: id (acknowledged by the whole subtree)
  kDeparted = 7,     // up: rank
  kBatch = 8,        // down: a committed batch
  kEvict = 9,        // down: id
  kAskBlocked = 10,  // down
  kGoodbye = 11,     // between neighbours: the sender leaves
  kGoodbyeHeard = 12,
  kAbort = 13,   // both ways: code, message
  kClosed = 14,  // down: why nothing more can be agreed
};

class NegotiatorImpl final : public Negotiator {
 public:
  explicit NegotiatorImpl(const NegotiatorConfig& config) : config_(config), root_(config.parent < 0), stall_(config_) {
    std::vector<int> everyone;
    for (int r = 0; r < static_cast<int>(config_.parents.size()); ++r) everyone.push_back(r);
    for (int r : everyone) below_.push_back(IsBelow(r));
    AddSet(kGlobalSet, everyone);
    if (root_) coordinator_ = std::make_unique<Coordinator>(config_, definitions_);
  }

  void Submit(Ticket ticket, const Definition& definition, const Values& values, TimePoint now) override {
    now_ = now;
    if (!abort_.ok()) return Fail(ticket, abort_);
    if (!closed_.ok()) return Fail(ticket, closed_);
    if (leaving_) return Fail(ticket, Result(Code::kShutdown, "ronde was shut down on this rank"));
    if (joined_here_) {
      return Fail(ticket,
                  Result(Code::kArgument, Describe(definition) + ": this rank has joined; wait for join first"));
    }
    const std::vector<int>* members = Members(definition.set);
    if (members == nullptr || !std::binary_search(members->begin(), members->end(), config_.rank)) {
      std::string set = std::to_string(definition.set);
      return Fail(ticket,
                  Result(Code::kArgument, Describe(definition) + (members ? ": this rank is not in process set " + set
                                                                          : ": there is no process set " + set)));
    }
    if (definition.op == Op::kJoin) {
      joined_here_ = true;
      tickets_[kJoinKey] = Mine{ticket, {}, definition.set};
      return Joined(config_.rank);
    }
    std::uint64_t number = 0;
    Mine mine{ticket, {}, definition.set};
    if (definition.name.empty()) {
      number = next_number_[{definition.set, definition.op}]++;
    } else {
      std::string prefix = std::to_string(definition.set) + '\2';
      mine.names.push_back(prefix + definition.name);
      if (definition.tensors.size() > 1) {
        for (const auto& tensor : definition.tensors) {
          if (tensor.name != definition.name) mine.names.push_back(prefix + tensor.name);
        }
      }
      for (std::size_t i = 0; i < mine.names.size(); ++i) {
        if (names_.insert(mine.names[i]).second) continue;
        for (std::size_t j = 0; j < i; ++j) names_.erase(mine.names[j]);
        return Fail(ticket, Result(Code::kArgument, Describe(definition) + ": an operation named '" +
                                                        mine.names[i].substr(prefix.size()) +
                                                        "' is already in flight on this rank; wait for it first"));
      }
    }
    DefinitionPtr known = definitions_.Intern(definition);
    tickets_[KeyOf(definition, number)] = std::move(mine);
    Report(known, number, {Contribution{config_.rank, values}}, now);
  }

  void Receive(int peer, std::span<const std::byte> message, TimePoint now) override {
    Reader reader(message);
    if (reader.Byte() != kProtocolVersion) reader.Fail("unknown protocol version");
    now_ = now;
    while (!reader.done() && abort_.ok()) Dispatch(peer, reader, now);
    if (!reader.ok()) {
      Abort(reader.result().Because("rank " + std::to_string(peer) + " (host " + Host(peer) + ") sent nonsense"));
    }
  }

  void Finished(SetId set, std::uint64_t number, TimePoint now) override {
    now_ = now;
    if (root_) {
      coordinator_->Finished(set, number);
    } else {
      Writer& up = To(config_.parent, Record::kFinished);
      up.Unsigned(set);
      up.Unsigned(number);
    }
  }

  void Tick(TimePoint now, const BlockedReport& blocked) override {
    now_ = now;
    if (!abort_.ok()) return;
    if (asked_) {
      asked_ = false;
      Blocked(config_.rank, blocked);
    }
    if (!config_.stall_check || pending_.empty()) return;
    stall_.Ticked(now);
    if (!root_) {
      for (auto& [key, entry] : pending_) {
        if (entry.reported || now - entry.since < stall_.first_limit()) continue;
        entry.reported = true;
        Writer& up = To(config_.parent, Record::kStalled);
        DefinitionTable::Write(up, *entry.variants.front().definition);
        up.Unsigned(entry.number);
        up.Signeds(ReadyRanks(entry));
      }
      return;
    }
    StallFinding finding = stall_.Look(pending_, [this](SetId set) { return Members(set); }, Absent(), now);
    if (finding.ask) {
      asked_ = true;
      for (int child : LiveChildren()) To(child, Record::kAskBlocked);
      Blocked(config_.rank, blocked);
      asked_ = false;
    }
    for (auto& text : finding.warnings) logs_.emplace_back(LogLevel::kWarning, std::move(text));
    if (!finding.abort.ok()) Abort(finding.abort);
  }

  TimePoint NextWake() const override {
    if (!abort_.ok()) return TimePoint::max();
    TimePoint wake = asked_ ? TimePoint::min() : TimePoint::max();
    if (config_.stall_check && !pending_.empty()) wake = std::min(wake, stall_.next_look());
    if (root_) wake = std::min(wake, coordinator_->next_wake());
    return wake;
  }

  void Goodbye(TimePoint) override {
    if (leaving_) return;
    leaving_ = true;
    FailMine(Result(Code::kShutdown, "ronde was shut down on this rank"));
    if (!root_) {
      To(config_.parent, Record::kDeparted).Signed(config_.rank);
    }
    for (int neighbour : Neighbours()) To(neighbour, Record::kGoodbye);
  }

  bool goodbye_complete() const override {
    auto all = Neighbours();
    return std::all_of(all.begin(), all.end(), [&](int n) { return heard_.count(n) || gone_.count(n); });
  }

  void Lost(int peer, const Result& cause, TimePoint) override {
    bool expected = gone_.count(peer) || said_goodbye_.count(peer) || leaving_;
    gone_.insert(peer);
    if (!expected) Abort(cause);
  }

  bool HasSaidGoodbye(int peer) const override { return said_goodbye_.count(peer) > 0; }

  void Abort(const Result& cause) override {
    if (!abort_.ok() || cause.ok()) return;
    abort_ = cause;
    for (int neighbour : Neighbours()) {
      if (gone_.count(neighbour)) continue;
      Writer& writer = To(neighbour, Record::kAbort);
      writer.Byte(static_cast<std::uint8_t>(cause.code()));
      writer.Text(cause.message());
    }
    FailMine(cause);
    pending_.clear();
  }

  const std::vector<int>* Members(SetId set) const override {
    auto found = sets_.find(set);
    return found == sets_.end() ? nullptr : &found->second.members;
  }

  Actions Take() override {
    Settle();
    Actions actions;
    for (auto& [peer, writer] : outgoing_) {
      if (!writer.empty() && !gone_.count(peer)) actions.messages.emplace_back(peer, writer.Take());
      writer = Writer();
    }
    actions.batches.swap(batches_);
    actions.failed.swap(failed_);
    actions.logs.swap(logs_);
    actions.closed = closed_;
    actions.abort = abort_;
    return actions;
  }

  bool busy() const override { return !tickets_.empty() && abort_.ok(); }

 private:
  static constexpr const char* kJoinKey = "join";
  struct Mine {
    Ticket ticket = 0;
    std::vector<std::string> names;  // reserved while it is in flight
    SetId set = kGlobalSet;
  };
  struct Set {
    std::vector<int> members;
    std::vector<int> below;  // members in this node's subtree, itself included
  };

  // ---- Small parts ----

  const std::string& Host(int rank) const { return config_.host_names[rank]; }
  bool IsBelow(int rank) const {
    while (rank >= 0 && rank != config_.rank) rank = config_.parents[rank];
    return rank == config_.rank;
  }
  std::vector<int> Neighbours() const {
    std::vector<int> all = config_.children;
    if (!root_) all.push_back(config_.parent);
    return all;
  }
  std::vector<int> LiveChildren() const {
    std::vector<int> live;
    for (int child : config_.children) {
      if (!said_goodbye_.count(child) && !gone_.count(child)) live.push_back(child);
    }
    return live;
  }
  Writer& To(int peer, Record record) {
    Writer& writer = outgoing_[peer];
    if (writer.empty()) writer.Byte(kProtocolVersion);
    writer.Byte(static_cast<std::uint8_t>(record));
    return writer;
  }
  void Fail(Ticket ticket, const Result& why) { failed_.emplace_back(ticket, why); }
  // Nothing more can be agreed, but nothing broke either.
  void Close(const Result& why) {
    if (!closed_.ok() || !abort_.ok()) return;
    closed_ = why;
    for (int child : LiveChildren()) To(child, Record::kClosed).Text(why.message());
    FailMine(why);
    pending_.clear();
  }
  void FailMine(const Result& why) {
    for (auto& [key, mine] : tickets_) Fail(mine.ticket, why);
    tickets_.clear();
    names_.clear();
  }
  void AddSet(SetId id, const std::vector<int>& members) {
    Set set{members, {}};
    for (int m : members) {
      if (below_[m]) set.below.push_back(m);
    }
    sets_[id] = std::move(set);
  }
  // Joined or departed: nobody waits for these.
  std::set<int> Absent() const {
    std::set<int> absent = joined_;
    absent.insert(departed_.begin(), departed_.end());
    return absent;
  }
  static std::vector<int> ReadyRanks(const PendingEntry& entry) {
    std::vector<int> ranks;
    for (const auto& variant : entry.variants) {
      for (const auto& c : variant.contributions) ranks.push_back(c.rank);
    }
    return ranks;
  }

  // ---- Records ----

  void Dispatch(int peer, Reader& reader, TimePoint now) {
    switch (static_cast<Record>(reader.Byte())) {
      case Record::kReport: {
        DefinitionPtr definition = definitions_.Read(reader);
        std::uint64_t number = reader.Unsigned();
        std::vector<Contribution> contributions;
        for (std::size_t n = reader.Count(); n > 0 && reader.ok(); --n) {
          int rank = static_cast<int>(reader.Signed());
          contributions.push_back({rank, reader.Signeds<std::int64_t>()});
          if (!CheckRank(reader, rank)) return;
        }
        if (reader.ok() && !contributions.empty()) Report(definition, number, std::move(contributions), now);
        return;
      }
      case Record::kJoined: {
        int rank = static_cast<int>(reader.Signed());
        if (CheckRank(reader, rank)) Joined(rank);
        return;
      }
      case Record::kFinished: {
        auto set = static_cast<SetId>(reader.Unsigned());
        std::uint64_t number = reader.Unsigned();
        if (reader.ok()) Finished(set, number, now);
        return;
      }
      case Record::kStalled: {
        DefinitionPtr definition = definitions_.Read(reader);
        std::uint64_t number = reader.Unsigned();
        auto ranks = reader.Signeds<int>();
        if (!reader.ok()) return;
        Stalled(definition, number, ranks, now);
        return;
      }
      case Record::kBlocked: {
        int rank = static_cast<int>(reader.Signed());
        BlockedReport report;
        report.blocked = reader.Byte() != 0;
        report.where = reader.Text();
        if (CheckRank(reader, rank)) Blocked(rank, report);
        return;
      }
      case Record::kEvicted: return Evicted(reader.Unsigned());
      case Record::kDeparted: {
        int rank = static_cast<int>(reader.Signed());
        if (!CheckRank(reader, rank)) return;
        departed_.insert(rank);
        if (!root_) To(config_.parent, Record::kDeparted).Signed(rank);
        Reconsider();
        return;
      }
      case Record::kBatch: return ReceiveBatch(reader);
      case Record::kEvict: {
        std::uint64_t id = reader.Unsigned();
        if (reader.ok()) EvictHere(id);
        return;
      }
      case Record::kAskBlocked:
        asked_ = true;  // answered at the next Tick, for which NextWake asks at once
        for (int child : LiveChildren()) To(child, Record::kAskBlocked);
        return;
      case Record::kGoodbye:
        said_goodbye_.insert(peer);
        heard_.insert(peer);
        To(peer, Record::kGoodbyeHeard);
        if (peer == config_.parent && !leaving_) {
          Close(Result(Code::kShutdown, "rank " + std::to_string(peer) + " (host " + Host(peer) + ") has shut down"));
        }
        return;
      case Record::kClosed: {
        std::string text = reader.Text();
        if (reader.ok()) Close(Result(Code::kShutdown, text));
        return;
      }
      case Record::kGoodbyeHeard: heard_.insert(peer); return;
      case Record::kAbort: {
        auto code = static_cast<Code>(reader.Byte());
        std::string text = reader.Text();
        if (reader.ok()) Abort(Result(CodeName(code) == "Unknown" ? Code::kInternal : code, text));
        return;
      }
    }
    reader.Fail("unknown record");
  }

  bool CheckRank(Reader& reader, int rank) const {
    if (rank < 0 || rank >= static_cast<int>(config_.parents.size())) reader.Fail("no such rank");
    return reader.ok();
  }

  // ---- Readiness ----

  void Report(const DefinitionPtr& definition, std::uint64_t number, std::vector<Contribution> contributions,
              TimePoint now) {
    auto set = sets_.find(definition->definition.set);
    if (set == sets_.end() || !closed_.ok())
      return;  // removed meanwhile: each rank's submission fails when it hears of that
    std::string key = KeyOf(definition->definition, number);
    auto [place, added] = pending_.try_emplace(key);
    PendingEntry& entry = place->second;
    if (added) {
      entry.number = number;
      entry.since = now;
      if (pending_.size() == 1) stall_.Started(now);
    }
    auto variant = std::find_if(entry.variants.begin(), entry.variants.end(),
                                [&](const Variant& v) { return v.definition->bytes == definition->bytes; });
    if (variant == entry.variants.end()) {
      entry.variants.push_back(Variant{definition, {}});
      variant = entry.variants.end() - 1;
    }
    entry.ready += contributions.size();
    variant->contributions.insert(variant->contributions.end(), std::make_move_iterator(contributions.begin()),
                                  std::make_move_iterator(contributions.end()));
    if (Covered(entry, set->second)) Complete(place);
  }

  bool Covered(const PendingEntry& entry, const Set& set) const {
    if (entry.ready >= set.below.size()) return true;
    if (joined_.empty() && departed_.empty()) return false;
    return std::all_of(set.below.begin(), set.below.end(),
                       [&](int rank) { return joined_.count(rank) || departed_.count(rank) || entry.Has(rank); });
  }

  // Everybody below is ready: decide at rank 0, else pass it up as one report.
  void Complete(PendingTable::iterator place) {
    PendingEntry entry = std::move(place->second);
    pending_.erase(place);
    if (root_) {
      coordinator_->Decide(entry, *Members(entry.set()), joined_, departed_);
      return;
    }
    for (const auto& variant : entry.variants) {
      Writer& up = To(config_.parent, Record::kReport);
      DefinitionTable::Write(up, *variant.definition);
      up.Unsigned(entry.number);
      up.Unsigned(variant.contributions.size());
      for (const auto& contribution : variant.contributions) {
        up.Signed(contribution.rank);
        up.Signeds(contribution.values);
      }
    }
  }

  // Somebody joined or left, so entries may have become complete.
  void Reconsider() {
    for (auto place = pending_.begin(); place != pending_.end();) {
      auto next = std::next(place);
      auto set = sets_.find(place->second.set());
      if (set != sets_.end() && Covered(place->second, set->second)) Complete(place);
      place = next;
    }
  }

  void Joined(int rank) {
    joined_.insert(rank);
    last_joined_ = rank;
    if (!root_) To(config_.parent, Record::kJoined).Signed(rank);
    Reconsider();
  }

  // ---- Batches ----

  // Rank 0: commits what may be committed now: all that became ready since the last time, together.
  void Settle() {
    if (!root_ || !abort_.ok() || leaving_) return;
    bool all_joined = !joined_.empty();
    for (int r = 0; all_joined && r < static_cast<int>(config_.parents.size()); ++r) {
      all_joined = joined_.count(r) || departed_.count(r);
    }
    while (auto batch = coordinator_->Next(now_, all_joined ? last_joined_ : -1)) {
      for (auto& entry : batch->entries) PrepareEntry(entry);
      std::vector<std::uint64_t> evicted = coordinator_->AssignIds(*batch);
      for (int child : LiveChildren()) WriteBatch(To(child, Record::kBatch), *batch);
      for (auto id : evicted) EvictHere(id);
      all_joined = false;
      Commit(*batch);
    }
  }

  // Rank 0, just before an entry is committed: what depends on the order of commits.
  void PrepareEntry(DecidedEntry& entry) {
    const Definition& definition = entry.known->definition;
    if (!entry.error.ok()) return;
    if (int left = LeftMember(entry, departed_); left >= 0) {
      entry.error = HasLeft(definition, left);
    } else if (definition.op == Op::kAddProcessSet) {
      for (const auto& [id, set] : sets_) {
        if (set.members == definition.ranks) {
          entry.new_set = id;
          entry.existed = true;
          return;
        }
      }
      bool valid = !definition.ranks.empty();
      for (std::size_t i = 0; i < definition.ranks.size(); ++i) {
        int rank = definition.ranks[i];
        valid = valid && rank >= 0 && rank < static_cast<int>(config_.parents.size()) &&
                (i == 0 || definition.ranks[i - 1] < rank);
      }
      if (!valid) {
        entry.error = Result(Code::kArgument, "a process set needs distinct ascending ranks below " +
                                                  std::to_string(config_.parents.size()));
      } else {
        entry.new_set = ++last_set_;
      }
    } else if (definition.op == Op::kRemoveProcessSet) {
      auto id = static_cast<SetId>(definition.ranks.front());
      if (id == kGlobalSet) {
        entry.error = Result(Code::kArgument, "the global process set cannot be removed");
      } else if (!sets_.count(id)) {
        entry.error = Result(Code::kArgument, "there is no process set " + std::to_string(id));
      } else {
        coordinator_->DropSet(id);
      }
    }
  }

  // A member that left after it was ready and before the batch reached it, so that its data will not come; -1: none.
  int LeftMember(const DecidedEntry& entry, const std::set<int>& left) const {
    const std::vector<int>* members = Members(entry.known->definition.set);
    if (left.empty() || members == nullptr || !entry.error.ok() || !Info(entry.known->definition.op).tensors) return -1;
    for (int rank : left) {
      bool joined = std::find(entry.joined.begin(), entry.joined.end(), rank) != entry.joined.end();
      if (!joined && std::binary_search(members->begin(), members->end(), rank)) return rank;
    }
    return -1;
  }
  Result HasLeft(const Definition& definition, int rank) const {
    return Result(Code::kShutdown,
                  Describe(definition) + ": rank " + std::to_string(rank) + " (host " + Host(rank) + ") has shut down");
  }

  static void WriteBatch(Writer& writer, const DecidedBatch& batch) {
    writer.Unsigned(batch.set);
    writer.Unsigned(batch.number);
    writer.Unsigned(batch.entries.size());
    for (const auto& entry : batch.entries) {
      // An id that is given in this batch travels with the whole definition.
      writer.Unsigned(entry.assigned);
      writer.Unsigned(entry.assigned ? 0 : entry.known->id);
      if (entry.assigned || entry.known->id == 0) writer.Raw(entry.known->bytes);
      writer.Unsigned(entry.number);
      writer.Byte(static_cast<std::uint8_t>(entry.error.code()));
      if (!entry.error.ok()) {
        writer.Text(entry.error.message());
        continue;
      }
      writer.Signeds(entry.joined);
      writer.Unsigned(entry.values.size());
      for (const auto& values : entry.values) writer.Signeds(values);
      writer.Unsigned(entry.new_set);
      writer.Byte(entry.existed);
      writer.Signed(entry.last_joined);
    }
  }

  void ReceiveBatch(Reader& reader) {
    DecidedBatch batch;
    batch.set = static_cast<SetId>(reader.Unsigned());
    batch.number = reader.Unsigned();
    for (std::size_t n = reader.Count(); n > 0 && reader.ok(); --n) {
      DecidedEntry entry;
      entry.assigned = reader.Unsigned();
      entry.known = definitions_.Read(reader);
      entry.number = reader.Unsigned();
      auto code = static_cast<Code>(reader.Byte());
      if (!reader.ok()) return;
      if (entry.assigned) definitions_.Assign(entry.known, entry.assigned);
      if (code != Code::kOk) {
        entry.error = Result(code, reader.Text());
      } else {
        entry.joined = reader.Signeds<int>();
        for (std::size_t m = reader.Count(); m > 0 && reader.ok(); --m) {
          entry.values.push_back(reader.Signeds<std::int64_t>());
        }
        entry.new_set = static_cast<SetId>(reader.Unsigned());
        entry.existed = reader.Byte() != 0;
        entry.last_joined = static_cast<int>(reader.Signed());
      }
      batch.entries.push_back(std::move(entry));
    }
    if (!reader.ok()) return;
    for (const auto& entry : batch.entries) {
      // Committed while a rank below was leaving: nobody may wait for it.
      if (int left = LeftMember(entry, departed_); left >= 0) return Abort(HasLeft(entry.known->definition, left));
    }
    for (int child : LiveChildren()) WriteBatch(To(child, Record::kBatch), batch);
    Commit(batch);
  }

  // A batch is decided: the same on every rank, in the same order.
  void Commit(DecidedBatch& decided) {
    Batch batch;
    batch.set = decided.set;
    batch.number = decided.number;
    for (auto& entry : decided.entries) {
      const Definition& definition = entry.known->definition;
      AgreedEntry agreed;
      agreed.definition = std::shared_ptr<const Definition>(entry.known, &definition);
      agreed.joined = std::move(entry.joined);
      agreed.values = std::move(entry.values);
      agreed.error = entry.error;
      agreed.new_set = entry.new_set;
      agreed.existed = entry.existed;
      agreed.last_joined = entry.last_joined;
      bool is_join = definition.op == Op::kJoin;
      auto mine = tickets_.find(is_join ? kJoinKey : KeyOf(definition, entry.number));
      if (mine != tickets_.end()) {
        agreed.ticket = mine->second.ticket;
        for (const auto& name : mine->second.names) names_.erase(name);
        tickets_.erase(mine);
      }
      if (is_join) {
        joined_.clear();
        joined_here_ = false;
        next_number_.clear();
      } else if (entry.error.ok() && definition.op == Op::kAddProcessSet && !entry.existed) {
        last_set_ = std::max(last_set_, entry.new_set);
        AddSet(entry.new_set, definition.ranks);
      } else if (entry.error.ok() && definition.op == Op::kRemoveProcessSet) {
        RemoveSet(static_cast<SetId>(definition.ranks.front()));
      }
      batch.entries.push_back(std::move(agreed));
    }
    batches_.push_back(std::move(batch));
  }

  void RemoveSet(SetId id) {
    sets_.erase(id);
    Result removed(Code::kArgument, "process set " + std::to_string(id) + " was removed");
    for (auto mine = tickets_.begin(); mine != tickets_.end();) {
      if (mine->second.set != id) {
        ++mine;
        continue;
      }
      Fail(mine->second.ticket, removed);
      for (const auto& name : mine->second.names) names_.erase(name);
      mine = tickets_.erase(mine);
    }
    std::erase_if(pending_, [&](const auto& item) { return item.second.set() == id; });
    std::erase_if(next_number_, [&](const auto& item) { return item.first.first == id; });
  }

  // ---- Ids ----

  void EvictHere(std::uint64_t id) {
    definitions_.Evict(id);
    auto children = LiveChildren();
    for (int child : children) To(child, Record::kEvict).Unsigned(id);
    evictions_[id] = static_cast<int>(children.size()) + 1;
    Evicted(id);
  }
  // A child's subtree, or this node itself, no longer writes the id.
  void Evicted(std::uint64_t id) {
    auto found = evictions_.find(id);
    if (found == evictions_.end() || --found->second > 0) return;
    evictions_.erase(found);
    definitions_.Forget(id);
    if (!root_) To(config_.parent, Record::kEvicted).Unsigned(id);
  }

  // ---- Stalls ----

  void Stalled(const DefinitionPtr& definition, std::uint64_t number, const std::vector<int>& ranks, TimePoint now) {
    if (!root_) {
      Writer& up = To(config_.parent, Record::kStalled);
      DefinitionTable::Write(up, *definition);
      up.Unsigned(number);
      up.Signeds(ranks);
      return;
    }
    if (!sets_.count(definition->definition.set)) return;
    auto [place, added] = pending_.try_emplace(KeyOf(definition->definition, number));
    if (added) {
      place->second.number = number;
      place->second.since = now - stall_.first_limit();
      place->second.variants.push_back(Variant{definition, {}});
      if (pending_.size() == 1) stall_.Started(now);
    }
    place->second.ready_elsewhere.insert(ranks.begin(), ranks.end());
  }

  void Blocked(int rank, const BlockedReport& report) {
    if (root_) return stall_.Answer(rank, report);
    Writer& up = To(config_.parent, Record::kBlocked);
    up.Signed(rank);
    up.Byte(report.blocked);
    up.Text(report.where);
  }

  const NegotiatorConfig config_;
  const bool root_;
  std::vector<bool> below_;  // by rank: in this node's subtree
  DefinitionTable definitions_;
  std::unique_ptr<Coordinator> coordinator_;  // rank 0 only
  StallWatch stall_;

  std::map<SetId, Set> sets_;
  SetId last_set_ = kGlobalSet;
  std::map<std::pair<SetId, Op>, std::uint64_t> next_number_;  // of unnamed operations
  PendingTable pending_;                                       // not yet complete below this node
  std::unordered_map<std::string, Mine> tickets_;              // own submissions, by key
  std::set<std::string> names_;                                // reserved
  std::set<int> joined_, departed_;                            // in this subtree
  int last_joined_ = -1;
  bool joined_here_ = false;
  bool leaving_ = false;
  bool asked_ = false;
  std::set<int> said_goodbye_, heard_, gone_;  // neighbours
  std::map<std::uint64_t, int> evictions_;     // acknowledgements still awaited, by id
  Result closed_;
  Result abort_;
  TimePoint now_{};  // of the last call that brought one

  std::map<int, Writer> outgoing_;
  std::vector<Batch> batches_;
  std::vector<std::pair<Ticket, Result>> failed_;
  std::vector<std::pair<LogLevel, std::string>> logs_;
};

}  // namespace

std::unique_ptr<Negotiator> CreateNegotiator(const NegotiatorConfig& config) {
  return std::make_unique<NegotiatorImpl>(config);
}

}  // namespace ronde
