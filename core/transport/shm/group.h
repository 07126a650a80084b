// Memory that the ranks of one host share: each rank's part, and all parts as one rank has them mapped.
//
// A rank's part: a header (progress counters, then mail), then its ring. Everybody writes the header, since sleepers
// and senders register in it; only the owner can write the ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
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
  // Mail (mailbox.cc): set while this rank's control thread may sleep, so that senders ring its doorbell.
  alignas(128) std::atomic<std::uint32_t> mail_asleep;
};
constexpr std::size_t kShmHeaderBytes = 65536;  // a multiple of every page size: the two are protected differently
constexpr std::size_t kShmMailOffset = 4096;    // in the header; the rest of it is one mail ring per sender
static_assert(sizeof(ShmHeader) <= kShmMailOffset);

class ShmMapping {
 public:
  ShmMapping() = default;
  ShmMapping(const ShmMapping&) = delete;
  ShmMapping& operator=(const ShmMapping&) = delete;
  ~ShmMapping();
  Result Map(int descriptor, std::size_t ring_bytes, bool own);
  ShmHeader& header() const { return *reinterpret_cast<ShmHeader*>(base_); }
  std::byte* mail() const { return base_ + kShmMailOffset; }
  std::byte* ring() const { return base_ + kShmHeaderBytes; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

class ShmPart {
 public:
  explicit ShmPart(const ShmConfig& config) : config(config) {}
  ~ShmPart();
  const ShmConfig config;
  int descriptor = -1;
  ShmMapping mapping;
};

// Shared by the objects made from it, so that none outlives the mappings.
class ShmGroup {
 public:
  ShmGroup(std::shared_ptr<ShmPart> own, std::vector<int> ranks) : own_(std::move(own)), ranks_(std::move(ranks)) {}
  Result MapPeers(const std::vector<int>& descriptors);

  const ShmConfig& config() const { return own_->config; }
  int rank() const { return own_->config.rank; }
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
