#include "engine/executor.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "negotiation/agreement.h"

namespace ronde {
namespace {

// Before it sleeps the thread yields about as long as a round of negotiation takes, for the next job of a busy loop.
constexpr int kYields = 60;

const DTypeInfo& ElementOf(const Definition& definition, std::size_t tensor) {
  return Info(definition.tensors[tensor].dtype);
}

std::int64_t Sum(const std::vector<std::int64_t>& values) {
  std::int64_t sum = 0;
  for (auto v : values) sum += v;
  return sum;
}

// Shape of this member's result.
Shape OutputShape(Op op, const FusedTensor& tensor, int member, std::size_t members) {
  Shape shape = tensor.shape;
  switch (op) {
    case Op::kAllgather: shape[0] = Sum(tensor.rows); break;
    case Op::kAlltoall: {
      shape[0] = 0;
      for (std::size_t source = 0; source < members; ++source) shape[0] += tensor.rows[source * members + member];
      break;
    }
    case Op::kReducescatter: {
      auto count = static_cast<std::int64_t>(members);
      shape[0] = shape[0] / count + (member < shape[0] % count ? 1 : 0);
      break;
    }
    default: break;
  }
  return shape;
}

TimelineEvent BatchEvent(const Job& job, TimePoint start) {
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kBatch;
  event.batch = job.batch.number;
  event.count = job.batch.entries.size();
  event.start = start;
  event.end = Now();
  return event;
}

}  // namespace

Executor::Executor(Config config)
    : config_(std::move(config)), next_chunk_(config_.first_chunk), thread_([this] { Main(); }) {}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Executor::Push(Job* job, bool wake) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(*job));
  *job = Job{};
  if (!spare_.empty()) {
    *job = std::move(spare_.back());
    spare_.pop_back();
  }
  pending_.fetch_add(1, std::memory_order_release);
  if (sleeping_ && wake) changed_.notify_all();
}

void Executor::Take(Job* job) {
  *job = std::move(queue_.front());
  queue_.pop_front();
  pending_.fetch_sub(1, std::memory_order_relaxed);
  running_ = true;
}

void Executor::Finish(Job* job) {
  job->batch.entries.clear();
  job->operations.clear();
  job->members = nullptr;
  std::lock_guard lock(mutex_);
  spare_.push_back(std::move(*job));
  running_ = false;
  // WaitIdle; or the thread, if a user's thread ran this job and more is queued. Else nobody needs to be woken.
  if (idle_waiters_ > 0 || !queue_.empty()) changed_.notify_all();
}

void Executor::TryRunOne() {
  if (pending_.load(std::memory_order_acquire) == 0) return;
  Job job;
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty() || running_) return;
    Take(&job);
  }
  Run(job);
  Finish(&job);
}

void Executor::Abort(const Result& cause) {
  {
    std::lock_guard lock(mutex_);
    if (abort_.ok()) abort_ = cause;
    changed_.notify_all();  // who waits for a better cause than its own
  }
  for (auto& backend : *config_.backends) backend->Abort(cause);
}

bool Executor::WaitIdle(Deadline deadline) {
  std::unique_lock lock(mutex_);
  ++idle_waiters_;
  bool idle = changed_.wait_until(lock, deadline, [this] { return queue_.empty() && !running_; });
  --idle_waiters_;
  return idle;
}

Result Executor::abort_cause() {
  std::lock_guard lock(mutex_);
  return abort_;
}

void Executor::Main() {
  Job job;
  while (Pop(&job)) {
    Run(job);
    Finish(&job);
  }
}

bool Executor::Pop(Job* job) {
  for (int i = 0; i < kYields && pending_.load(std::memory_order_acquire) == 0; ++i) sched_yield();
  std::unique_lock lock(mutex_);
  sleeping_ = true;
  // Idle; Push, Finish and the destructor wake it.
  changed_.wait(lock, [this] { return !running_ && (stop_ || !queue_.empty()); });
  sleeping_ = false;
  if (queue_.empty()) return false;
  Take(job);
  return true;
}

void Executor::Run(Job& job) {
  const auto& entries = job.batch.entries;
  ExecutionCounters& counters = *config_.counters;
  const TimePoint start = config_.timeline->on() ? Now() : TimePoint();
  const bool mine = std::binary_search(job.members->begin(), job.members->end(), config_.rank);
  if (mine) counters.batches.Add(1);
  Plan plan = PlanFusion(job.batch, config_.limits, job.members->size());
  open_tensors_.assign(entries.size(), 0);
  starved_.assign(entries.size(), false);
  for (const auto& list : plan) {
    for (const auto& planned : list) ++open_tensors_[planned.entry];
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    if (auto& operation = job.operations[i]) {
      counters.by_op[static_cast<std::size_t>(entry.definition->op)].operations.Add(1);
      counters.negotiate.Add(job.committed_ticks - operation->submitted_ticks);
      operation->outputs.resize(operation->request().tensors.size());
      if (entry.definition->op == Op::kJoin) operation->value = entry.last_joined;
      if (entry.definition->op == Op::kAddProcessSet) {
        operation->value = entry.new_set;
        operation->flag = entry.existed;
      }
    }
    if (open_tensors_[i] == 0) End(job, i, entry.error);
  }
  for (const auto& list : plan) RunList(job, list);
  scratch_.clear();
  if (mine && start != TimePoint()) config_.timeline->Add(BatchEvent(job, start));
  if (!job.members->empty() && job.members->front() == config_.rank) {
    config_.finished(job.batch.set, job.batch.number);
  }
}

