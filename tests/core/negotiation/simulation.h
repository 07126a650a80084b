// A job of negotiators without threads: links deliver in order, but which link delivers next is the test's choice.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "negotiation/negotiator.h"

namespace ronde {

class Simulation {
 public:
  struct Settings {
    std::vector<int> parents;  // by rank; -1 for rank 0
    std::int64_t cache_capacity = 65536;
    double stall_warning = 60;
    std::optional<double> stall_abort{};
    unsigned seed = 1;
  };
  struct Ended {
    int times = 0;
    bool in_batch = false;
    Result result;
    AgreedEntry entry;
  };

  explicit Simulation(const Settings& settings) : random_(settings.seed) {
    int size = static_cast<int>(settings.parents.size());
    for (int r = 0; r < size; ++r) {
      NegotiatorConfig config;
      config.rank = r;
      config.parent = settings.parents[r];
      config.parents = settings.parents;
      for (int c = 0; c < size; ++c) {
        if (settings.parents[c] == r) config.children.push_back(c);
        config.host_names.push_back("h" + std::to_string(c));
      }
      config.cache_capacity = settings.cache_capacity;
      config.stall_warning = FromSeconds(settings.stall_warning);
      if (settings.stall_abort) config.stall_abort = FromSeconds(*settings.stall_abort);
      nodes_.push_back(CreateNegotiator(config));
    }
    ended.resize(size);
    batches.resize(size);
    aborts.resize(size);
    blocked.resize(size, BlockedReport{false, "not inside ronde"});
  }

  int size() const { return static_cast<int>(nodes_.size()); }
  Negotiator& node(int rank) { return *nodes_[rank]; }
  std::mt19937& random() { return random_; }

  Ticket Submit(int rank, const Definition& definition, const Values& values = {}) {
    Ticket ticket = ++last_ticket_;
    ended[rank][ticket];
    nodes_[rank]->Submit(ticket, definition, values, now);
    Collect(rank);
    return ticket;
  }
  void Collect(int rank) {
    Actions actions = nodes_[rank]->Take();
    for (auto& [peer, message] : actions.messages) links_[{rank, peer}].push_back(std::move(message));
    for (auto& batch : actions.batches) {
      for (auto& entry : batch.entries) {
        if (entry.ticket == 0) continue;
        auto& end = ended[rank][entry.ticket];
        ++end.times;
        end.in_batch = true;
        end.result = entry.error;
        end.entry = entry;
      }
      unfinished_.push_back({rank, batch.set, batch.number});
      batches[rank].push_back(std::move(batch));
    }
    for (auto& [ticket, result] : actions.failed) {
      ++ended[rank][ticket].times;
      ended[rank][ticket].result = result;
    }
    for (auto& [level, text] : actions.logs) logs.push_back(text);
    if (!actions.abort.ok()) aborts[rank] = actions.abort;
  }
  // Delivers one message or finishes one batch, at random. False: nothing was left to do.
  bool Step() {
    std::vector<std::pair<int, int>> ready;
    for (auto& [link, queue] : links_) {
      if (!queue.empty()) ready.push_back(link);
    }
    std::size_t choices = ready.size() + unfinished_.size();
    if (choices == 0) return false;
    std::size_t pick = random_() % choices;
    if (pick < ready.size()) {
      auto [from, to] = ready[pick];
      auto message = std::move(links_[ready[pick]].front());
      links_[ready[pick]].pop_front();
      nodes_[to]->Receive(from, message, now);
      Collect(to);
    } else {
      pick -= ready.size();
      auto [rank, set, number] = unfinished_[pick];
      unfinished_.erase(unfinished_.begin() + static_cast<std::ptrdiff_t>(pick));
      const auto* members = nodes_[rank]->Members(set);
      if (members && members->front() == rank) {
        nodes_[rank]->Finished(set, number, now);
        Collect(rank);
      }
    }
    return true;
  }
  void Run(int limit = 1000000) {
    while (limit-- > 0 && Step()) {
    }
  }
  void Tick(double seconds) {
    now += FromSeconds(seconds);
    for (int r = 0; r < size(); ++r) {
      nodes_[r]->Tick(now, blocked[r]);
      Collect(r);
    }
    Run();
  }

  TimePoint now{std::chrono::hours(1)};
  std::vector<std::map<Ticket, Ended>> ended;  // by rank
  std::vector<std::vector<Batch>> batches;     // by rank, in order
  std::vector<Result> aborts;
  std::vector<BlockedReport> blocked;
  std::vector<std::string> logs;

 private:
  std::mt19937 random_;
  std::vector<std::unique_ptr<Negotiator>> nodes_;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> links_;
  std::vector<std::tuple<int, SetId, std::uint64_t>> unfinished_;
  Ticket last_ticket_ = 0;
};

inline std::vector<int> Star(int size) {
  std::vector<int> parents(size, 0);
  parents[0] = -1;
  return parents;
}
inline std::vector<int> Chain(int size) {
  std::vector<int> parents;
  for (int r = 0; r < size; ++r) parents.push_back(r - 1);
  return parents;
}
inline std::vector<int> Binary(int size) {
  std::vector<int> parents;
  for (int r = 0; r < size; ++r) parents.push_back(r == 0 ? -1 : (r - 1) / 2);
  return parents;
}

inline Definition Reduce(const std::string& name, Shape shape = {4}, DType dtype = DType::kFloat32) {
  Definition d;
  d.name = name;
  d.reduction = Reduction::kSum;
  d.tensors = {TensorSpec{name, dtype, std::move(shape)}};
  return d;
}

}  // namespace ronde
