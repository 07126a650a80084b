#include "engine/timeline.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <system_error>

namespace ronde {
namespace {
// The writer collects events for this long, so that it wakes up seldom and writes much at once.
constexpr auto kCollect = std::chrono::milliseconds(50);
// Where cores are short it writes while the program waits.
constexpr int kNiceness = 10;
}  // namespace

std::string TimelinePath(const std::string& path, int rank) {
  const std::size_t name = path.rfind('/') == std::string::npos ? 0 : path.rfind('/') + 1;
  std::size_t dot = path.rfind('.');
  if (dot == std::string::npos || dot <= name) dot = path.size();  // no extension, or a hidden file
  return path.substr(0, dot) + ".rank" + std::to_string(rank) + path.substr(dot);
}

Result Timeline::Start(const std::string& path, bool mark_cycles) {
  std::lock_guard control(control_mutex_);
  if (writer_.joinable()) {
    return Result(Code::kArgument, "a timeline is being written to " + path_ + " already: stop it first");
  }
  RONDE_RETURN_IF_ERROR(file_.Open(path, config_.max_bytes));
  path_ = path;
  format_ = std::make_unique<TimelineFormat>(config_.rank, config_.size, config_.host,
                                             [this](std::string_view line) { WriteLine(line); });
  all_dropped_ = 0;
  cut_ = broken_ = false;
  format_->Begin(mark_cycles);
  RONDE_RETURN_IF_ERROR(file_.Flush());
  {
    std::lock_guard lock(mutex_);
    waiting_.clear();
    dropped_ = 0;
    stop_ = false;
  }
  try {
    writer_ = std::thread([this] { Main(); });
  } catch (const std::system_error& error) {
    return Result(Code::kTransport, std::string("a thread cannot be started for the timeline: ") + error.what());
  }
  marks_cycles_.store(mark_cycles, std::memory_order_relaxed);
  on_.store(true, std::memory_order_relaxed);
  return Ok();
}

void Timeline::Stop() {
  std::lock_guard control(control_mutex_);
  if (!writer_.joinable()) return;
  on_.store(false, std::memory_order_relaxed);
  marks_cycles_.store(false, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  writer_.join();
  if (!cut_) format_->End(all_dropped_, false);
  file_.Close();
  format_.reset();
}

void Timeline::Add(TimelineEvent event) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = waiting_.empty();
    Push(std::move(event));
  }
  if (first) changed_.notify_one();
}

void Timeline::Add(std::vector<TimelineEvent> events) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = waiting_.empty();
    for (auto& event : events) Push(std::move(event));
  }
  if (first) changed_.notify_one();
}

void Timeline::AddReady(const std::vector<Readiness>& ready) {
  std::vector<TimelineEvent> events(ready.size());
  for (std::size_t i = 0; i < ready.size(); ++i) {
    events[i].kind = TimelineEvent::Kind::kReady;
    events[i].definition = ready[i].definition;
    events[i].number = ready[i].number;
    events[i].rank = ready[i].rank;
    events[i].start = ready[i].time;
  }
  Add(std::move(events));
}

void Timeline::AddCommits(const Batch& batch, TimePoint time) {
  std::vector<TimelineEvent> events(batch.entries.size());
  for (std::size_t i = 0; i < events.size(); ++i) {
    events[i].kind = TimelineEvent::Kind::kCommit;
    events[i].definition = batch.entries[i].definition;
    events[i].number = batch.entries[i].number;
    events[i].failed = !batch.entries[i].error.ok();
    events[i].batch = batch.number;
    events[i].start = time;
  }
  Add(std::move(events));
}

void Timeline::AddWait(std::string what, TimePoint start) {
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kWait;
  event.text = std::move(what);
  event.thread = gettid();
  event.start = start;
  event.end = Now();
  Add(std::move(event));
}

void Timeline::AddCycle(TimePoint time) {
  TimelineEvent event;
  event.start = time;
  Add(std::move(event));
}

void Timeline::Push(TimelineEvent&& event) {
  if (stop_) return;  // it was closed since the caller asked
  if (waiting_.size() >= config_.max_waiting) {
    ++dropped_;
  } else {
    waiting_.push_back(std::move(event));
  }
}

void Timeline::Main() {
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);  // on Linux of this thread alone
  std::vector<TimelineEvent> events;
  bool stop = false;
  while (!stop) {
    std::int64_t dropped = 0;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !waiting_.empty(); });  // idle; Add and Stop wake it
      changed_.wait_for(lock, kCollect, [this] { return stop_; });
      events.swap(waiting_);
      dropped = std::exchange(dropped_, 0);
      stop = stop_;
    }
    Write(events, dropped);
    events.clear();
  }
}

void Timeline::Write(const std::vector<TimelineEvent>& events, std::int64_t dropped) {
  for (const auto& event : events) {
    if (cut_ || broken_) break;
    // What one event can become, and what the end needs.
    if (file_.size() + 4 * TraceFile::kPage + format_->reserve() > config_.max_bytes) {
      cut_ = true;
      config_.log.Warning("the timeline " + path_ + " has reached RONDE_TIMELINE_MAX_BYTES (" +
                          std::to_string(config_.max_bytes) + ") and ends here");
      format_->End(all_dropped_, true);
      break;
    }
    format_->Write(event);
  }
  if (dropped > 0 && !cut_ && !broken_) {
    all_dropped_ += dropped;
    format_->Lost(dropped);
  }
  if (cut_ || broken_) on_.store(false, std::memory_order_relaxed);
  Result flushed = file_.Flush();
  if (!flushed.ok() && !broken_) {
    broken_ = true;
    config_.log.Warning(flushed.message());
  }
}

void Timeline::WriteLine(std::string_view line) {
  if (broken_) return;
  if (line.size() > TraceFile::kLongestEvent) {  // names are short enough, so this is none of ours
    ++all_dropped_;
    return;
  }
  if (Result added = file_.Add(line); !added.ok()) {
    broken_ = true;
    config_.log.Warning(added.message());
  }
}

}  // namespace ronde
