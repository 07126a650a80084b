#include "engine/timeline_format.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>

#include "negotiation/ledger.h"

namespace ronde {
namespace {

constexpr int kExecutionLane = 1, kCycleLane = 2, kFirstWaitingLane = 100;
// Threads beyond these get no lane, and what they wait for is left out: programs that make a thread per step.
constexpr std::size_t kMostWaitingLanes = 1000;

std::int64_t Nanoseconds(Duration d) {
  return std::max<std::int64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(d).count(), 0);
}

// A number, and a time in nanoseconds as microseconds, exactly. By hand: most of a timeline is numbers.
void AppendNumber(std::int64_t value, std::string* out) {
  char text[24];
  out->append(text, std::to_chars(text, text + sizeof text, value).ptr);
}
void AppendMicros(std::int64_t nanoseconds, std::string* out) {
  AppendNumber(nanoseconds / 1000, out);
  const auto rest = static_cast<int>(nanoseconds % 1000);
  const char digits[] = {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                         static_cast<char>('0' + rest % 10)};
  out->append(digits, sizeof digits);
}
std::string Micros(TimePoint time) {
  std::string text;
  AppendMicros(Nanoseconds(time.time_since_epoch()), &text);
  return text;
}

// Length of the valid UTF-8 character at the front; 0: there is none.
std::size_t CharacterLength(std::string_view text) {
  auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned char second = byte(1);
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool surrogate = first == 0xed && second > 0x9f;
  const bool too_large = first == 0xf4 && second > 0x8f;
  return overlong || surrogate || too_large ? 0 : length;
}

bool IsPlain(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; });
}