void Executor::RunList(Job& job, const std::vector<PlannedTensor>& list) {
  const AgreedEntry& first = job.batch.entries[list.front().entry];
  const Definition& definition = *first.definition;
  const auto& members = *job.members;
  auto here = std::find(members.begin(), members.end(), config_.rank);
  int member = here == members.end() ? -1 : static_cast<int>(here - members.begin());

  FusedOperation& fused = fused_;
  fused.op = definition.op;
  fused.dtype = definition.tensors[list.front().tensor].dtype;
  fused.reduction = definition.reduction;
  fused.prescale = definition.prescale;
  fused.postscale = definition.postscale;
  fused.device = definition.device;
  fused.root = definition.root;
  fused.members = members;
  fused.joined.resize(members.size());
  for (std::size_t m = 0; m < members.size(); ++m) {
    fused.joined[m] = std::find(first.joined.begin(), first.joined.end(), members[m]) != first.joined.end();
  }
  const std::int64_t start_ticks = Ticks();
  const TimePoint start = config_.timeline->on() ? Now() : TimePoint();
  PhaseTimes phases;
  phases.Start(start_ticks);
  fused.phases = &phases;
  fused.tensors.resize(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) Prepare(job, list[i], member, &fused.tensors[i]);

  Backend* backend = nullptr;
  for (auto& candidate : *config_.backends) {
    if (candidate->Supports(fused.op, fused.dtype, fused.device)) {
      backend = candidate.get();
      break;
    }
  }
  Result result;
  if (backend == nullptr) {  // Submit checks its own rank's; a set's members have the same backends
    result = Result(Code::kInternal, "no backend runs " + std::string(Info(fused.op).name) + " of " +
                                         std::string(Info(fused.dtype).name));
    config_.failed(result);
  } else {
    fused.first_chunk = next_chunk_;
    next_chunk_ += backend->Chunks(fused);
    result = abort_cause();
    if (result.ok() && member >= 0) {
      // Backends that run on a device may end later; this thread waits, so that jobs end in order.
      std::mutex mutex;
      std::condition_variable ended;
      bool done = false;
      backend->Run(fused, [&](Result end) {
        std::lock_guard lock(mutex);
        result = std::move(end);
        done = true;
        ended.notify_all();
      });
      std::unique_lock lock(mutex);
      ended.wait(lock, [&] { return done; });  // limited by Backend::Abort, after which `done` fires
    }
    if (!result.ok()) {
      if (result.code() == Code::kTimeout) {
        result = Result(Code::kStall, Describe(definition) + " was agreed, but " + result.message());
      }
      if (Result cause = abort_cause(); !cause.ok()) {
        result = cause;
      } else {
        config_.failed(result);
        // The control thread may know the reason better (which process died, by which signal): its abort is what
        // everybody's errors say.
        std::unique_lock lock(mutex_);
        changed_.wait_until(lock, After(2), [this] { return !abort_.ok(); });
        if (!abort_.ok()) result = abort_;
      }
    }
  }
  if (member >= 0) Record(job, list, fused, start_ticks, start, phases, !result.ok());
  for (const auto& planned : list) {
    if (!result.ok()) {
      // One failed tensor fails its whole entry; its other tensors still count down.
      if (open_tensors_[planned.entry] > 0) {
        open_tensors_[planned.entry] = 0;
        End(job, planned.entry, result);
      }
    } else if (open_tensors_[planned.entry] > 0 && --open_tensors_[planned.entry] == 0) {
      End(job, planned.entry, Ok());
    }
  }
}

