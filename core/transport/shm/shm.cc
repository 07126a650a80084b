// A rank's part: a header with its counters, then its ring. Everybody writes the header (sleepers register in it), only
// the owner can write the ring.
//
// Waiting between processes: a waiter yields a few times, registers in the word's sleeper count and sleeps on a futex
// in the shared page; the publisher stores first and looks for sleepers second (both sequentially consistent), so one
// of the two always sees the other.
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>

#include "transport/segment_wait.h"
#include "transport/shm/factory.h"

namespace ronde {
namespace {

constexpr int kSpins = 2000;
constexpr int kYields = 20;
constexpr int kReserveTries = 100;  // signals interrupt it
constexpr std::size_t kMaxRingBytes = std::size_t{1} << 46;
// An abort cannot wake a thread that is about to sleep on a peer's word without a lock that spans processes, so sleeps
// are cut into slices of this length. Waits this long are rare: a slice costs nothing then.
constexpr auto kSlice = std::chrono::milliseconds(20);

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct alignas(128) Counter {
  std::atomic<std::uint64_t> count;
  std::atomic<std::uint32_t> sleepers;
};
struct Header {
  Counter counters[Segment::kNumStages];
};
constexpr std::size_t kHeaderBytes = 65536;  // a multiple of every page size: the two are protected differently
static_assert(sizeof(Header) <= kHeaderBytes);

Result SystemError(const std::string& what) { return Result(Code::kTransport, what + ": " + std::strerror(errno)); }

// The word that a futex sleeps on: the low half of the count.
std::uint32_t* FutexWord(Counter& counter) {
  auto* word = reinterpret_cast<std::uint32_t*>(&counter.count);
  return word + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 1 : 0);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  Result Map(int descriptor, std::size_t ring_bytes, bool own) {
    bytes_ = kHeaderBytes + ring_bytes;
    void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (base == MAP_FAILED) return SystemError("cannot map shared memory");
    base_ = static_cast<std::byte*>(base);
    // A forked child must not hold on to, or write into, the rings of a job it is not part of.
    if (madvise(base_, bytes_, MADV_DONTFORK) != 0) return SystemError("cannot keep shared memory from children");
    if (!own && mprotect(base_ + kHeaderBytes, ring_bytes, PROT_READ) != 0) {
      return SystemError("cannot protect shared memory");
    }
    return Ok();
  }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  std::byte* ring() const { return base_ + kHeaderBytes; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace

class ShmPart {
 public:
  explicit ShmPart(const ShmConfig& config) : config(config) {}
  ~ShmPart() {
    if (descriptor >= 0) close(descriptor);
  }
  const ShmConfig config;
  int descriptor = -1;
  Mapping mapping;
};

namespace {

// Room first: a store into a full file system would be a bus error.
Result Reserve(int descriptor, std::size_t bytes, const std::string& where) {
  int error = EINTR;
  for (int tries = 0; error == EINTR && tries < kReserveTries; ++tries) {
    error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  }
  if (error == 0) return Ok();
  return Result(Code::kTransport, "no room for " + std::to_string(bytes) + " bytes of shared memory in " + where +
                                      ": " + std::strerror(error));
}

}  // namespace

Expected<std::shared_ptr<ShmPart>> CreateShmPart(const ShmConfig& config) {
  if (config.ring_bytes > kMaxRingBytes) {
    return Result(Code::kArgument, "a ring of " + std::to_string(config.ring_bytes) + " bytes is too large");
  }
  auto part = std::make_shared<ShmPart>(config);
  std::string where = "a memfd";
  if (config.use_memfd) part->descriptor = memfd_create("ronde", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const bool is_memfd = part->descriptor >= 0;
  if (!is_memfd) {
    where = "/dev/shm/ronde-" + config.name;
    part->descriptor = open(where.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (part->descriptor < 0) return SystemError("cannot create " + where);
    // Neighbours get the descriptor, so the name can go at once: nothing stays after a kill.
    unlink(where.c_str());
  }
  RONDE_RETURN_IF_ERROR(Reserve(part->descriptor, kHeaderBytes + config.ring_bytes, where));
  // Nobody who holds the descriptor can cut pages from under the others. A kernel without sealing does without.
  if (is_memfd) (void)fcntl(part->descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  RONDE_RETURN_IF_ERROR(part->mapping.Map(part->descriptor, config.ring_bytes, /*own=*/true));
  new (&part->mapping.header()) Header{};
  return part;
}

int ShmDescriptor(const ShmPart& part) { return part.descriptor; }

namespace {

class ShmSegment final : public Segment {
 public:
  ShmSegment(std::shared_ptr<ShmPart> own, std::vector<int> ranks) : own_(std::move(own)), ranks_(std::move(ranks)) {}

  Result MapPeers(const std::vector<int>& descriptors) {
    if (descriptors.size() != ranks_.size() || !std::is_sorted(ranks_.begin(), ranks_.end()) ||
        !std::binary_search(ranks_.begin(), ranks_.end(), rank())) {
      return Result(Code::kInternal, "rank " + std::to_string(rank()) + " is not among the ranks of its segment");
    }
    maps_.resize(ranks_.back() + 1, nullptr);
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i] == rank()) {
        maps_[ranks_[i]] = &own_->mapping;
        continue;
      }
      const std::string whose = "rank " + std::to_string(ranks_[i]) + "'s shared memory";
      struct stat status{};
      if (fstat(descriptors[i], &status) != 0) return SystemError("cannot look at " + whose);
      if (static_cast<std::size_t>(status.st_size) != kHeaderBytes + ring_bytes()) {
        return Result(Code::kTransport, whose + " has " + std::to_string(status.st_size) + " bytes instead of " +
                                            std::to_string(kHeaderBytes + ring_bytes()));
      }
      peers_.push_back(std::make_unique<Mapping>());
      Result mapped = peers_.back()->Map(descriptors[i], ring_bytes(), /*own=*/false);
      if (!mapped.ok()) return mapped.Because(whose);
      maps_[ranks_[i]] = peers_.back().get();
    }
    return Ok();
  }

  const std::vector<int>& ranks() const override { return ranks_; }
  int rank() const override { return own_->config.rank; }
  std::size_t ring_bytes() const override { return own_->config.ring_bytes; }
  std::byte* Peer(int rank) const override { return maps_[rank]->ring(); }

  void Publish(Stage stage, std::uint64_t count) override {
    Counter& counter = own_->mapping.header().counters[stage];
    counter.count.exchange(count);
    if (counter.sleepers.load() != 0) {
      syscall(SYS_futex, FutexWord(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  Result Await(int peer, Stage stage, std::uint64_t count, Deadline deadline) override {
    Counter& counter = maps_[peer]->header().counters[stage];
    auto reached = [&] { return counter.count.load(std::memory_order_acquire) >= count; };
    if (reached()) return Ok();
    for (int i = 0; own_->config.spin && i < kSpins; ++i) {
      Pause();
      if (reached()) return Ok();
    }
    for (int i = 0; i < kYields; ++i) {
      sched_yield();
      if (reached()) return Ok();
    }
    counter.sleepers.fetch_add(1);
    Result result = Sleep(counter, peer, stage, count, deadline);
    counter.sleepers.fetch_sub(1);
    return result;
  }

  void Abort(const Result& cause) override {
    std::lock_guard lock(mutex_);
    if (aborted_.load()) return;
    cause_ = cause;
    aborted_.store(true);
    // This rank's waiter sleeps on a neighbour's word; other ranks' waiters there only look once more.
    for (Mapping* map : maps_) {
      if (map == nullptr) continue;
      for (Counter& counter : map->header().counters) {
        syscall(SYS_futex, FutexWord(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
      }
    }
  }

 private:
  Result Sleep(Counter& counter, int peer, Stage stage, std::uint64_t count, Deadline deadline) {
    while (true) {
      std::uint64_t seen = counter.count.load();
      if (seen >= count) return Ok();
      if (aborted_.load()) {
        std::lock_guard lock(mutex_);
        return cause_;
      }
      TimePoint now = Now();
      if (now >= deadline) return AwaitTimedOut(peer, stage, seen, count);
      auto slice = std::chrono::duration_cast<std::chrono::nanoseconds>(std::min<Duration>(deadline - now, kSlice));
      timespec limit{0, static_cast<long>(slice.count())};
      syscall(SYS_futex, FutexWord(counter), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
    }
  }

  std::shared_ptr<ShmPart> own_;
  std::vector<int> ranks_;
  std::vector<std::unique_ptr<Mapping>> peers_;
  std::vector<Mapping*> maps_;  // by job rank; null: not on this host
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // guards cause_
  Result cause_;
};

}  // namespace

Expected<std::unique_ptr<Segment>> CreateShmSegment(std::shared_ptr<ShmPart> own, const std::vector<int>& ranks,
                                                    const std::vector<int>& descriptors) {
  auto segment = std::make_unique<ShmSegment>(std::move(own), ranks);
  RONDE_RETURN_IF_ERROR(segment->MapPeers(descriptors));
  return std::unique_ptr<Segment>(std::move(segment));
}

}  // namespace ronde
