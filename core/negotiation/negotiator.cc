#include "negotiation/negotiator.h"

#include <algorithm>

#include "negotiation/agreement.h"
#include "negotiation/coordinator.h"
#include "negotiation/exchange.h"
#include "negotiation/ledger.h"
#include "negotiation/links.h"
#include "negotiation/pending_table.h"
#include "negotiation/process_sets.h"
#include "negotiation/stall.h"
#include "negotiation/submissions.h"
#include "negotiation/tree.h"

namespace ronde {
namespace {

class NegotiatorImpl final : public Negotiator {
 public:
  explicit NegotiatorImpl(const NegotiatorConfig& config)
      : config_(config),
        root_(config.parent < 0),
        tree_(config_),
        links_(config_),
        sets_(tree_),
        pending_(tree_, sets_, absence_,
                 [this](const EntryReport& report, const Result& conflict) { Complete(report, conflict); }),
        stall_(config_) {
    if (root_) coordinator_ = std::make_unique<Coordinator>(config_, definitions_);
  }

  void Submit(Ticket ticket, const DefinitionPtr& definition, const Values& values, TimePoint now) override {
    now_ = now;
    if (Result refused = Refuse(definition->definition); !refused.ok()) return Fail(ticket, refused);
    if (definition->definition.op == Op::kJoin) {
      submissions_.AddJoin(ticket);
      return Joined(config_.rank);
    }
    std::uint64_t number = 0;
    if (Result taken = submissions_.Add(ticket, definition, &number); !taken.ok()) return Fail(ticket, taken);
    report_.Clear();
    report_.number = number;
    report_.Add(config_.rank, report_.Add(definition), values);
    ++(definition->id != 0 ? counts_.cache_hits : counts_.cache_misses);
    (void)Report(report_, now, ticket);
  }

  DefinitionPtr Intern(const Definition& definition) override { return definitions_.Intern(definition); }

  void Receive(int peer, std::span<const std::byte> message, TimePoint now) override {
    now_ = now;
    Reader reader(message);
    if (reader.Byte() != kProtocolVersion) reader.Fail("unknown protocol version");
    while (!reader.done() && abort_.ok()) Dispatch(peer, reader, now);
    if (!reader.ok()) Abort(reader.result().Because(Name(peer) + " sent nonsense"));
  }

  void Finished(SetId set, std::uint64_t number, TimePoint now) override {
    now_ = now;
    if (root_) return coordinator_->Finished(set, number);
    Writer& up = links_.Up(Record::kFinished);
    up.Unsigned(set);
    up.Unsigned(number);
  }