void Escape(std::string_view text, std::string* out) {
  if (IsPlain(text)) {
    *out += text;
    return;
  }
  while (!text.empty()) {
    const std::size_t length = CharacterLength(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (length == 0) {
      *out += "\\ufffd";
    } else if (first == '"' || first == '\\') {
      *out += '\\';
      *out += text[0];
    } else if (first < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", first);
      *out += code;
    } else {
      *out += text.substr(0, length);
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
}

std::string NameOf(const TimelineEvent& event) {
  const Definition& definition = *event.definition;
  std::string_view name = definition.name;
  if (event.kind == TimelineEvent::Kind::kTensor && event.tensor < definition.tensors.size()) {
    name = definition.tensors[event.tensor].name;
  }
  if (!name.empty()) return JsonText(name);
  std::string unnamed = std::string(Info(definition.op).name) + " #" + std::to_string(event.number);
  return event.tensor > 0 ? unnamed + "." + std::to_string(event.tensor) : unnamed;
}

std::string Number(std::string_view key, std::int64_t value) {
  std::string text = "\"";
  text += key;
  text += "\":";
  AppendNumber(value, &text);
  return text;
}
std::string OpArgs(const TimelineEvent& event) {
  std::string text = "\"op\":\"";
  text += Info(event.definition->op).name;
  text += "\",\"batch\":";
  AppendNumber(static_cast<std::int64_t>(event.batch), &text);
  if (event.failed) text += ",\"failed\":true";
  return text;
}

}  // namespace

std::string JsonText(std::string_view bytes) {
  std::string out;
  if (bytes.size() <= kLongestText) {
    Escape(bytes, &out);
  } else {  // the ends tell names apart better than the middle
    auto continues = [&](std::size_t i) { return (static_cast<unsigned char>(bytes[i]) & 0xc0) == 0x80; };
    std::size_t head = kLongestText * 3 / 4, tail = bytes.size() - kLongestText / 8;
    for (int i = 0; i < 3 && continues(head); ++i) --head;
    for (int i = 0; i < 3 && tail < bytes.size() && continues(tail); ++i) ++tail;
    Escape(bytes.substr(0, head), &out);
    out += "...";
    Escape(bytes.substr(tail), &out);
  }
  return out;
}

TimelineFormat::TimelineFormat(int rank, int size, std::string host, Line line)
    : rank_(rank), size_(size), host_(JsonText(host)), line_(std::move(line)), last_(Now()) {}

void TimelineFormat::Begin(bool mark_cycles) {
  using std::chrono::nanoseconds;
  const auto monotonic = Now().time_since_epoch();
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  const auto offset =
      std::chrono::duration_cast<nanoseconds>(wall) - std::chrono::duration_cast<nanoseconds>(monotonic);
  Process("process_name", "\"name\":\"rank " + std::to_string(rank_) + " (" + host_ + ")\"");
  Process("process_sort_index", Number("sort_index", rank_));
  Process("ronde", Number("format", 1) + "," + Number("rank", rank_) + "," + Number("size", size_) + ",\"host\":\"" +
                       host_ + "\",\"start\":" + Micros(last_) +
                       ",\"wall_minus_trace_us\":" + Micros(TimePoint(offset)));
  Lane(kExecutionLane, "execution");
  if (mark_cycles) Lane(kCycleLane, "cycles");
}

void TimelineFormat::Write(const TimelineEvent& event) {
  last_ = std::max({last_, event.start, event.end});
  switch (event.kind) {
    case TimelineEvent::Kind::kReady: return Ready(event);
    case TimelineEvent::Kind::kCommit: return Commit(event);
    case TimelineEvent::Kind::kTensor: return Tensor(event);
    case TimelineEvent::Kind::kList: return List(event);
    case TimelineEvent::Kind::kBatch:
      return Complete(kExecutionLane, "batch", "batch " + std::to_string(event.batch), event.start, event.end,
                      Number("operations", static_cast<std::int64_t>(event.count)));
    case TimelineEvent::Kind::kWait: return Wait(event);
    case TimelineEvent::Kind::kCycle: return Instant(kCycleLane, "cycle", "cycle", event.start, 't');
  }
}

void TimelineFormat::Lost(std::int64_t count) {
  CloseOpen("unknown: events were lost");
  Instant(kExecutionLane, "lost", std::to_string(count) + " events lost", last_, 'p');
}

void TimelineFormat::End(std::int64_t dropped, bool cut) {
  if (!cut) last_ = std::max(last_, Now());
  CloseOpen("open when the timeline ended");
  Process("ronde_end",
          Number("dropped", dropped) + ",\"cut\":" + (cut ? "true" : "false") + ",\"end\":" + Micros(last_));
}

void TimelineFormat::CloseOpen(const char* why) {
  for (const auto& [id, open] : open_) {
    Async('e', "negotiate", id, open.name, last_, "\"end\":\"" + std::string(why) + "\"");
  }
  open_.clear();
  open_bytes_ = 0;
}

void TimelineFormat::Process(const char* name, const std::string& args) {
  line_("{\"name\":\"" + std::string(name) + "\",\"ph\":\"M\",\"pid\":" + std::to_string(rank_) +
        ",\"tid\":0,\"args\":{" + args + "}}");
}

void TimelineFormat::Lane(int tid, std::string_view name) {
  line_("{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(tid) +
        ",\"args\":{\"name\":\"" + std::string(name) + "\"}}");
}

void TimelineFormat::Open(std::string_view name, std::string_view category, char phase, TimePoint time) {
  text_ = "{\"name\":\"";
  text_ += name;
  text_ += "\",\"cat\":\"";
  text_ += category;
  text_ += "\",\"ph\":\"";
  text_ += phase;
  text_ += "\",\"ts\":";
  AppendMicros(Nanoseconds(time.time_since_epoch()), &text_);
}

void TimelineFormat::Close(int tid, std::string_view args) {
  text_ += ",\"pid\":";
  AppendNumber(rank_, &text_);
  text_ += ",\"tid\":";
  AppendNumber(tid, &text_);
  if (!args.empty()) {
    text_ += ",\"args\":{";
    text_ += args;
    text_ += '}';
  }
  text_ += '}';
  line_(text_);
}

void TimelineFormat::Async(char phase, std::string_view category, std::uint64_t id, std::string_view name,
                           TimePoint time, std::string_view args) {
  Open(name, category, phase, time);
  char hex[20];
  text_ += ",\"id\":\"0x";
  text_.append(hex, std::to_chars(hex, hex + sizeof hex, id, 16).ptr);
  text_ += '"';
  Close(kExecutionLane, args);
}

void TimelineFormat::Complete(int tid, std::string_view category, std::string_view name, TimePoint start, TimePoint end,
                              std::string_view args) {
  Open(name, category, 'X', start);
  text_ += ",\"dur\":";
  AppendMicros(Nanoseconds(end - start), &text_);
  Close(tid, args);
}

void TimelineFormat::Instant(int tid, std::string_view category, std::string_view name, TimePoint time, char scope) {
  Open(name, category, 'i', time);
  text_ += ",\"s\":\"";
  text_ += scope;
  text_ += '"';
  Close(tid, "");
}

void TimelineFormat::Ready(const TimelineEvent& event) {
  const std::uint64_t id = std::hash<std::string>()(KeyOf(*event.definition, event.number));
  auto [open, added] = open_.try_emplace(id);
  if (added) {
    open->second = {NameOf(event), event.start};
    open_bytes_ += BytesToClose(open->second.name);
    Async('b', "negotiate", id, open->second.name, event.start,
          "\"op\":\"" + std::string(Info(event.definition->op).name) + "\"");
  }
  Async('n', "negotiate", id, "ready: rank " + std::to_string(event.rank), std::max(event.start, open->second.start),
        Number("rank", event.rank));
}

void TimelineFormat::Commit(const TimelineEvent& event) {
  auto open = open_.find(std::hash<std::string>()(KeyOf(*event.definition, event.number)));
  if (open == open_.end()) return;  // of before the timeline, or a join
  Async('e', "negotiate", open->first, open->second.name, event.start, OpArgs(event));
  open_bytes_ -= BytesToClose(open->second.name);
  open_.erase(open);
}

void TimelineFormat::Tensor(const TimelineEvent& event) {
  const std::string name = NameOf(event);
  const std::uint64_t id = ++last_id_;
  Async('b', "queue", id, name, event.committed, "");
  Async('e', "queue", id, name, event.start, "");
  Async('b', "run", id, name, event.start, OpArgs(event) + "," + Number("bytes", event.bytes));
  Async('e', "run", id, name, event.end, "");
}

void TimelineFormat::List(const TimelineEvent& event) {
  std::string name(Info(event.definition->op).name);
  if (event.count > 1) name += " x" + std::to_string(event.count);
  Complete(kExecutionLane, "list", name, event.start, event.end,
           OpArgs(event) + "," + Number("tensors", static_cast<std::int64_t>(event.count)) + "," +
               Number("bytes", event.bytes));
  TimePoint at = event.start;
  for (std::size_t p = 0; p < kPhases; ++p) {
    if (event.phases[p] <= Duration::zero()) continue;
    TimePoint end = std::min(at + event.phases[p], event.end);
    Complete(kExecutionLane, "phase", kPhaseNames[p], at, end, "");
    at = end;
  }
}

void TimelineFormat::Wait(const TimelineEvent& event) {
  auto lane = waiting_lanes_.find(event.thread);
  if (lane == waiting_lanes_.end()) {
    if (waiting_lanes_.size() >= kMostWaitingLanes) return;
    const int tid = kFirstWaitingLane + static_cast<int>(waiting_lanes_.size());
    lane = waiting_lanes_.emplace(event.thread, tid).first;
    Lane(tid, "waiting (thread " + std::to_string(event.thread) + ")");
  }
  Complete(lane->second, "wait", JsonText(event.text), event.start, event.end, "");
}

}  // namespace ronde
