// Ranks as processes: stream sockets (Unix within a host, TCP across) for control messages and data, and the meeting of
// the ranks of one host that hands out shared-memory descriptors.
//
// Bootstrap in two steps, so that any store can carry the blobs: Endpoint::Create listens; its blob() goes to every
// rank; Connect takes everybody's blobs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "transport/transport.h"

namespace ronde {

// What must be equal on all ranks; rank 0's holds for everyone.
struct SharedOptions {
  std::uint64_t ring_bytes = 4 << 20;
  bool shared_memory = true;  // among the ranks of a host
  double peer_timeout = 30;   // seconds
};

struct EndpointConfig {
  int rank = 0;
  int size = 1;
  std::string host_id;           // equal exactly for ranks that share a host (see HostId())
  std::string host_name;         // for messages
  std::string secret;            // of the job; empty only for size 1
  std::uint64_t generation = 0;  // counts init() in this job; a handshake of another generation is refused
  std::string job_options;       // Options::EncodeJob() of this rank; everyone adopts rank 0's
  SharedOptions shared;
  std::string network_interfaces;  // to be reached by, by name or network, separated by commas; empty: all
  std::int64_t heap_bytes = 0;     // of shared memory to hand out; -1: the host's memory divided by its ranks
};

// What Connect made. Destroy in any order, the engine's use of them over.
struct Connections {
  std::unique_ptr<Mailbox> mailbox;      // connected to the tree parent and children (see tree.h)
  std::unique_ptr<Transport> transport;  // connects to a peer when first used
  std::unique_ptr<Segment> segment;   // of this host's ranks; null when shared memory is off or failed, with a warning
  std::string job_options;            // rank 0's
  std::vector<std::string> host_ids;  // by rank
  std::vector<std::string> host_names;  // by rank
};

class Endpoint {
 public:
  static Expected<std::unique_ptr<Endpoint>> Create(const EndpointConfig& config, const Log& log);
  virtual ~Endpoint() = default;
  // Addresses, host, version: what every other rank needs to know of this one.
  virtual std::string blob() const = 0;
  // Meets the others. blobs[r] is rank r's. An error names the rank and host that did not come and the stage reached,
  // or both versions when ronde's differ. The endpoint keeps listening (for data connections) as long as `Connections`
  // lives; the Endpoint object itself may go.
  virtual Expected<Connections> Connect(const std::vector<std::string>& blobs, Deadline deadline) = 0;
};

// Identity of this host: boot id plus the namespaces that decide whether memory and sockets can be shared.
std::string HostId();

}  // namespace ronde