  void Tick(TimePoint now, const BlockedReport& blocked) override {
    now_ = now;
    if (!abort_.ok()) return;
    if (asked_) {
      asked_ = false;
      Blocked(config_.rank, blocked);
    }
    if (!config_.stall_check || pending_.empty() || now < stall_.next_look()) return;
    stall_.Ticked(now);
    pending_.CompleteConflicting();
    if (!root_) return ReportStalled(now);
    StallFinding finding = stall_.Look(pending_.Sorted(), sets_, absence_, now);
    if (finding.ask) {
      for (int child : links_.LiveChildren()) links_.To(child, Record::kAskBlocked);
      Blocked(config_.rank, blocked);
    }
    counts_.stalls += static_cast<std::int64_t>(finding.warnings.size());
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

  void Goodbye(TimePoint now) override {
    now_ = now;
    if (leaving_) return;
    leaving_ = true;
    submissions_.FailAll(Result(Code::kShutdown, "ronde was shut down on this rank"), &failed_);
    pending_.Clear();
    if (!root_) links_.Up(Record::kDeparted).Signed(config_.rank);
    for (int neighbour : links_.all()) links_.To(neighbour, Record::kGoodbye);
  }

  bool goodbye_complete() const override { return links_.AllHeard(); }

  void Lost(int peer, const Result& cause, TimePoint now) override {
    now_ = now;
    bool expected = links_.IsGone(peer) || links_.HasLeft(peer) || leaving_;
    links_.Gone(peer);
    if (!expected) Abort(cause);
  }

  bool HasSaidGoodbye(int peer) const override { return links_.HasLeft(peer); }

  void Abort(const Result& cause) override {
    if (!abort_.ok() || cause.ok()) return;
    abort_ = cause;
    for (int neighbour : links_.all()) Write(links_.To(neighbour, Record::kAbort), cause);
    submissions_.FailAll(cause, &failed_);
    pending_.Clear();
  }

  const std::vector<int>* Members(SetId id) const override {
    const ProcessSet* set = sets_.Find(id);
    return set == nullptr ? nullptr : &set->members;
  }

  void Take(Actions* actions) override {
    for (auto& batch : actions->batches) spare_batches_.push_back(std::move(batch));
    actions->batches.clear();
    actions->failed.clear();
    actions->logs.clear();
    actions->ready.clear();
    Settle();
    links_.Take(&actions->messages);
    actions->batches.swap(batches_);
    actions->failed.swap(failed_);
    actions->logs.swap(logs_);
    actions->ready.swap(ready_);
    actions->closed = closed_;
    actions->abort = abort_;
  }

  bool busy() const override { return !submissions_.empty() && abort_.ok(); }

  void RecordReadiness(bool on) override { records_readiness_ = on; }
  NegotiatorCounts counts() const override { return counts_; }

 private:
  // ---- Small parts ----

  std::string Name(int rank) const {
    return "rank " + std::to_string(rank) + " (host " + config_.host_names[rank] + ")";
  }
  void Fail(Ticket ticket, const Result& why) { failed_.emplace_back(ticket, why); }

  Result Refuse(const Definition& definition) const {
    if (!abort_.ok()) return abort_;
    if (!closed_.ok()) return closed_;
    if (leaving_) return Result(Code::kShutdown, "ronde was shut down on this rank");
    auto wrong = [&](const std::string& why) { return Result(Code::kArgument, Describe(definition) + ": " + why); };
    auto set = [&] { return "process set " + std::to_string(definition.set); };
    if (submissions_.joined()) return wrong("this rank has joined; wait for join first");
    const std::vector<int>* members = Members(definition.set);
    if (members == nullptr) return wrong("there is no " + set());
    if (!std::binary_search(members->begin(), members->end(), config_.rank)) {
      return wrong("this rank is not in " + set());
    }
    if (definition.op == Op::kJoin && definition.set != kGlobalSet) return wrong("only the global set is joined");
    if (definition.op == Op::kRemoveProcessSet && definition.ranks.empty()) return wrong("no process set is named");
    return Ok();
  }

  // Nothing more can be agreed, but nothing broke either.
  void Close(const Result& why) {
    if (!closed_.ok() || !abort_.ok()) return;
    closed_ = why;
    for (int child : links_.LiveChildren()) links_.To(child, Record::kClosed).Text(why.message());
    submissions_.FailAll(why, &failed_);
    pending_.Clear();
  }

  // ---- Records ----

  void Dispatch(int peer, Reader& reader, TimePoint now) {
    auto record = static_cast<Record>(reader.Byte());
    if (!links_.MaySend(peer, record)) return reader.Fail("a record from the wrong side");
    switch (record) {
      case Record::kReport: {
        ReadReport(reader, peer, definitions_, sets_, tree_, &report_);
        if (reader.ok() && !Report(report_, now)) reader.Fail("a rank reports twice");
        return;
      }
      case Record::kJoined: {
        int rank = RankBelow(peer, reader);
        if (reader.ok()) Joined(rank);
        return;
      }
      case Record::kFinished: {
        auto set = static_cast<SetId>(reader.Unsigned());
        std::uint64_t number = reader.Unsigned();
        if (reader.ok()) Finished(set, number, now);
        return;
      }
      case Record::kStalled: return ReceiveStalled(peer, reader, now);
      case Record::kBlocked: {
        int rank = RankBelow(peer, reader);
        BlockedReport report;
        report.blocked = reader.Byte() != 0;
        report.where = reader.Text();
        if (reader.ok()) Blocked(rank, report);
        return;
      }
      case Record::kEvicted: {
        std::uint64_t id = reader.Unsigned();
        if (reader.ok() && evictions_.Acknowledge(id, peer)) Evicted(id);
        return;
      }
      case Record::kDeparted: {
        int rank = RankBelow(peer, reader);
        if (reader.ok()) Departed(rank);
        return;
      }
      case Record::kBatch: return ReceiveBatch(reader);
      case Record::kEvict: {
        std::uint64_t id = reader.Unsigned();
        if (reader.ok()) Evict(id);
        return;
      }
      case Record::kAskBlocked:
        asked_ = true;  // answered at the next Tick, for which NextWake asks at once
        for (int child : links_.LiveChildren()) links_.To(child, Record::kAskBlocked);
        return;
      case Record::kGoodbye:
        links_.HeardGoodbye(peer);
        links_.To(peer, Record::kGoodbyeHeard);
        for (auto id : evictions_.Gone(peer)) Evicted(id);
        if (peer == config_.parent && !leaving_) Close(Result(Code::kShutdown, Name(peer) + " has shut down"));
        return;
      case Record::kGoodbyeHeard: return links_.WasHeard(peer);
      case Record::kClosed: {
        std::string text = reader.Text();
        if (reader.ok()) Close(Result(Code::kShutdown, text));
        return;
      }
      case Record::kAbort: {
        Result cause = ReadError(reader);
        if (reader.ok()) Abort(cause);
        return;
      }
    }
    reader.Fail("unknown record");
  }

  int RankBelow(int peer, Reader& reader) const {
    auto rank = static_cast<int>(reader.Signed());
    if (tree_.Via(rank) != peer) reader.Fail("a rank that is not below the sender");
    return rank;
  }

  void ReceiveStalled(int peer, Reader& reader, TimePoint now) {
    DefinitionPtr definition = definitions_.Read(reader);
    std::uint64_t number = reader.Unsigned();
    std::vector<int> ranks(reader.Count());
    for (auto& rank : ranks) rank = RankBelow(peer, reader);
    if (!reader.ok()) return;
    std::erase_if(ranks, [&](int rank) { return absence_.departed.count(rank) > 0; });
    if (ranks.empty() || leaving_ || !closed_.ok() || sets_.Find(definition->definition.set) == nullptr) return;
    if (!root_) return WriteStalled(*definition, number, ranks);
    if (pending_.empty()) stall_.Started(now);
    PendingEntry& entry = pending_.ReportPartial(definition, number, now - stall_.first_limit());
    entry.ready_elsewhere.insert(ranks.begin(), ranks.end());
  }

  // ---- Readiness ----

  // False: a rank reports twice. The ticket: of a local submission.
  bool Report(const EntryReport& report, TimePoint now, Ticket ticket = 0) {
    if (records_readiness_) RecordReady(report, now, ticket);
    if (leaving_ || !closed_.ok()) return true;  // nothing from here on is passed on
    if (pending_.empty()) stall_.Started(now);
    return pending_.Report(report, now);
  }

  void RecordReady(const EntryReport& report, TimePoint now, Ticket ticket) {
    for (const auto& c : report.contributions) {
      const DefinitionPtr& known = report.variants[c.variant];
      std::shared_ptr<const Definition> definition(known, &known->definition);
      ready_.push_back({std::move(definition), report.number, c.rank, ticket, now});
    }
  }

  // Everybody below is ready: decide at rank 0, else pass it up as one report. (One: a part of the variants could
  // complete the entry above together with ranks that have joined since.)
  void Complete(const EntryReport& report, const Result& conflict) {
    const SetId set = report.variants.front()->definition.set;
    if (root_) return coordinator_->Decide(report, conflict, *Members(set), absence_);
    Write(links_.Up(Record::kReport), report);
  }

  // What this completes goes up first: a node above that knew of the absence before could take an entry for complete
  // while ready ranks are still on their way to it.
  void Joined(int rank) {
    absence_.joined.insert(rank);
    last_joined_ = rank;
    pending_.Reconsider();
    if (!root_) links_.Up(Record::kJoined).Signed(rank);
  }

  // With it go all below it: they are cut off from rank 0, and know it.
  void Departed(int rank) {
    for (int cut_off : tree_.Subtree(rank)) absence_.departed.emplace(cut_off, rank);
    pending_.Reconsider();
    if (!root_) {
      links_.Up(Record::kDeparted).Signed(rank);
      return;
    }
    for (const auto& [id, set] : sets_.all()) LiftCreditIfUnreported(id);
  }
  void LiftCreditIfUnreported(SetId id) {
    if (absence_.departed.count(Members(id)->front())) coordinator_->LiftCredit(id);
  }

  // ---- Batches ----

  // Rank 0: commits what may be committed now: all that became ready since the last time, together.
  void Settle() {
    if (!root_ || !abort_.ok() || leaving_) return;
    while (coordinator_->Next(now_, AllJoined() ? last_joined_ : -1, &decided_)) {
      for (auto& entry : decided_.entries) Prepare(entry);
      std::vector<std::uint64_t> evicted = coordinator_->AssignIds(decided_);
      for (int child : links_.LiveChildren()) Write(links_.To(child, Record::kBatch), decided_);
      for (auto id : evicted) Evict(id);
      Commit(decided_);
    }
  }
  bool AllJoined() const {
    if (absence_.joined.empty()) return false;
    for (int r = 0; r < tree_.size(); ++r) {
      if (!absence_.Has(r)) return false;
    }
    return true;
  }

  // Rank 0, just before an entry is committed: what depends on the order of commits.
  void Prepare(DecidedEntry& entry) {
    const Definition& definition = entry.known->definition;
    if (!entry.error.ok()) return;
    if (int left = LeftMember(entry); left >= 0) {
      entry.error = HasLeft(definition, left, config_);
      entry.joined.clear();
      entry.values.clear();
    } else if (definition.op == Op::kAddProcessSet || definition.op == Op::kRemoveProcessSet) {
      entry.error = sets_.Check(definition);
      if (!entry.error.ok()) return;
      if (definition.op == Op::kAddProcessSet) {
        auto equal = sets_.FindEqual(definition.ranks);
        entry.existed = equal.has_value();
        entry.new_set = equal.value_or(sets_.next_id());
      }
      ChangeSets(entry);  // at once: the next entry of the batch may be about the same set
    }
  }

  // A rank that left after an entry was ready and before it was committed, so that a member's data will not come; -1:
  // none.
  int LeftMember(const DecidedEntry& entry) const {
    if (absence_.departed.empty()) return -1;
    const std::vector<int>* members = Members(entry.known->definition.set);
    if (members == nullptr || !entry.error.ok() || !Info(entry.known->definition.op).tensors) return -1;
    for (const auto& [rank, left] : absence_.departed) {
      bool joined = std::find(entry.joined.begin(), entry.joined.end(), rank) != entry.joined.end();
      if (!joined && std::binary_search(members->begin(), members->end(), rank)) return left;
    }
    return -1;
  }

  void ReceiveBatch(Reader& reader) {
    ReadBatch(reader, definitions_, sets_, &decided_);
    if (!reader.ok()) return;
    for (const auto& entry : decided_.entries) {
      // Committed while a rank below was leaving: nobody may wait for it.
      if (int left = LeftMember(entry); left >= 0) return Abort(HasLeft(entry.known->definition, left, config_));
    }
    for (int child : links_.LiveChildren()) Write(links_.To(child, Record::kBatch), decided_);
    for (const auto& entry : decided_.entries) ChangeSets(entry);
    Commit(decided_);
  }

  void ChangeSets(const DecidedEntry& entry) {
    const Definition& definition = entry.known->definition;
    if (!entry.error.ok()) return;
    if (definition.op == Op::kAddProcessSet && !entry.existed) {
      sets_.Add(entry.new_set, definition.ranks);
      if (root_) LiftCreditIfUnreported(entry.new_set);
    } else if (definition.op == Op::kRemoveProcessSet) {
      auto id = static_cast<SetId>(definition.ranks.front());
      sets_.Remove(id);
      pending_.RemoveSet(id);
      submissions_.FailSet(id, Result(Code::kArgument, "process set " + std::to_string(id) + " was removed"), &failed_);
      if (root_) coordinator_->DropSet(id);
    }
  }

  // A batch is decided: the same on every rank, in the same order.
  void Commit(DecidedBatch& decided) {
    Batch batch;
    if (!spare_batches_.empty()) {
      batch = std::move(spare_batches_.back());
      spare_batches_.pop_back();
      batch.entries.clear();
    }
    batch.set = decided.set;
    batch.number = decided.number;
    for (auto& entry : decided.entries) {
      AgreedEntry& agreed = batch.entries.emplace_back(Agreed(entry));
      if (entry.known->definition.op == Op::kJoin) {
        absence_.joined.clear();
        agreed.ticket = submissions_.EndJoin();
      } else {
        agreed.ticket = submissions_.End(*entry.known, entry.number);
      }
    }
    decided.entries.clear();  // hold no definitions
    batches_.push_back(std::move(batch));
  }

  // ---- Ids ----

  void Evict(std::uint64_t id) {
    definitions_.Evict(id);
    auto children = links_.LiveChildren();
    for (int child : children) links_.To(child, Record::kEvict).Unsigned(id);
    if (evictions_.Begin(id, children)) Evicted(id);
  }
  // Nobody below writes the id any more, nor does this node.
  void Evicted(std::uint64_t id) {
    definitions_.Forget(id);
    if (!root_) links_.Up(Record::kEvicted).Unsigned(id);
  }

  // ---- Stalls ----

  // Every node times its own partial entries, since rank 0 does not see them.
  void ReportStalled(TimePoint now) {
    for (PendingEntry* entry : pending_.Sorted()) {
      if (entry->reported == entry->ready() || now - entry->since < stall_.first_limit()) continue;
      entry->reported = entry->ready();
      WriteStalled(*entry->report.variants.front(), entry->report.number, entry->ReadyRanks());
    }
  }
  void WriteStalled(const KnownDefinition& definition, std::uint64_t number, const std::vector<int>& ranks) {
    Writer& up = links_.Up(Record::kStalled);
    DefinitionTable::Write(up, definition);
    up.Unsigned(number);
    up.Signeds(ranks);
  }

  void Blocked(int rank, const BlockedReport& report) {
    if (root_) return stall_.Answer(rank, report);
    Writer& up = links_.Up(Record::kBlocked);
    up.Signed(rank);
    up.Byte(report.blocked);
    up.Text(report.where);
  }

  const NegotiatorConfig config_;
  const bool root_;
  const TreePosition tree_;
  Links links_;
  ProcessSets sets_;
  Absence absence_;
  DefinitionTable definitions_;
  Evictions evictions_;
  PendingTable pending_;     // not yet complete below this node
  Submissions submissions_;  // this rank's own
  StallWatch stall_;
  std::unique_ptr<Coordinator> coordinator_;  // rank 0 only

  int last_joined_ = -1;
  bool leaving_ = false;
  bool asked_ = false;  // what this rank waits in
  Result closed_;
  Result abort_;
  TimePoint now_{};  // of the last call that brought one

  // What is at hand, kept for its memory.
  EntryReport report_;
  DecidedBatch decided_;
  std::vector<Batch> spare_batches_;

  std::vector<Batch> batches_;
  std::vector<std::pair<Ticket, Result>> failed_;
  std::vector<std::pair<LogLevel, std::string>> logs_;
  bool records_readiness_ = false;
  std::vector<Readiness> ready_;
  NegotiatorCounts counts_;
};

}  // namespace

std::unique_ptr<Negotiator> CreateNegotiator(const NegotiatorConfig& config) {
  return std::make_unique<NegotiatorImpl>(config);
}

}  // namespace ronde
