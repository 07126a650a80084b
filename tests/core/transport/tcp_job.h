// Jobs of endpoints: as threads of one process, on one "host" (Unix sockets, shared memory) or on several (TCP).
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "transport/tcp/factory.h"

namespace ronde::testing {

struct Job {
  int size = 2;
  std::function<std::string(int)> host = [](int) { return "same"; };
  bool shared_memory = true;
  std::function<void(EndpointConfig&)> change = [](EndpointConfig&) {};
  double seconds = 20;
  std::set<int> absent = {};  // these publish a blob and never connect
  // What each rank sees published; may alter it.
  std::function<void(int rank, std::vector<std::string>& blobs)> see = [](int, std::vector<std::string>&) {};
};

inline std::function<std::string(int)> EveryoneElsewhere() {
  return [](int r) { return "h" + std::to_string(r); };
}

inline EndpointConfig ConfigOf(const Job& job, int rank) {
  EndpointConfig config;
  config.rank = rank;
  config.size = job.size;
  config.host_id = job.host(rank);
  config.host_name = "host-" + config.host_id;
  config.secret = "secret";
  config.job_options = "from " + std::to_string(rank);
  config.shared.ring_bytes = 65536;
  config.heap_bytes = 256 << 10;
  config.shared.shared_memory = job.shared_memory;
  job.change(config);
  return config;
}

using Made = std::vector<Expected<Connections>>;

inline std::unique_ptr<Endpoint> MakeEndpoint(const EndpointConfig& config) {
  return std::move(Endpoint::Create(config, Log(LogLevel::kOff, false, "")).value());
}

// `before` is called once all listen and nobody has connected.
inline Made ConnectAll(const Job& job, const std::function<void(const std::vector<std::string>& blobs)>& before = {}) {
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::vector<std::string> blobs;
  for (int r = 0; r < job.size; ++r) {
    endpoints.push_back(MakeEndpoint(ConfigOf(job, r)));
    blobs.push_back(endpoints.back()->blob());
  }
  if (before) before(blobs);
  Made made;
  for (int r = 0; r < job.size; ++r) made.emplace_back(Result(Code::kInternal, "not run"));
  std::vector<std::thread> threads;
  for (int r = 0; r < job.size; ++r) {
    if (job.absent.count(r)) continue;
    threads.emplace_back([&, r] {
      auto seen = blobs;
      job.see(r, seen);
      made[r] = endpoints[r]->Connect(seen, After(job.seconds));
    });
  }
  for (auto& t : threads) t.join();
  return made;
}

inline std::string TakeText(Mailbox& mailbox, double seconds = 10) {
  Mailbox::Event event;
  Deadline limit = After(seconds);
  while (!mailbox.Take(&event)) {
    if (Now() >= limit) return "nothing came";
    mailbox.Wait(limit, true);
  }
  if (!event.lost.ok()) return "lost " + std::to_string(event.peer);
  return std::string(reinterpret_cast<const char*>(event.message.data()), event.message.size());
}

inline std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

}  // namespace ronde::testing
