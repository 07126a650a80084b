#include "api/registry.h"

#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>

namespace ronde {
namespace {

struct Registry {
  std::mutex mutex;  // guards all below
  std::map<std::uint64_t, std::shared_ptr<Engine>> engines;
  std::uint64_t last_id = 0;
  std::atomic<int> count{0};  // of engines; read without the mutex by the fork handler
  std::atomic<bool> forked{false};
};

// Never destroyed: engine threads may outlive static destructors at exit.
Registry& TheRegistry() {
  static Registry* registry = [] {
    auto* made = new Registry;
    pthread_atfork(nullptr, nullptr, [] {
      if (TheRegistry().count.load() > 0) TheRegistry().forked.store(true);
    });
    return made;
  }();
  return *registry;
}

Result NotHere() {
  return Result(Code::kNotInitialized, "ronde is not initialized in this process; call init() first");
}

}  // namespace

bool InForkedChild() { return TheRegistry().forked.load(); }

std::uint64_t RegisterEngine(std::shared_ptr<Engine> engine) {
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  registry.engines[++registry.last_id] = std::move(engine);
  registry.count.fetch_add(1);
  return registry.last_id;
}

Expected<std::shared_ptr<Engine>> FindEngine(std::uint64_t id) {
  if (InForkedChild()) {
    return Result(Code::kNotInitialized,
                  "this process was forked from one that had called init(); ronde cannot be used in the child");
  }
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  if (registry.engines.empty()) return NotHere();
  if (id == 0) return registry.engines.rbegin()->second;
  auto found = registry.engines.find(id);
  if (found == registry.engines.end()) return NotHere();
  return found->second;
}

std::shared_ptr<Engine> UnregisterEngine(std::uint64_t id) {
  if (InForkedChild()) return nullptr;
  Registry& registry = TheRegistry();
  std::lock_guard lock(registry.mutex);
  auto found = id == 0 && !registry.engines.empty() ? std::prev(registry.engines.end()) : registry.engines.find(id);
  if (found == registry.engines.end()) return nullptr;
  auto engine = std::move(found->second);
  registry.engines.erase(found);
  registry.count.fetch_sub(1);
  return engine;
}

}  // namespace ronde
