// A file that holds a JSON array of events and can be read as one at any time, also after the process was killed while
// it wrote.
//
// A killed process may leave a write half done, but only between two pages: within one page of the file a write takes
// place as a whole. So the closing bracket stands well behind the last event, with spaces in between, and events are
// written over the spaces, each write within one page and each event whole. What remains is that the bracket moves on
// now and then, further each time, by two writes of one byte, and that Close cuts the spaces off and sets a new one:
// only a process killed right between two such calls leaves a bracket too many, or none.
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

  TraceFile() = default;
  TraceFile(const TraceFile&) = delete;
  ~TraceFile() { Close(); }

  // Makes the file, or empties it. It never becomes larger than max_bytes. An error names the path.
  Result Open(const std::string& path, std::uint64_t max_bytes);
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
  Result MoveBracket(std::uint64_t least);

  std::string path_;
  int descriptor_ = -1;
  std::uint64_t max_bytes_ = 0;
  std::uint64_t bracket_ = 0;  // where the closing bracket stands
  std::uint64_t end_ = 0;      // of the last event
  std::string pending_;        // ends at end_; all in one page
  bool empty_ = true;
  Result failure_;
};

}  // namespace ronde
