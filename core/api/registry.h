// The engines of this process by id: the only process-wide object in the tree.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"

namespace ronde {

// After fork() in a process that had an engine, the child has the memory but not the threads: nothing may be touched.
bool InForkedChild();

std::uint64_t RegisterEngine(std::shared_ptr<Engine> engine);
// id 0: the one registered last and still here. An error when there is none, or in a forked child.
Expected<std::shared_ptr<Engine>> FindEngine(std::uint64_t id);
// Takes it out; null when it is not there.
std::shared_ptr<Engine> UnregisterEngine(std::uint64_t id);

}  // namespace ronde
