// The backend for host memory: shared-memory algorithms where all members share a segment, else algorithms over the
// transport.
#pragma once

#include <memory>

#include "backends/backend.h"
#include "transport/transport.h"

namespace ronde {

struct HostBackendConfig {
  std::size_t chunk_bytes = 262144;
  Segment* segment = nullptr;      // may be null: no shared memory on this host
  Transport* transport = nullptr;  // may be null when every process set lies within the segment
  double wait_seconds = 0;         // limit of one wait for a peer inside an operation; 0: until Abort
  // How long an operation that failed waits for its neighbours to be done with memory that it lent. Those that live are
  // within milliseconds; short of what a launcher gives survivors to say what happened.
  double leave_seconds = 0.5;
};
// Borrows segment and transport, which must outlive it.
std::unique_ptr<Backend> CreateHostBackend(const HostBackendConfig& config);

}  // namespace ronde
