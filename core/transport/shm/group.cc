#include "transport/shm/group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace ronde {
namespace {

constexpr int kReserveTries = 100;                       // signals interrupt it
constexpr std::size_t kMaxBytes = std::size_t{1} << 46;  // of a ring, and of a heap
constexpr int kCollapse = 25;                            // MADV_COLLAPSE, of Linux 6.1
// What an allocation may spend on huge pages: the kernel copies, and waits for every processor, for each of them.
constexpr double kCollapseSeconds = 0.25;

Result SystemError(const std::string& what) { return Result(Code::kTransport, what + ": " + std::strerror(errno)); }

std::size_t HeapOffset(std::size_t ring_bytes) {
  return (kShmHeaderBytes + ring_bytes + kShmHeapAlign - 1) / kShmHeapAlign * kShmHeapAlign;
}

// Room first: a store into a full file system would be a bus error.
Result Reserve(int descriptor, std::size_t offset, std::size_t bytes, const std::string& where) {
  int error = EINTR;
  for (int tries = 0; error == EINTR && tries < kReserveTries; ++tries) {
    error = posix_fallocate(descriptor, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  }
  if (error == 0) return Ok();
  return Result(Code::kTransport, "no room for " + std::to_string(bytes) + " bytes of shared memory in " + where +
                                      ": " + std::strerror(error));
}

// Address space that begins where a huge page can.
Expected<std::byte*> ReserveAddresses(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  const std::size_t room = bytes + SharedHeap::kHugePage;
  void* found = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return SystemError("cannot map shared memory");
  auto* begin = static_cast<std::byte*>(found);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) % SharedHeap::kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, room - before - bytes);
  return begin + before;
}

// Larger pages for memory that is there: a core that walks through several ranks' tensors misses its translations
// less often. Kernels that give them at once were asked by MADV_HUGEPAGE; elsewhere it is worth a try.
void CollapsePages(std::byte* begin, std::size_t bytes) {
  const Deadline limit = After(kCollapseSeconds);
  for (std::size_t at = 0; at + SharedHeap::kHugePage <= bytes && Now() < limit; at += SharedHeap::kHugePage) {
    if (madvise(begin + at, SharedHeap::kHugePage, kCollapse) != 0) return;
  }
}

}  // namespace

ShmMapping::~ShmMapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

Result ShmMapping::Map(int descriptor, std::size_t ring_bytes, bool own) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0) return SystemError("cannot look at shared memory");
  bytes_ = static_cast<std::size_t>(status.st_size);
  heap_offset_ = HeapOffset(ring_bytes);
  if (bytes_ < heap_offset_) {
    return Result(Code::kTransport, "shared memory has " + std::to_string(bytes_) + " bytes instead of at least " +
                                        std::to_string(heap_offset_));
  }
  auto room = ReserveAddresses(bytes_);
  if (!room.ok()) return room.error();
  base_ = room.value();
  if (mmap(base_, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
    return SystemError("cannot map shared memory");
  }
  // A forked child must not hold on to, or write into, the rings of a job it is not part of.
  if (madvise(base_, bytes_, MADV_DONTFORK) != 0) return SystemError("cannot keep shared memory from children");
  if (!own && mprotect(base_ + kShmHeaderBytes, heap_offset_ - kShmHeaderBytes, PROT_READ) != 0) {
    return SystemError("cannot protect shared memory");
  }
  if (!heap().empty()) {
    // A core dump has no use for what may be as large as the host's memory.
    (void)madvise(heap().data(), heap().size(), MADV_DONTDUMP);
    (void)madvise(heap().data(), heap().size(), MADV_HUGEPAGE);
  }
  return Ok();
}

ShmPart::~ShmPart() {
  if (descriptor >= 0) close(descriptor);
}

Expected<std::shared_ptr<ShmPart>> CreateShmPart(const ShmConfig& config) {
  for (std::size_t bytes : {config.ring_bytes, config.heap_bytes}) {
    if (bytes <= kMaxBytes) continue;
    return Result(Code::kArgument, "shared memory of " + std::to_string(bytes) + " bytes is too large");
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
  const std::size_t heap_offset = HeapOffset(config.ring_bytes);
  RONDE_RETURN_IF_ERROR(Reserve(part->descriptor, 0, kShmHeaderBytes + config.ring_bytes, where));
  if (ftruncate(part->descriptor, static_cast<off_t>(heap_offset + config.heap_bytes)) != 0) {
    return SystemError("cannot make room for a heap in " + where);
  }
  // Nobody who holds the descriptor can cut pages from under the others. A kernel without sealing does without.
  if (is_memfd) (void)fcntl(part->descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  RONDE_RETURN_IF_ERROR(part->mapping.Map(part->descriptor, config.ring_bytes, /*own=*/true));
  new (&part->mapping.header()) ShmHeader{};
  part->mapping.header().ring_bytes = config.ring_bytes;
  if (auto heap = part->mapping.heap(); !heap.empty()) {
    part->heap.emplace(
        heap.data(), heap.size(),
        [descriptor = part->descriptor, heap_offset, where, heap](std::size_t offset, std::size_t bytes) {
          RONDE_RETURN_IF_ERROR(Reserve(descriptor, heap_offset + offset, bytes, where));
          if (offset % SharedHeap::kHugePage == 0) CollapsePages(heap.data() + offset, bytes);
          return Ok();
        },
        [descriptor = part->descriptor, heap_offset](std::size_t offset, std::size_t bytes) {
          (void)fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                          static_cast<off_t>(heap_offset + offset), static_cast<off_t>(bytes));
        });
  }
  return part;
}

int ShmDescriptor(const ShmPart& part) { return part.descriptor; }

Result ShmGroup::MapPeers(const std::vector<int>& descriptors) {
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
    peers_.push_back(std::make_unique<ShmMapping>());
    Result mapped = peers_.back()->Map(descriptors[i], config().ring_bytes, /*own=*/false);
    if (!mapped.ok()) return mapped.Because(whose);
    if (std::uint64_t theirs = peers_.back()->header().ring_bytes; theirs != config().ring_bytes) {
      return Result(Code::kTransport, whose + " has a ring of " + std::to_string(theirs) + " bytes instead of " +
                                          std::to_string(config().ring_bytes));
    }
    maps_[ranks_[i]] = peers_.back().get();
  }
  return Ok();
}

}  // namespace ronde
