#include "engine/engine.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <thread>

#include "engine/checks.h"
#include "engine/executor.h"
#include "engine/inbox.h"
#include "engine/known_requests.h"
#include "engine/live_sets.h"
#include "engine/tickets.h"
#include "engine/waiters.h"
#include "negotiation/negotiator.h"
#include "transport/tree.h"

namespace ronde {
namespace {

// How long the control thread polls eagerly after something happened, so that a loop of small operations meets it
// awake.
constexpr auto kEagerTime = std::chrono::microseconds(60);
// How long a user's thread drives the engine without anything moving before it sleeps.
constexpr auto kDriveTime = std::chrono::microseconds(100);
// How long after a user's thread drove the control thread leaves the engine to it.
constexpr auto kParkTime = std::chrono::microseconds(400);
// How long a lost connection waits for somebody to say why the process died.
constexpr double kCauseOfDeathSeconds = 0.3;
// How long a failure of the data plane waits for the control plane to name the dead rank.
constexpr double kBetterCauseSeconds = 0.5;
// How long a leaving rank keeps its connections open for its neighbours' answers.
constexpr double kGoodbyeSeconds = 1;
// Of memory that AllocateShared gives: a cache line.
constexpr std::size_t kMemoryAlign = 64;

NegotiatorConfig MakeNegotiatorConfig(const Options& options, const Topology& topology) {
  Tree tree = BuildTree(topology.host_ids);
  NegotiatorConfig config;
  config.rank = topology.rank;
  config.parent = tree.parent[topology.rank];
  config.children = tree.children[topology.rank];
  config.parents = tree.parent;
  config.host_names = topology.host_names;
  config.cache_capacity = options.cache_capacity;
  config.linger = FromSeconds(options.cycle_time_ms / 1000);
  config.stall_check = !options.stall_check_disable;
  config.stall_warning = FromSeconds(options.stall_warning_seconds);
  if (options.stall_abort_seconds >= 0) config.stall_abort = FromSeconds(options.stall_abort_seconds);
  return config;
}

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(EngineConfig config)
      : config_(std::move(config)),
        topology_(config_.topology),
        log_(config_.log),
        timeline_({topology_.rank, topology_.size, topology_.host_names[topology_.rank],
                   static_cast<std::uint64_t>(config_.options.timeline_max_bytes), Timeline::kMaxWaiting, log_}),
        mailbox_(std::move(config_.mailbox)),
        negotiator_(CreateNegotiator(MakeNegotiatorConfig(config_.options, topology_))),
        known_requests_(config_.options.cache_capacity),
        sets_(topology_.size) {
    executor_.emplace(Executor::Config{
        topology_.rank, FusionLimits{config_.options.fusion_threshold, config_.options.disable_group_fusion},
        &config_.backends,
        /*first_chunk=*/0,
        [this](SetId set, std::uint64_t number) {
          inbox_.Finished(set, number);
          WakeControl();
        },
        [this](const Result& failure) {
          inbox_.Fail(failure, /*final=*/false);
          WakeControl();
        },
        &counters_, &timeline_});
    control_ = std::thread([this] { ControlMain(); });
  }

  ~EngineImpl() override {
    Shutdown("");
    executor_.reset();
  }

  const Topology& topology() const override { return topology_; }
  bool has_shared_memory() const override { return config_.segment != nullptr; }

  Result Check(const Request& request) const override {
    auto members = MembersOf(request);
    return members.ok() ? CheckRequest(request, topology_.rank, *members.value(), config_.backends) : members.error();
  }

  Result Submit(std::shared_ptr<Operation> operation) override {
    const Request& request = operation->request();
    auto members = MembersOf(request);
    if (!members.ok()) return members.error();
    RONDE_RETURN_IF_ERROR(CheckRequest(request, topology_.rank, *members.value(), config_.backends));
    operation->submitted_ticks = Ticks();
    if (timeline_.on()) operation->submitted = Now();
    Values values = ValuesOf(request, members.value()->size());
    RONDE_RETURN_IF_ERROR(inbox_.Submit({std::move(operation), std::move(values)}));
    WakeControl();
    return Ok();
  }

