#include "engine/metrics.h"

#include <cmath>

namespace ronde {

double TickScale::NanosecondsPerTick() const {
  const double ticks = static_cast<double>(Ticks() - start_ticks_);
  return ticks > 0 ? Seconds(Now() - start_) * 1e9 / ticks : 1;
}

void AddRows(const ExecutionCounters& counters, double nanoseconds_per_tick, MetricRows* rows) {
  std::int64_t operations = 0, tensors = 0, lists = 0, bytes = 0, lent = 0;
  for (const auto& op : counters.by_op) {
    operations += op.operations.get();
    tensors += op.tensors.get();
    lists += op.lists.get();
    bytes += op.bytes.get();
    lent += op.lent.get();
  }
  rows->emplace_back("operations", operations);
  rows->emplace_back("tensors", tensors);
  rows->emplace_back("lists", lists);
  rows->emplace_back("bytes", bytes);
  rows->emplace_back("lent", lent);
  rows->emplace_back("batches", counters.batches.get());
  rows->emplace_back("failed", counters.failed.get());
  auto add_time = [&](const std::string& name, const Counter& ticks) {
    rows->emplace_back("nanoseconds." + name, std::llround(static_cast<double>(ticks.get()) * nanoseconds_per_tick));
  };
  add_time("negotiate", counters.negotiate);
  add_time("queue", counters.queue);
  add_time("run", counters.run);
  for (std::size_t p = 0; p < kPhases; ++p) add_time(kPhaseNames[p], counters.phases[p]);
  for (const auto& info : kOps) {
    const auto& op = counters.by_op[static_cast<std::size_t>(info.id)];
    const std::string prefix = "ops." + std::string(info.name) + ".";
    rows->emplace_back(prefix + "operations", op.operations.get());
    if (!info.tensors) continue;
    rows->emplace_back(prefix + "tensors", op.tensors.get());
    rows->emplace_back(prefix + "lists", op.lists.get());
    rows->emplace_back(prefix + "bytes", op.bytes.get());
    rows->emplace_back(prefix + "lent", op.lent.get());
  }
}

}  // namespace ronde
