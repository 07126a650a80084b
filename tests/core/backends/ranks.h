// Ranks as threads of one process, each with a host backend over the same kind of carrier.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "backends/host/factory.h"
#include "collectives/chunks.h"
#include "transport/local/factory.h"
#include "transport/shm/factory.h"
#include "transport/tcp/factory.h"

namespace ronde::testing {

enum class Carrier { kSegment, kShm, kTransport, kTcp };
inline void PrintTo(Carrier carrier, std::ostream* out) {
  const char* names[] = {"segment", "shm", "transport", "tcp"};
  *out << names[static_cast<int>(carrier)];
}
inline bool HasSegment(Carrier carrier) { return carrier == Carrier::kSegment || carrier == Carrier::kShm; }

constexpr std::size_t kChunk = 1024;

struct RankConfig {
  std::size_t ring_bytes = SlotRing::RingBytes(16, kChunk);
  std::size_t heap_bytes = 0;
  std::size_t chunk_bytes = kChunk;
  double wait_seconds = 20;
  double leave_seconds = 20;
};

struct Rank {
  std::unique_ptr<Segment> segment;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Mailbox> mailbox;  // keeps a socket transport's peers from counting as lost
  std::unique_ptr<Backend> backend;
};

inline void ConnectSockets(std::vector<Rank>& all) {
  const int size = static_cast<int>(all.size());
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::vector<std::string> blobs;
  for (int r = 0; r < size; ++r) {
    EndpointConfig config;
    config.rank = r;
    config.size = size;
    config.host_id = config.host_name = "host" + std::to_string(r);
    config.secret = "secret";
    config.shared.shared_memory = false;
    endpoints.push_back(std::move(Endpoint::Create(config, Log(LogLevel::kOff, false, "")).value()));
    blobs.push_back(endpoints.back()->blob());
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      auto made = endpoints[r]->Connect(blobs, After(20));
      ASSERT_TRUE(made.ok()) << made.error().message();
      all[r].transport = std::move(made->transport);
      all[r].mailbox = std::move(made->mailbox);
    });
  }
  for (auto& thread : threads) thread.join();
}

inline std::vector<Rank> MakeRanks(Carrier carrier, int size, const RankConfig& setup = {}) {
  auto hub = CreateLocalHub(size, setup.ring_bytes, setup.heap_bytes);
  std::vector<std::shared_ptr<ShmPart>> parts;
  std::vector<int> ranks(size), descriptors;
  std::iota(ranks.begin(), ranks.end(), 0);
  for (int r = 0; carrier == Carrier::kShm && r < size; ++r) {
    ShmConfig config;
    config.rank = r;
    config.ring_bytes = setup.ring_bytes;
    config.heap_bytes = setup.heap_bytes;
    parts.push_back(CreateShmPart(config).value());
    descriptors.push_back(ShmDescriptor(*parts.back()));
  }
  std::vector<Rank> all(size);
  if (carrier == Carrier::kTcp) ConnectSockets(all);
  for (int r = 0; r < size; ++r) {
    if (carrier == Carrier::kSegment) all[r].segment = CreateLocalSegment(hub, r);
    if (carrier == Carrier::kShm) all[r].segment = std::move(CreateShmSegment(parts[r], ranks, descriptors).value());
    if (carrier == Carrier::kTransport) all[r].transport = CreateLocalTransport(hub, r);
    HostBackendConfig config;
    config.chunk_bytes = setup.chunk_bytes;
    config.segment = all[r].segment.get();
    config.transport = all[r].transport.get();
    config.wait_seconds = setup.wait_seconds;
    config.leave_seconds = setup.leave_seconds;
    all[r].backend = CreateHostBackend(config);
  }
  return all;
}

inline std::vector<int> Everyone(int size) {
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

inline FusedOperation OperationOf(Op kind, const std::vector<int>& members) {
  FusedOperation operation;
  operation.op = kind;
  operation.members = members;
  operation.joined.assign(members.size(), false);
  return operation;
}

// Runs it to its end on the calling thread. The backend's limit of a wait is the deadline.
inline Result RunToEnd(Backend& backend, const FusedOperation& operation) {
  Result end(Code::kInternal, "done was not called");
  int calls = 0;
  backend.Run(operation, [&](Result result) {
    end = std::move(result);
    ++calls;
  });
  return calls == 1 ? end : Result(Code::kInternal, "done was called " + std::to_string(calls) + " times");
}

}  // namespace ronde::testing
