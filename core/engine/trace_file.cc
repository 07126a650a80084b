#include "engine/trace_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace ronde {
namespace {

constexpr std::size_t kCopyBytes = std::size_t{1} << 18;
// Smaller files grow fourfold: a copied page costs more than a page of spaces.
constexpr std::uint64_t kLarge = std::uint64_t{64} << 20;
// In place the bracket moves on as far as the file is long, within these limits.
constexpr std::uint64_t kLeastStride = std::uint64_t{1} << 20, kMostStride = std::uint64_t{16} << 20;

std::string RealPath(const std::string& path) {
  char real[PATH_MAX];
  return realpath(path.c_str(), real) != nullptr ? real : "";
}

// The path to which a file can be renamed in order to replace what is at `path`. Empty: opening `path` itself finds out
// what it is, or what is wrong with it.
std::string TargetOf(const std::string& path) {
  struct stat about{};
  if (lstat(path.c_str(), &about) == 0) {
    const bool plain = stat(path.c_str(), &about) == 0 && S_ISREG(about.st_mode);
    return plain && faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0 ? RealPath(path) : "";
  }
  const std::size_t slash = path.rfind('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  const std::string folder = slash == std::string::npos ? RealPath(".") : RealPath(path.substr(0, slash + 1));
  return folder.empty() || name.empty() ? "" : folder + "/" + name;
}

bool WriteAll(int descriptor, std::string_view bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
  return true;
}

bool WriteSpaces(int descriptor, std::uint64_t from, std::uint64_t to) {
  const std::string spaces(std::min<std::uint64_t>(to - from, kCopyBytes), ' ');
  for (; from < to; from += spaces.size()) {
    if (!WriteAll(descriptor, std::string_view(spaces).substr(0, to - from), from)) return false;
  }
  return true;
}

}  // namespace

Result TraceFile::Open(const std::string& path, std::uint64_t max_bytes, std::uint64_t first_room) {
  Close();
  path_ = path;
  target_ = TargetOf(path);
  max_bytes_ = std::max<std::uint64_t>(max_bytes, 3);
  failure_ = {};
  pending_.clear();
  empty_ = true;
  end_ = 1;
  if (Replace(std::clamp<std::uint64_t>(first_room, 1, max_bytes_ - 2))) return Ok();
  descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    return Result(Code::kArgument, "the timeline " + path + " cannot be written: " + std::strerror(errno));
  }
  bracket_ = 1;
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
    RONDE_RETURN_IF_ERROR(Grow(end_ + needed));
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
  if (Flush().ok()) (void)Replace(std::min(end_ + 1, bracket_));
  close(descriptor_);
  descriptor_ = -1;
}

Result TraceFile::Grow(std::uint64_t least) {
  const std::uint64_t most = max_bytes_ - 2;
  if (least > most) {
    failure_ = Result(Code::kArgument, "the timeline " + path_ + " is full");
    return failure_;
  }
  if (Replace(std::clamp((bracket_ < kLarge ? 4 : 2) * bracket_, least, most))) return Ok();
  target_.clear();
  return MoveBracket(std::clamp(bracket_ + std::clamp(bracket_, kLeastStride, kMostStride), least, most));
}

// Puts a copy with its bracket at `bracket` in the file's place. False, with nothing changed: that cannot be done here.
bool TraceFile::Replace(std::uint64_t bracket) {
  if (target_.empty()) return false;
  const std::string part = target_ + ".part";
  (void)unlink(part.c_str());
  const int copy = open(part.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (copy < 0) return false;
  struct stat about{};
  if (stat(target_.c_str(), &about) == 0) {  // it stays whose it is, as far as that is up to us
    if (fchown(copy, about.st_uid, about.st_gid) != 0) errno = 0;
    (void)fchmod(copy, about.st_mode & 07777);
  }
  if (!FillCopy(copy, bracket) || rename(part.c_str(), target_.c_str()) != 0) {
    (void)unlink(part.c_str());
    close(copy);
    return false;
  }
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = copy;
  bracket_ = bracket;
  return true;
}

bool TraceFile::FillCopy(int copy, std::uint64_t bracket) const {
  // The events' last page may have been filled up beyond the old bracket.
  const std::uint64_t events = descriptor_ < 0 ? 0 : std::min(end_, bracket_);
  std::string bytes(std::min<std::uint64_t>(events, kCopyBytes), ' ');
  for (std::uint64_t at = 0; at < events;) {
    const std::size_t wanted = std::min<std::uint64_t>(events - at, bytes.size());
    const ssize_t got = pread(descriptor_, bytes.data(), wanted, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 || !WriteAll(copy, std::string_view(bytes).substr(0, static_cast<std::size_t>(got)), at)) return false;
    at += static_cast<std::uint64_t>(got);
  }
  if (descriptor_ < 0 && !WriteAll(copy, "[", 0)) return false;
  const std::string_view tail = bracket > end_ ? "\n]\n" : "]\n";
  return WriteSpaces(copy, std::max<std::uint64_t>(events, 1), bracket) &&
         WriteAll(copy, tail, bracket + 2 - tail.size());
}

// Wherever the first write ends, the file is whole.
Result TraceFile::MoveBracket(std::uint64_t next) {
  if (!WriteSpaces(descriptor_, bracket_ + 1, next)) return Failure();
  RONDE_RETURN_IF_ERROR(Write("]", next));
  RONDE_RETURN_IF_ERROR(Write(" ", bracket_));
  bracket_ = next;
  return Ok();
}

Result TraceFile::Write(std::string_view bytes, std::uint64_t offset) {
  return WriteAll(descriptor_, bytes, offset) ? Ok() : Failure();
}

Result TraceFile::Failure() {
  failure_ = Result(Code::kTransport, "the timeline " + path_ + " cannot be written: " + std::strerror(errno));
  return failure_;
}

}  // namespace ronde
