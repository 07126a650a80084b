// The timeline of one engine: takes events from the threads that drive and run it and writes them to a file.
//
// While none is open, asking whether one is (on()) is all it costs. While one is, events wait in memory for the writer
// thread, which exists only then; when it does not keep up, events are dropped and counted, and nobody waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/result.h"
#include "engine/timeline_format.h"
#include "engine/trace_file.h"
#include "negotiation/negotiator.h"

namespace ronde {

// "t.json" for rank 3: "t.rank3.json".
std::string TimelinePath(const std::string& path, int rank);

class Timeline {
 public:
  static constexpr std::size_t kMaxWaiting = 1 << 16;  // some 15 MB
  struct Config {
    int rank = 0;
    int size = 1;
    std::string host;
    std::uint64_t max_bytes = 0;            // of the file
    std::size_t max_waiting = kMaxWaiting;  // events in memory
    Log log;
  };

  explicit Timeline(Config config) : config_(std::move(config)) {}
  Timeline(const Timeline&) = delete;
  ~Timeline() { Stop(); }

  // Any thread. An error, with no effect, when one is open already or the file cannot be written.
  Result Start(const std::string& path, bool mark_cycles);
  // Any thread: writes what was taken so far and closes the file. Nothing happens when none is open.
  void Stop();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool marks_cycles() const { return marks_cycles_.load(std::memory_order_relaxed); }

  // Any thread.
  void Add(TimelineEvent event);
  void Add(std::vector<TimelineEvent> events);
  void AddReady(const std::vector<Readiness>& ready);
  void AddCommits(const Batch& batch, TimePoint time);
  void AddWait(std::string what, TimePoint start);  // of the calling thread, until now
  void AddCycle(TimePoint time);

 private:
  void Push(TimelineEvent&& event);  // mutex_ is held
  void Main();
  void Write(const std::vector<TimelineEvent>& events, std::int64_t dropped);
  void WriteLine(std::string_view line);

  const Config config_;
  std::atomic<bool> on_{false};
  std::atomic<bool> marks_cycles_{false};

  std::mutex control_mutex_;  // one Start or Stop at a time; guards path_ and writer_
  std::string path_;
  std::thread writer_;

  std::mutex mutex_;  // guards waiting_, dropped_, stop_
  std::condition_variable changed_;
  std::vector<TimelineEvent> waiting_;
  std::int64_t dropped_ = 0;
  bool stop_ = false;

  // Owned by the writer thread; by Start and Stop while there is none.
  TraceFile file_;
  std::unique_ptr<TimelineFormat> format_;
  std::int64_t all_dropped_ = 0;
  bool cut_ = false;     // the file is full: what comes is dropped
  bool broken_ = false;  // it cannot be written
};

}  // namespace ronde
