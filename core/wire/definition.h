// What ranks say about an operation. A Definition holds everything that must be equal on all members of the process
// set; it is sent whole once, then goes by its id. Values that may change per call travel beside the id.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace ronde {

using SetId = std::uint32_t;
constexpr SetId kGlobalSet = 0;

struct TensorSpec {
  std::string name;  // empty for unnamed operations
  DType dtype = DType::kFloat32;
  Shape shape;  // of the input; the first dimension of ragged operations (OpInfo::ragged) is 0 here: it is a value
  bool operator==(const TensorSpec&) const = default;
};

struct Definition {
  Op op = Op::kAllreduce;
  Reduction reduction = Reduction::kSum;
  double prescale = 1;
  double postscale = 1;
  int root = 0;  // job rank
  SetId set = kGlobalSet;
  int device = -1;
  std::string name;                 // identity within the set; of a group: the group's. Empty: unnamed
  std::vector<TensorSpec> tensors;  // one, or all of a group
  std::vector<int> ranks;           // AddProcessSet: the members, ascending. RemoveProcessSet: {set id}
  bool operator==(const Definition&) const = default;
};

// Allgather: first dimension of each tensor. Alltoall: rows to each member, tensor after tensor. Else empty.
using Values = std::vector<std::int64_t>;

}  // namespace ronde
