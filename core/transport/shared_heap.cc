#include "transport/shared_heap.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace ronde {
namespace {

constexpr std::size_t kPage = 4096;  // where pages are larger, several allocations share one

}  // namespace

SharedHeap::SharedHeap(std::byte* base, std::size_t bytes, Reserve reserve, Release release)
    : base_(base),
      given_(bytes),
      bytes_(bytes / kPage * kPage),
      reserve_(std::move(reserve)),
      release_(std::move(release)) {
  if (bytes_ > 0) free_[0] = bytes_;
}

Expected<std::byte*> SharedHeap::Allocate(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  auto refuse = [&](const std::string& why) {
    return Result(Code::kArgument, "no " + std::to_string(bytes) + " bytes of shared memory: " + why);
  };
  if (bytes > bytes_) {
    const std::string given = given_ == bytes_ ? ""
                                               : " is " + std::to_string(given_) + ", of which whole pages of " +
                                                     std::to_string(kPage) + " bytes are used";
    return refuse("the rank has " + std::to_string(bytes_) + " in all (RONDE_SHARED_BYTES" + given + ")");
  }
  const std::size_t need = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  const std::size_t align = need >= kHugePage ? kHugePage : kPage;
  auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& range) {
    const std::size_t skipped = -range.first % align;
    return range.second >= skipped && range.second - skipped >= need;
  });
  if (found == free_.end()) {
    return refuse("what is left of the rank's " + std::to_string(bytes_) + " (RONDE_SHARED_BYTES) is too small");
  }
  const std::size_t begin = found->first, end = begin + found->second;
  const std::size_t offset = begin + -begin % align;
  if (reserve_) {
    if (Result reserved = reserve_(offset, need); !reserved.ok()) return refuse(reserved.message());
  }
  free_.erase(found);
  if (offset > begin) free_[begin] = offset - begin;
  if (end > offset + need) free_[offset + need] = end - offset - need;
  used_[offset] = need;
  return base_ + offset;
}

void SharedHeap::Free(const std::byte* memory) {
  std::lock_guard lock(mutex_);
  auto found = used_.find(static_cast<std::size_t>(memory - base_));
  if (found == used_.end()) return;
  auto [offset, bytes] = *found;
  used_.erase(found);
  if (release_) release_(offset, bytes);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace ronde
