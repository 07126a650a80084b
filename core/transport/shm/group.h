// Memory that the ranks of one host share: each rank's part, and all parts as one rank has them mapped.
//
// A rank's part: a header (progress counters, then mail), then its ring, then its heap. Everybody writes the header,
// since sleepers and senders register in it; only the owner can write the ring. Neighbours write results into what
// the owner has lent of its heap. Memory is reserved for header and ring at once, for the heap as it is handed out.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "transport/shm/factory.h"

namespace ronde {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct alignas(128) ShmCounter {
  std::atomic<std::uint64_t> count;
  std::atomic<std::uint32_t> sleepers;
};
struct ShmHeader {
  ShmCounter counters[Segment::kNumStages];
  std::atomic<std::uint32_t> left;  // the rank touches no neighbour's memory any more
  std::uint64_t ring_bytes;
  // Mail (mailbox.cc): set while this rank's control thread may sleep, so that senders ring its doorbell.
  alignas(128) std::atomic<std::uint32_t> mail_asleep;
};
constexpr std::size_t kShmHeaderBytes = 65536;  // a multiple of every page size: the two are protected differently
constexpr std::size_t kShmHeapAlign = SharedHeap::kHugePage;  // likewise
constexpr std::size_t kShmMailOffset = 4096;  // in the header; the rest of it is one mail ring per sender
static_assert(sizeof(ShmHeader) <= kShmMailOffset);

class ShmMapping {
 public:
  ShmMapping() = default;
  ShmMapping(const ShmMapping&) = delete;
  ShmMapping& operator=(const ShmMapping&) = delete;
  ~ShmMapping();
  // The file is as large as all that it holds.
  Result Map(int descriptor, std::size_t ring_bytes, bool own);
  ShmHeader& header() const { return *reinterpret_cast<ShmHeader*>(base_); }
  std::byte* mail() const { return base_ + kShmMailOffset; }
  std::byte* ring() const { return base_ + kShmHeaderBytes; }
  std::span<std::byte> heap() const { return {base_ + heap_offset_, bytes_ - heap_offset_}; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t heap_offset_ = 0;
};

class ShmPart {
 public:
  explicit ShmPart(const ShmConfig& config) : config(config) {}
  ~ShmPart();
  const ShmConfig config;
  int descriptor = -1;
  ShmMapping mapping;
  std::optional<SharedHeap> heap;
};

// Shared by the objects made from it, so that none outlives the mappings.
class ShmGroup {
 public:
  ShmGroup(std::shared_ptr<ShmPart> own, std::vector<int> ranks) : own_(std::move(own)), ranks_(std::move(ranks)) {}
  Result MapPeers(const std::vector<int>& descriptors);

  const ShmConfig& config() const { return own_->config; }
  int rank() const { return own_->config.rank; }
  std::shared_ptr<SharedHeap> heap() const {
    return own_->heap ? std::shared_ptr<SharedHeap>(own_, &*own_->heap) : nullptr;
  }
  const std::vector<int>& ranks() const { return ranks_; }  // job ranks, ascending
  bool Has(int rank) const { return rank >= 0 && rank < static_cast<int>(maps_.size()) && maps_[rank] != nullptr; }
  ShmMapping& Of(int rank) const { return *maps_[rank]; }

 private:
  std::shared_ptr<ShmPart> own_;
  std::vector<int> ranks_;
  std::vector<std::unique_ptr<ShmMapping>> peers_;
  std::vector<ShmMapping*> maps_;  // by job rank; null: not on this host
};

// Of a segment made by CreateShmSegment.
std::shared_ptr<const ShmGroup> GroupOf(const Segment& segment);

}  // namespace ronde
