// Do the ranks agree? Pure functions over what each said about one entry.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "wire/definition.h"

namespace ronde {

// "allreduce 'x'".
std::string Describe(const Definition& definition);
// "ranks 0-2, 5", "rank 3".
std::string DescribeRanks(std::vector<int> ranks);

struct Opinion {
  const Definition* definition;
  std::vector<int> ranks;  // at least one
};
// Ok, or the first field that differs: "allreduce 'x': ranks disagree about dtype: float32 on rank 0; float64 on rank
// 1". At least one opinion.
Result CheckAgreement(const std::vector<Opinion>& opinions);
// "tensor 'a': ranks disagree about its group: in group 'g' on rank 0; alone on rank 1". Of operations that reserve the
// name of this tensor; each opinion has at least one rank.
Result DisagreeAboutGroup(const std::string& tensor, const std::vector<Opinion>& opinions);

}  // namespace ronde
