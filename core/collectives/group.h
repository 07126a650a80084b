// Who takes part in a collective, seen from one rank.
#pragma once

#include <cstddef>
#include <vector>

namespace ronde {

struct Group {
  std::vector<int> members;  // job ranks, ascending
  int me = 0;                // this rank's index among the members
  std::vector<bool> joined;  // by member: brings nothing, takes nothing, but works on its shards

  int size() const { return static_cast<int>(members.size()); }
  bool Contributes(int member) const { return joined.empty() || !joined[member]; }
};

// [begin, end) of member m's share when `bytes` are split evenly at cache-line borders.
struct Share {
  std::size_t begin = 0, end = 0;
};
inline Share ShareOf(std::size_t bytes, int member, int members) {
  auto border = [&](int m) { return m == members ? bytes : bytes * m / members / 64 * 64; };
  return {border(member), border(member + 1)};
}

}  // namespace ronde
