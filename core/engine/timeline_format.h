// What a timeline's events look like in the file: Chrome's Trace Event Format.
//
// A rank is a process of the trace. In it:
//   execution      a lane of complete events: batches, in them fused lists, in these the phases. A list's phases are
//                  totals: the pieces of a pipeline are summed up and drawn one after the other.
//   negotiation    asynchronous events, one per operation, from the first rank that this one heard to be ready (itself,
//                  or ranks below it in the tree) to the commit, with a mark for every rank.
//   tensors        asynchronous events: how long a tensor queued and ran.
//   waiting        a lane per thread of the program: complete events while it waits in ronde.
//   cycles         marks, if asked for: a round of the control thread in which something moved.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"
#include "collectives/phases.h"
#include "wire/definition.h"

namespace ronde {

// What happened, as whoever saw it hands it over: cheap to make. Which fields count is said at each kind.
struct TimelineEvent {
  enum class Kind : std::uint8_t {
    kReady,   // definition, number, rank, start
    kCommit,  // definition, number, start, batch, failed
    kTensor,  // definition, number, tensor, committed, start, end, batch, bytes, failed
    kList,    // definition (of its first tensor), start, end, batch, count (tensors), bytes, phases, failed
    kBatch,   // start, end, batch, count (operations)
    kWait,    // text, thread, start, end
    kCycle,   // start
  };
  Kind kind = Kind::kCycle;
  bool failed = false;
  int rank = 0;
  pid_t thread = 0;
  std::shared_ptr<const Definition> definition;
  std::uint64_t number = 0;  // of an unnamed operation
  std::uint64_t batch = 0;
  std::size_t tensor = 0;
  std::size_t count = 0;
  std::int64_t bytes = 0;
  TimePoint committed, start, end;
  std::array<Duration, kPhases> phases{};
  std::string text;
};

// Any bytes as the inside of a JSON string: valid UTF-8 is kept, other bytes become U+FFFD, a long text loses its
// middle. At most 6 bytes for each of kLongestText.
constexpr std::size_t kLongestText = 512;
std::string JsonText(std::string_view bytes);

class TimelineFormat {
 public:
  using Line = std::function<void(std::string_view event)>;  // takes one JSON object

  TimelineFormat(int rank, int size, std::string host, Line line);

  void Begin(bool mark_cycles);
  void Write(const TimelineEvent& event);
  // Events were lost, so what is still open may never be heard of again.
  void Lost(std::int64_t count);
  // Closes what is open. `cut`: the file was full.
  void End(std::int64_t dropped, bool cut);
  // Bytes of the file that End may need, spaces at the ends of pages included.
  std::uint64_t reserve() const { return 4096 + 2 * open_bytes_; }

 private:
  void Process(const char* name, const std::string& args);
  void Lane(int tid, std::string_view name);
  // One event in text_: Open, what its kind adds, Close. Names are escaped, args the inside of an object.
  void Open(std::string_view name, std::string_view category, char phase, TimePoint time);
  void Close(int tid, std::string_view args);
  void Async(char phase, std::string_view category, std::uint64_t id, std::string_view name, TimePoint time,
             std::string_view args);
  void Complete(int tid, std::string_view category, std::string_view name, TimePoint start, TimePoint end,
                std::string_view args);
  void Instant(int tid, std::string_view category, std::string_view name, TimePoint time, char scope);
  void Ready(const TimelineEvent& event);
  void Commit(const TimelineEvent& event);
  void Tensor(const TimelineEvent& event);
  void List(const TimelineEvent& event);
  void Wait(const TimelineEvent& event);
  void CloseOpen(const char* why);
  static std::uint64_t BytesToClose(const std::string& name) { return name.size() + 256; }

  const int rank_, size_;
  const std::string host_;
  const Line line_;
  struct Negotiation {
    std::string name;  // escaped
    TimePoint start;
  };
  std::unordered_map<std::uint64_t, Negotiation> open_;  // by id
  std::unordered_map<pid_t, int> waiting_lanes_;         // tid by thread
  std::uint64_t open_bytes_ = 0;                         // that closing them takes
  std::uint64_t last_id_ = 0;                            // of tensors' events
  std::string text_;                                     // kept for its memory
  TimePoint last_;                                       // the latest time written
};

}  // namespace ronde
