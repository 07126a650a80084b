// Ranks as threads of one process, for tests and for several engines in one process.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace ronde {

// What the ranks of one local job share, among it a ring and a heap of every rank. Create once, hand to every rank;
// objects made from it keep it alive.
class LocalHub;
std::shared_ptr<LocalHub> CreateLocalHub(int size, std::size_t ring_bytes, std::size_t heap_bytes = 0);

std::unique_ptr<Transport> CreateLocalTransport(std::shared_ptr<LocalHub> hub, int rank);
std::unique_ptr<Mailbox> CreateLocalMailbox(std::shared_ptr<LocalHub> hub, int rank);
std::unique_ptr<Segment> CreateLocalSegment(std::shared_ptr<LocalHub> hub, int rank);
// Ends every connection of the rank, as a killed process would: the others' mailboxes report it lost.
void DisconnectLocal(LocalHub& hub, int rank);

}  // namespace ronde
