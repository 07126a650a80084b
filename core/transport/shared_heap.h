// Memory that a rank hands out to its own process and that its host neighbours can reach: data that lies here need not
// be copied, neither to be seen by them nor to take in what they computed. While an operation runs it is lent to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "base/result.h"

namespace ronde {

class SharedHeap {
 public:
  // Puts memory behind a range, or says why there is none; gives it back. Null: there is memory behind all of it.
  using Reserve = std::function<Result(std::size_t offset, std::size_t bytes)>;
  using Release = std::function<void(std::size_t offset, std::size_t bytes)>;

  static constexpr std::size_t kHugePage = 2 << 20;

  // Borrows [base, base + bytes), which begins at a page and may be address space only.
  SharedHeap(std::byte* base, std::size_t bytes, Reserve reserve, Release release);
  SharedHeap(const SharedHeap&) = delete;

  // Page-aligned; in the heap, what has the size of a huge page begins where one can. Any thread, as Free.
  Expected<std::byte*> Allocate(std::size_t bytes);
  void Free(const std::byte* memory);

  // Where [memory, memory + bytes) lies in the heap, if it does.
  std::optional<std::uint64_t> Find(const void* memory, std::size_t bytes) const {
    auto offset = reinterpret_cast<std::uintptr_t>(memory) - reinterpret_cast<std::uintptr_t>(base_);
    if (offset >= bytes_ || bytes > bytes_ - offset) return std::nullopt;  // before the base it wraps around
    return offset;
  }

 private:
  std::byte* const base_;
  const std::size_t given_;  // bytes at base_
  const std::size_t bytes_;  // of these, whole pages
  const Reserve reserve_;
  const Release release_;
  std::mutex mutex_;                         // guards both
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes; neighbours are merged
  std::map<std::size_t, std::size_t> used_;
};

}  // namespace ronde
