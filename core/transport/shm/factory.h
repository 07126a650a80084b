// Segments between processes of one host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "transport/transport.h"

namespace ronde {

// This rank's own part: memory made (memfd, else /dev/shm with fallocate first) but not yet shared.
class ShmPart;

struct ShmConfig {
  int rank = 0;
  std::size_t ring_bytes = 4 << 20;  // equal on all ranks
  std::size_t heap_bytes = 0;        // address space of the heap; memory is behind what is handed out
  bool spin = false;                 // true only if every local rank has a core of its own
  bool use_memfd = true;             // tests turn it off to reach the /dev/shm fallback
  std::string name;                  // unique per job, generation and rank; only the fallback uses it
};
// Fails with the reason when the host gives no shared memory; the caller falls back to sockets.
Expected<std::shared_ptr<ShmPart>> CreateShmPart(const ShmConfig& config);
// The file descriptor to pass to the neighbours (SCM_RIGHTS); owned by the part. The fallback's file is opened, then
// unlinked, so that nothing stays after a kill.
int ShmDescriptor(const ShmPart& part);
// Maps the neighbours' parts. `descriptors[i]` belongs to `ranks[i]` (ascending, own rank included: its entry is
// ignored); borrowed: they may be closed afterwards. Mappings are MADV_DONTFORK.
Expected<std::unique_ptr<Segment>> CreateShmSegment(std::shared_ptr<ShmPart> own, const std::vector<int>& ranks,
                                                    const std::vector<int>& descriptors);
// Control messages through the memory of a segment made above; `sockets` stays for ranks of other hosts, for what does
// not fit, for doorbells to a sleeper and to notice deaths.
std::unique_ptr<Mailbox> CreateShmMailbox(const Segment& segment, std::unique_ptr<Mailbox> sockets);

}  // namespace ronde