void Executor::Prepare(Job& job, const PlannedTensor& planned, int member, FusedTensor* prepared) {
  const AgreedEntry& entry = job.batch.entries[planned.entry];
  const Definition& definition = *entry.definition;
  const std::size_t members = job.members->size();
  const OpInfo& op = Info(definition.op);
  FusedTensor& tensor = *prepared;
  tensor.input = nullptr;
  tensor.output = nullptr;
  tensor.rows.clear();
  tensor.shape = definition.tensors[planned.tensor].shape;
  if (definition.op == Op::kAllgather) {
    for (const auto& values : entry.values) tensor.rows.push_back(values[planned.tensor]);
  } else if (op.splits) {
    for (const auto& values : entry.values) {
      auto begin = values.begin() + static_cast<std::ptrdiff_t>(planned.tensor * members);
      tensor.rows.insert(tensor.rows.end(), begin, begin + static_cast<std::ptrdiff_t>(members));
    }
  }
  if (member < 0) return;
  if (definition.op == Op::kAllgather) {
    tensor.shape[0] = tensor.rows[member];
  } else if (op.splits) {
    for (std::size_t d = 0; d < members; ++d) tensor.shape[0] += tensor.rows[member * members + d];
  }

  auto& operation = job.operations[planned.entry];
  if (!operation) return;  // joined: no memory, the neutral element
  const TensorRequest& request = operation->request().tensors[planned.tensor];
  Operation::Output& output = operation->outputs[planned.tensor];
  output.shape = OutputShape(definition.op, tensor, member, members);
  if (op.splits) {
    for (std::size_t s = 0; s < members; ++s) output.received_splits.push_back(tensor.rows[s * members + member]);
  }
  std::size_t bytes = static_cast<std::size_t>(NumElements(output.shape)) * ElementOf(definition, planned.tensor).size;
  output.data = request.output;
  if (output.data == nullptr && operation->request().allocate) {
    output.data = operation->request().allocate(static_cast<std::uint32_t>(planned.tensor), output.shape);
    if (output.data == nullptr && bytes > 0) {
      // The others run it, so this rank takes part with memory of its own; its user gets the error.
      starved_[planned.entry] = true;
      scratch_.emplace_back(new std::byte[bytes]);
      output.data = scratch_.back().get();
    }
  } else if (output.data == nullptr) {
    output.owned.reset(new std::byte[std::max<std::size_t>(bytes, 1)]);
    output.data = output.owned.get();
  }
  tensor.input = request.input;
  tensor.output = output.data;
}

void Executor::Record(const Job& job, const std::vector<PlannedTensor>& list, const FusedOperation& fused,
                      std::int64_t start_ticks, TimePoint start, const PhaseTimes& phases, bool failed) {
  const std::int64_t run = Ticks() - start_ticks;
  ExecutionCounters& counters = *config_.counters;
  auto& op = counters.by_op[static_cast<std::size_t>(fused.op)];
  const std::size_t element = Info(fused.dtype).size;
  auto bytes_of = [&](std::size_t i) {
    return fused.tensors[i].input == nullptr ? 0
                                             : NumElements(fused.tensors[i].shape) * static_cast<std::int64_t>(element);
  };
  std::int64_t bytes = 0, first_tensors = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    bytes += bytes_of(i);
    first_tensors += list[i].tensor == 0;
  }
  op.lists.Add(1);
  op.tensors.Add(static_cast<std::int64_t>(list.size()));
  op.bytes.Add(bytes);
  op.lent.Add(phases.lent());
  counters.queue.Add((start_ticks - job.committed_ticks) * first_tensors);
  counters.run.Add(run);
  for (std::size_t p = 0; p < kPhases; ++p) counters.phases[p].Add(phases.ticks()[p]);
  if (start == TimePoint()) return;

  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kList;
  event.failed = failed;
  event.definition = job.batch.entries[list.front().entry].definition;
  event.batch = job.batch.number;
  event.count = list.size();
  event.bytes = bytes;
  event.start = start;
  event.end = Now();
  // Both clocks saw the whole list, so each list has a scale of its own.
  const double scale = run > 0 ? static_cast<double>((event.end - event.start).count()) / static_cast<double>(run) : 0;
  for (std::size_t p = 0; p < kPhases; ++p) {
    event.phases[p] = Duration(static_cast<Duration::rep>(static_cast<double>(phases.ticks()[p]) * scale));
  }
  std::vector<TimelineEvent> events{std::move(event)};
  events.reserve(list.size() + 1);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const AgreedEntry& entry = job.batch.entries[list[i].entry];
    TimelineEvent tensor;
    tensor.kind = TimelineEvent::Kind::kTensor;
    tensor.failed = failed;
    tensor.definition = entry.definition;
    tensor.number = entry.number;
    tensor.tensor = list[i].tensor;
    tensor.batch = job.batch.number;
    tensor.bytes = bytes_of(i);
    tensor.committed = job.committed == TimePoint() ? start : job.committed;
    tensor.start = start;
    tensor.end = events.front().end;
    events.push_back(std::move(tensor));
  }
  config_.timeline->Add(std::move(events));
}

void Executor::End(Job& job, std::size_t entry, const Result& result) {
  auto operation = std::move(job.operations[entry]);
  if (!operation) return;
  if (!result.ok()) config_.counters->failed.Add(1);
  if (result.ok() && starved_[entry]) {
    operation->Complete(Result(Code::kArgument, std::string(Info(operation->request().op).name) + " '" +
                                                    operation->request().name +
                                                    "': no memory was given for an output"));
    return;
  }
  operation->Complete(result);
}

}  // namespace ronde
