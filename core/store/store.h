// Key-value rendezvous: how ranks find each other before they are connected.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace ronde {

// Used by one thread at a time.
class Store {
 public:
  virtual ~Store() = default;
  virtual Result Set(const std::string& key, const std::string& value) = 0;
  // Waits until the key is there. Timeout: an error that names the key.
  virtual Expected<std::string> Get(const std::string& key, Deadline deadline) = 0;
  // Adds to a number that starts at 0; returns the sum.
  virtual Expected<std::int64_t> Add(const std::string& key, std::int64_t amount) = 0;
  // Hands in blob `index` of `count`, waits for all and returns them. Timeout: an error that names who is missing.
  virtual Expected<std::vector<std::string>> Exchange(const std::string& key, std::uint32_t index, std::uint32_t count,
                                                      const std::string& blob, Deadline deadline);
};

// Shared by whoever holds it (threads of one process).
class MemoryStoreState;
std::shared_ptr<MemoryStoreState> CreateMemoryStoreState();
std::unique_ptr<Store> CreateMemoryStore(std::shared_ptr<MemoryStoreState> state);

// "file:/directory" (must exist), "unix:/path", "tcp:host:port". A server on TCP asks for proof of the secret.
Expected<std::unique_ptr<Store>> OpenStore(const std::string& url, const std::string& secret, Deadline deadline);

// Keys of `store` that begin with `prefix`, without it.
std::unique_ptr<Store> CreatePrefixStore(std::shared_ptr<Store> store, std::string prefix);

// Serves a memory store to clients on a Unix or TCP socket, from a thread of its own. On a Unix socket only this user's
// processes are served, on TCP only clients that prove the secret.
class StoreServer {
 public:
  static Expected<std::unique_ptr<StoreServer>> Start(const std::string& url, const std::string& secret);
  virtual ~StoreServer() = default;
  virtual const std::string& url() const = 0;
};

}  // namespace ronde
