// The fusion planner: which entries of a batch run as one fused operation. A pure function of what is equal on all
// ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "negotiation/negotiator.h"

namespace ronde {

struct FusionLimits {
  std::int64_t threshold = 0;      // bytes of one fused operation, over the largest member's; 0: fuse nothing
  bool keep_groups_apart = false;  // DISABLE_GROUP_FUSION
};

// One tensor of the batch.
struct PlannedTensor {
  std::size_t entry = 0;   // index in Batch::entries
  std::size_t tensor = 0;  // index in its definition's tensors
};
using Plan = std::vector<std::vector<PlannedTensor>>;

// Entries that failed or have no tensors appear in no list. Tensors share a list when op, dtype, reduction, scales,
// root, device and joined members are equal and the op is fusable; a list holds at most `threshold` bytes unless one
// tensor alone exceeds it. Order: by first tensor; a list may gather tensors past others that do not fit it. Alltoall
// is never fused, so each such tensor is its own list.
Plan PlanFusion(const Batch& batch, const FusionLimits& limits, std::size_t num_members);

}  // namespace ronde
