#include "engine/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ronde {
namespace {
// By how much the bracket moves on: as far as the file is long, within these limits.
constexpr std::uint64_t kLeastStride = std::uint64_t{1} << 20, kMostStride = std::uint64_t{16} << 20;
}  // namespace

Result TraceFile::Open(const std::string& path, std::uint64_t max_bytes) {
  Close();
  path_ = path;
  max_bytes_ = max_bytes;
  descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    return Result(Code::kArgument, "the timeline " + path + " cannot be written: " + std::strerror(errno));
  }
  failure_ = {};
  pending_.clear();
  empty_ = true;
  end_ = bracket_ = 1;
  return Write("[]", 0);
}

Result TraceFile::Add(std::string_view event) {
  if (!failure_.ok()) return failure_;
  if (event.size() > kLongestEvent) return Result(Code::kInternal, "an event of the timeline is too long");
  const std::size_t needed = event.size() + 2;
  if (end_ % kPage + needed > kPage) {  // spaces fill up the page
    RONDE_RETURN_IF_ERROR(Flush());
    end_ = (end_ / kPage + 1) * kPage;
  }
  if (end_ + needed > bracket_) {
    RONDE_RETURN_IF_ERROR(Flush());
    RONDE_RETURN_IF_ERROR(MoveBracket(end_ + needed));
  }
  pending_ += empty_ ? " \n" : ",\n";
  pending_ += event;
  empty_ = false;
  end_ += needed;
  return Ok();
}

Result TraceFile::Flush() {
  if (!failure_.ok() || pending_.empty()) return failure_;
  Result result = Write(pending_, end_ - pending_.size());
  pending_.clear();
  return result;
}

void TraceFile::Close() {
  if (descriptor_ < 0) return;
  if (Flush().ok() && ftruncate(descriptor_, static_cast<off_t>(end_)) == 0) (void)Write("\n]\n", end_);
  close(descriptor_);
  descriptor_ = -1;
}

Result TraceFile::MoveBracket(std::uint64_t least) {
  const std::uint64_t stride = std::clamp(bracket_, kLeastStride, kMostStride);
  const std::uint64_t next = std::min(bracket_ + stride, max_bytes_ - 1);
  if (max_bytes_ == 0 || next < least) {
    failure_ = Result(Code::kArgument, "the timeline " + path_ + " is full");
    return failure_;
  }
  // Behind the bracket: wherever this ends, the file is whole.
  const std::string spaces(std::min<std::uint64_t>(next - bracket_, 1 << 18), ' ');
  for (std::uint64_t at = bracket_ + 1; at <= next; at += spaces.size()) {
    RONDE_RETURN_IF_ERROR(Write(std::string_view(spaces).substr(0, next + 1 - at), at));
  }
  RONDE_RETURN_IF_ERROR(Write("]", next));
  RONDE_RETURN_IF_ERROR(Write(" ", bracket_));
  bracket_ = next;
  return Ok();
}

Result TraceFile::Write(std::string_view bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    ssize_t written = pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      failure_ = Result(Code::kTransport, "the timeline " + path_ + " cannot be written: " + std::strerror(errno));
      return failure_;
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
  return Ok();
}

}  // namespace ronde