  bool Wait(Operation& operation, Deadline deadline) override {
    if (operation.done()) return true;
    Waiters::Scope scope(waiters_, operation);
    WaitMark mark(timeline_, operation);
    if (Drive(operation, deadline)) return true;
    return operation.Wait(deadline);
  }

  Expected<std::shared_ptr<std::byte>> AllocateShared(std::size_t bytes) const override {
    auto heap = config_.segment ? config_.segment->heap() : nullptr;
    if (heap == nullptr) {
      const std::size_t rounded = std::max<std::size_t>(bytes, 1) + kMemoryAlign - 1;
      void* memory =
          rounded < bytes ? nullptr : std::aligned_alloc(kMemoryAlign, rounded / kMemoryAlign * kMemoryAlign);
      if (memory == nullptr) return Result(Code::kArgument, "no memory of " + std::to_string(bytes) + " bytes");
      return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory), [](std::byte* data) { std::free(data); });
    }
    auto memory = heap->Allocate(bytes);
    if (!memory.ok()) return memory.error();
    return std::shared_ptr<std::byte>(memory.value(), [heap](std::byte* data) { heap->Free(data); });
  }

  Expected<std::vector<int>> Members(SetId set) const override {
    auto members = sets_.Find(set);
    if (!members) return Result(Code::kArgument, "there is no process set " + std::to_string(set));
    return *members;
  }

  Result StartTimeline(const std::string& path, bool mark_cycles) override {
    const bool all_ranks = config_.options.timeline_all_ranks;
    if (topology_.rank != 0 && !all_ranks) return Ok();
    RONDE_RETURN_IF_ERROR(timeline_.Start(all_ranks ? TimelinePath(path, topology_.rank) : path, mark_cycles));
    FollowTimeline();
    return Ok();
  }

  void StopTimeline() override {
    timeline_.Stop();
    FollowTimeline();
  }

  MetricRows Metrics() const override {
    MetricRows rows;
    AddRows(counters_, tick_scale_.NanosecondsPerTick(), &rows);
    std::lock_guard lock(driver_);
    const NegotiatorCounts counts = negotiator_->counts();
    rows.emplace_back("cache.hits", counts.cache_hits);
    rows.emplace_back("cache.misses", counts.cache_misses);
    rows.emplace_back("stalls", counts.stalls);
    return rows;
  }

  void Shutdown(const std::string& failure) override {
    std::lock_guard shutdown_lock(shutdown_mutex_);
    if (!control_.joinable()) return;
    if (!failure.empty()) {
      inbox_.Fail(Result(Code::kPeerLost, topology_.Describe(topology_.rank) + " failed: " + failure), /*final=*/true);
    }
    inbox_.Close(Result(Code::kShutdown, "ronde was shut down on this rank"));
    inbox_.Leave();
    WakeControl();
    control_.join();
    timeline_.Stop();
  }

 private:
  Expected<ronde::Members> MembersOf(const Request& request) const {
    if (auto members = sets_.Find(request.set)) return members;
    return Result(Code::kArgument, Describe(request) + ": there is no process set " + std::to_string(request.set));
  }

  // A user's thread that waits, in the timeline.
  class WaitMark {
   public:
    WaitMark(Timeline& timeline, const Operation& operation)
        : timeline_(timeline), operation_(operation), start_(timeline.on() ? Now() : TimePoint()) {}
    WaitMark(const WaitMark&) = delete;
    ~WaitMark() {
      if (start_ != TimePoint()) timeline_.AddWait(Describe(operation_.request()), start_);
    }

   private:
    Timeline& timeline_;
    const Operation& operation_;
    const TimePoint start_;
  };

  // Whichever of several threads that start and stop comes last sees how it ended.
  void FollowTimeline() {
    std::lock_guard lock(driver_);
    negotiator_->RecordReadiness(timeline_.on());
  }

  // The right to drive, for a scope. Operations that ended meanwhile are told so at its end, with no lock held.
  class Turn {
   public:
    explicit Turn(EngineImpl& engine) : engine_(engine), token_(engine.driver_) {}
    Turn(EngineImpl& engine, std::try_to_lock_t how) : engine_(engine), token_(engine.driver_, how) {}
    ~Turn() {
      if (!mine()) return;
      auto ended = std::exchange(engine_.ended_, {});
      token_.unlock();
      for (auto& [operation, result] : ended) operation->Complete(result);
    }
    bool mine() const { return token_.owns_lock(); }

   private:
    EngineImpl& engine_;
    std::unique_lock<std::mutex> token_;
  };

  void WakeControl() {
    // The control thread sets asleep_ before its last look at the inbox, so one of the two sees the other.
    // Only the control thread clears it: a thread that drives may have taken the ring before it woke anybody.
    if (asleep_.load()) mailbox_->Ring();
  }

  // For who has the turn to drive.
  BlockedReport Blocked() {
    if (std::string first = waiters_.First(); !first.empty()) return {true, "waiting in " + first};
    const Operation* oldest = nullptr;
    Ticket lowest = 0;
    tickets_.ForEach([&](Ticket ticket, const Operation& operation) {
      if (!operation.request().caller_waits || operation.done() || (oldest != nullptr && lowest < ticket)) return;
      oldest = &operation;
      lowest = ticket;
    });
    if (oldest != nullptr) return {true, "waiting in " + Describe(oldest->request())};
    return {false, "not inside ronde"};
  }

  // A thread that waits anyway does the engine's work itself: no hand-over to other threads, which costs more than a
  // small operation. It drives as long as something moves and a moment longer; then the control thread takes over again
  // by itself (see ControlMain). Returns whether the operation has ended.
  bool Drive(Operation& operation, Deadline deadline) {
    TimePoint until = Now() + kDriveTime;
    while (!operation.done()) {
      TimePoint now = Now();
      if (now >= until || now >= deadline) return operation.done();
      bool active = false;
      if (Turn turn(*this, std::try_to_lock); turn.mine() && !leaving_ && !aborted_) {
        active = RunCycle(/*wake_executor=*/false);
        last_driven_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
      }
      executor_->TryRunOne();
      if (active) {
        until = Now() + kDriveTime;
      } else if (!operation.done()) {
        sched_yield();
      }
    }
    return true;
  }

  bool DrivenLately(TimePoint now) const {
    return now - TimePoint(Duration(last_driven_.load(std::memory_order_relaxed))) < kParkTime;
  }

  // ---- Control thread ----

  void ControlMain() {
    TimePoint eager_until = Now();
    while (true) {
      if (DrivenLately(Now())) {
        // A user's thread does the work; look again when it may have stopped.
        std::this_thread::sleep_for(kParkTime / 2);
        continue;
      }
      Deadline wake;
      bool eager = false;
      {
        Turn turn(*this);
        bool active = RunCycle(/*wake_executor=*/true);
        if (leaving_ && DoneLeaving()) break;
        TimePoint now = Now();
        if (active) {
          eager_until = now + kEagerTime;
          continue;
        }
        asleep_.store(true);
        if (!inbox_.empty()) {
          asleep_.store(false);
          continue;
        }
        wake = std::min(negotiator_->NextWake(), failure_deadline_);
        if (leaving_) wake = std::min(wake, leave_deadline_);
        eager = negotiator_->busy() || now < eager_until;
      }
      mailbox_->Wait(wake, eager);
      asleep_.store(false);
    }
    Turn turn(*this);
    // The end: whatever is still here ends with the reason why this engine stopped.
    const Result reason = inbox_.closed();
    executor_->Abort(reason);
    (void)executor_->WaitIdle(After(config_.options.shutdown_timeout));
    RunCycle(/*wake_executor=*/true);
    tickets_.TakeAll([&](std::shared_ptr<Operation> operation) { ended_.emplace_back(std::move(operation), reason); });
  }

  // One round: takes in what came, hands out what was decided. Returns whether anything happened.
  bool RunCycle(bool wake_executor) {
    TimePoint now = Now();
    bool active = false;
    while (mailbox_->Take(&event_)) {
      active = true;
      if (event_.lost.ok()) {
        negotiator_->Receive(event_.peer, event_.message, now);
      } else {
        PeerEnded(event_.peer, event_.lost);
      }
    }
    // After the mailbox, so that what a message led somebody here to submit is seen in the same round.
    active |= TakeInbox(now);
    if (now >= failure_deadline_) {  // nobody gave a better cause
      failure_deadline_ = Deadline::max();
      negotiator_->Abort(failure_);
    }
    if (now >= negotiator_->NextWake()) negotiator_->Tick(now, Blocked());
    active |= HandOut(wake_executor);
    if (active && timeline_.marks_cycles()) timeline_.AddCycle(now);
    return active;
  }

  bool TakeInbox(TimePoint now) {
    inbox_.Take(&taken_);
    if (!taken_.failure.ok()) {
      failure_ = taken_.failure;
      bool may_improve = failure_.code() == Code::kPeerLost && !taken_.final_failure;
      failure_deadline_ = may_improve ? now + FromSeconds(kBetterCauseSeconds) : now;
    }
    for (auto& submission : taken_.submissions) {
      const DefinitionPtr definition = Recognize(submission.operation->request());
      negotiator_->Submit(tickets_.Add(std::move(submission.operation)), definition, submission.values, now);
    }
    for (auto& [set, number] : taken_.finished) negotiator_->Finished(set, number, now);
    if (taken_.leave) {
      leaving_ = true;
      leave_deadline_ = now + FromSeconds(config_.options.shutdown_timeout);
    }
    return !taken_.empty();
  }

  DefinitionPtr Recognize(const Request& request) {
    if (const DefinitionPtr* known = known_requests_.Find(request)) return *known;
    DefinitionPtr made = negotiator_->Intern(DefinitionOf(request));
    known_requests_.Keep(made);
    return made;
  }

  void PeerEnded(int peer, const Result& lost) {
    if (negotiator_->HasSaidGoodbye(peer) || aborted_) {
      negotiator_->Lost(peer, lost, Now());
      return;
    }
    Result cause = lost;
    if (config_.cause_of_death) {
      std::string why = config_.cause_of_death(peer, After(kCauseOfDeathSeconds));
      if (!why.empty()) cause = Result(Code::kPeerLost, topology_.Describe(peer) + " died: " + why);
    }
    failure_deadline_ = Deadline::max();
    negotiator_->Lost(peer, cause, Now());
  }

  bool HandOut(bool wake_executor) {
    Actions& actions = actions_;
    negotiator_->Take(&actions);
    for (auto& [level, text] : actions.logs) log_.Write(level, text);
    for (auto& [peer, message] : actions.messages) mailbox_->Post(peer, message);
    if (!actions.ready.empty()) AddToTimeline(std::move(actions.ready));
    if (!actions.closed.ok()) inbox_.Close(actions.closed);
    if (!actions.abort.ok() && !aborted_) {
      aborted_ = true;
      log_.Debug("aborting: " + actions.abort.message() + " (" + actions.abort.place() + ")");
      inbox_.CloseFinally(actions.abort);
      executor_->Abort(actions.abort);
    }
    for (auto& batch : actions.batches) Execute(batch, wake_executor);
    for (auto& [ticket, result] : actions.failed) {
      if (auto operation = tickets_.Take(ticket)) ended_.emplace_back(std::move(operation), result);
    }
    return !actions.messages.empty() || !actions.batches.empty() || !actions.failed.empty();
  }

  void AddToTimeline(std::vector<Readiness> ready) {
    for (auto& each : ready) {
      const Operation* mine = tickets_.Find(each.ticket);
      if (mine != nullptr && mine->submitted != TimePoint()) each.time = std::min(each.time, mine->submitted);
    }
    timeline_.AddReady(ready);
  }

  // Leaves memory of another batch in its place.
  void Execute(Batch& batch, bool wake_executor) {
    Job& job = job_;
    job.committed_ticks = Ticks();
    job.committed = timeline_.on() ? Now() : TimePoint();
    if (job.committed != TimePoint()) timeline_.AddCommits(batch, job.committed);
    job.members = sets_.Apply(batch);
    for (const auto& entry : batch.entries) {
      std::shared_ptr<Operation> operation = tickets_.Take(entry.ticket);
      if (!operation && NeedsMine(entry, *job.members)) {
        // Given up by Goodbye while rank 0 was committing it: the others must not wait for, or add up, what never
        // comes.
        Result left(Code::kShutdown, std::string(Info(entry.definition->op).name) + " '" + entry.definition->name +
                                         "': " + topology_.Describe(topology_.rank) + " has shut down");
        executor_->Abort(left);  // before it could run the batch without this rank's data
        negotiator_->Abort(left);
      }
      job.operations.push_back(std::move(operation));
    }
    std::swap(job.batch, batch);
    executor_->Push(&job, wake_executor);
  }

  // Whether others count on this rank's data for the entry.
  bool NeedsMine(const AgreedEntry& entry, const std::vector<int>& members) const {
    auto holds = [this](const std::vector<int>& ranks) {
      return std::find(ranks.begin(), ranks.end(), topology_.rank) != ranks.end();
    };
    return entry.error.ok() && Info(entry.definition->op).tensors && holds(members) && !holds(entry.joined);
  }

  // Leaving: let running batches finish, say goodbye, give neighbours a moment to hear it.
  bool DoneLeaving() {
    TimePoint now = Now();
    if (!aborted_ && !said_goodbye_) {
      if (failure_deadline_ != Deadline::max()) return false;  // an abort is due
      bool idle = executor_->WaitIdle(now);
      if (!idle && now < leave_deadline_) {
        executor_->WaitIdle(now + std::chrono::milliseconds(2));
        return false;
      }
      said_goodbye_ = true;
      negotiator_->Goodbye(now);
      HandOut(/*wake_executor=*/true);
      leave_deadline_ = now + FromSeconds(kGoodbyeSeconds);
      (void)mailbox_->Flush(leave_deadline_);
    }
    if (aborted_) {
      (void)mailbox_->Flush(now + FromSeconds(kGoodbyeSeconds));
      return true;
    }
    return negotiator_->goodbye_complete() || now >= leave_deadline_;
  }

  EngineConfig config_;
  const Topology topology_;
  const Log log_;
  const TickScale tick_scale_;
  ExecutionCounters counters_;
  Timeline timeline_;
  std::unique_ptr<Mailbox> mailbox_;

  // The right to drive the engine: guards all of this block and the mailbox (Ring and Wait aside).
  mutable std::mutex driver_;
  std::unique_ptr<Negotiator> negotiator_;
  KnownRequests known_requests_;
  Tickets tickets_;
  // Of the last round; the next one uses their memory.
  Inbox::Taken taken_;
  Mailbox::Event event_;
  Actions actions_;
  Job job_;                                                           // the next one
  std::vector<std::pair<std::shared_ptr<Operation>, Result>> ended_;  // to be told at the end of the turn
  bool aborted_ = false;
  Result failure_;
  Deadline failure_deadline_ = Deadline::max();
  bool leaving_ = false;
  bool said_goodbye_ = false;
  Deadline leave_deadline_ = Deadline::max();

  std::atomic<Duration::rep> last_driven_{0};  // by a user's thread
  std::atomic<bool> asleep_{false};
  Inbox inbox_;
  LiveSets sets_;

  Waiters waiters_;

  std::optional<Executor> executor_;
  std::mutex shutdown_mutex_;  // one Shutdown at a time
  std::thread control_;        // last: starts when all else is ready
};

}  // namespace

std::unique_ptr<Engine> Engine::Create(EngineConfig config) { return std::make_unique<EngineImpl>(std::move(config)); }

}  // namespace ronde
