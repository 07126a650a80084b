#include <map>

#include "engine/engine.h"

namespace ronde {

int Topology::local_rank() const {
  int count = 0;
  for (int r = 0; r < rank; ++r) count += host_ids[r] == host_ids[rank];
  return count;
}

int Topology::local_size() const {
  int count = 0;
  for (const auto& host : host_ids) count += host == host_ids[rank];
  return count;
}

namespace {
// Hosts in the order of their first rank, with their numbers of ranks.
std::vector<std::pair<std::string, int>> Hosts(const Topology& topology) {
  std::vector<std::pair<std::string, int>> hosts;
  std::map<std::string, std::size_t> index;
  for (const auto& id : topology.host_ids) {
    auto [entry, added] = index.try_emplace(id, hosts.size());
    if (added) hosts.emplace_back(id, 0);
    ++hosts[entry->second].second;
  }
  return hosts;
}
}  // namespace

int Topology::cross_rank() const {
  int count = 0;
  for (const auto& [id, ranks] : Hosts(*this)) {
    if (id == host_ids[rank]) break;
    count += ranks > local_rank();
  }
  return count;
}

int Topology::cross_size() const {
  int count = 0;
  for (const auto& [id, ranks] : Hosts(*this)) count += ranks > local_rank();
  return count;
}

bool Topology::is_homogeneous() const {
  auto hosts = Hosts(*this);
  for (const auto& [id, ranks] : hosts) {
    if (ranks != hosts.front().second) return false;
  }
  return true;
}

std::string Topology::Describe(int other) const {
  return "rank " + std::to_string(other) + " (host " + host_names[other] + ")";
}

}  // namespace ronde
