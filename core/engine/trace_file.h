// A file that holds a JSON array of events and is whole, as JSON, at every instant, so also after SIGKILL at any time.
//
// A killed process may leave a write half done, but only between two pages: within one page of the file a write takes
// place as a whole. So the closing bracket stands well behind the last event, with spaces in between, and events are
// written over the spaces, each write within one page and each event whole.
//
// When the spaces are used up the bracket has to move on to another page, and no order of writes does that: behind a
// closing bracket nothing but spaces is valid, and without it nothing at all. So a copy with two or four times the room
// is made beside the file and renamed to it; making the file and cutting off the spaces at the end are such renames,
// too. With such sizes an event is copied once at most, on average. A process killed while it copies leaves "PATH.part"
// behind, which the next one that writes to the path removes.
//
// Where a file cannot be renamed to the path (its folder is read-only, the path is a mount point or a device, no room
// for two files) the bracket moves in place, by two writes of one byte: a process killed right between the two leaves a
// bracket too many. The spaces then stay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace ronde {

class TraceFile {
 public:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kLongestEvent = kPage - 2;  // with a comma and a line break before it
  static constexpr std::uint64_t kFirstRoom = std::uint64_t{4} << 20;

  TraceFile() = default;
  TraceFile(const TraceFile&) = delete;
  ~TraceFile() { Close(); }

  // Makes the file, or replaces it, with room for about first_room bytes of events to begin with. It never becomes
  // larger than max_bytes. An error names the path.
  Result Open(const std::string& path, std::uint64_t max_bytes, std::uint64_t first_room = kFirstRoom);
  // Appends an event: a JSON object of at most kLongestEvent bytes. It is in the file after the next Flush at the
  // latest. After an error (no room) the file stays as it was and further events are refused with the same error.
  Result Add(std::string_view event);
  Result Flush();
  // Bytes up to the end of the last event.
  std::uint64_t size() const { return end_; }
  // Drops the spaces at the end.
  void Close();

 private:
  Result Write(std::string_view bytes, std::uint64_t offset);
  Result Grow(std::uint64_t least);
  bool Replace(std::uint64_t bracket);
  bool FillCopy(int copy, std::uint64_t bracket) const;
  Result MoveBracket(std::uint64_t next);
  Result Failure();  // of a system call

  std::string path_;
  std::string target_;  // path_, absolute and without links; empty: no file can be renamed to it
  int descriptor_ = -1;
  std::uint64_t max_bytes_ = 0;
  std::uint64_t bracket_ = 0;  // where the closing bracket stands
  std::uint64_t end_ = 0;      // of the last event
  std::string pending_;        // ends at end_; all in one page
  bool empty_ = true;
  Result failure_;
};

}  // namespace ronde
