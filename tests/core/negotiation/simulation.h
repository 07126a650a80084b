// A job of negotiators without threads: links deliver in order, but which link delivers next is the test's choice. What
// the engine would do with the decisions (keep the sets, report finished batches, close connections after goodbye) is
// done here.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "negotiation/negotiator.h"

namespace ronde {

class Simulation {
 public:
  using Link = std::pair<int, int>;
  struct Settings {
    std::vector<int> parents;  // by rank; -1 for rank 0
    std::int64_t cache_capacity = 65536;
    double stall_warning = 60;
    std::optional<double> stall_abort{};
    unsigned seed = 1;
    double linger = 0;
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
      config.linger = FromSeconds(settings.linger);
      config.stall_warning = FromSeconds(settings.stall_warning);
      if (settings.stall_abort) config.stall_abort = FromSeconds(*settings.stall_abort);
      neighbours_.push_back(config.children);
      if (r > 0) neighbours_.back().push_back(config.parent);
      nodes_.push_back(CreateNegotiator(config));
    }
    std::vector<int> everyone;
    for (int r = 0; r < size; ++r) everyone.push_back(r);
    sets_.resize(size, {{kGlobalSet, everyone}});
    ended.resize(size);
    batches.resize(size);
    aborts.resize(size);
    left.resize(size, false);
    closed_.resize(size, false);
    message_bytes.resize(size, 0);
    blocked.resize(size, BlockedReport{false, "not inside ronde"});
  }

  int size() const { return static_cast<int>(nodes_.size()); }
  Negotiator& node(int rank) { return *nodes_[rank]; }
  std::mt19937& random() { return random_; }

  Ticket Submit(int rank, const Definition& definition, const Values& values = {}) {
    Ticket ticket = ++last_ticket_;
    ended[rank][ticket];
    nodes_[rank]->Submit(ticket, nodes_[rank]->Intern(definition), values, now);
    Collect(rank);
    return ticket;
  }
  void Goodbye(int rank) {
    left[rank] = true;
    nodes_[rank]->Goodbye(now);
    Collect(rank);
  }
  // The connection ends without a goodbye: what is on its way is lost, and both ends hear of it.
  void Break(int one, int other) {
    for (Link link : {Link{one, other}, Link{other, one}}) {
      links_[link].clear();
      links_[link].push_back({});
      broken_.insert(link);
    }
  }
  void Collect(int rank) {
    Actions actions;
    nodes_[rank]->Take(&actions);
    for (auto& [peer, message] : actions.messages) {
      message_bytes[rank] += message.size();
      if (!broken_.count({rank, peer})) links_[{rank, peer}].push_back(std::move(message));
    }
    for (auto& batch : actions.batches) Execute(rank, std::move(batch));
    for (auto& [ticket, result] : actions.failed) {
      ++ended[rank][ticket].times;
      ended[rank][ticket].result = result;
    }
    for (auto& [level, text] : actions.logs) logs.push_back(text);
    if (!actions.abort.ok()) aborts[rank] = actions.abort;
    if (needs_what_left_) {
      needs_what_left_ = false;
      nodes_[rank]->Abort(Result(Code::kShutdown, "rank " + std::to_string(rank) + " has shut down"));
      Collect(rank);
    }
  }
  // Delivers one message, finishes one batch or closes one connection, at random. False: nothing was left to do.
  bool Step() {
    std::vector<std::pair<int, int>> ready;
    for (auto& [link, queue] : links_) {
      if (!queue.empty()) ready.push_back(link);
    }
    std::vector<int> leaving;
    for (int r = 0; r < size(); ++r) {
      if (left[r] && !closed_[r] && nodes_[r]->goodbye_complete()) leaving.push_back(r);
    }
    std::size_t choices = ready.size() + unfinished_.size() + leaving.size();
    if (choices == 0) return false;
    std::size_t pick = random_() % choices;
    if (pick < ready.size()) {
      Deliver(ready[pick]);
    } else if (pick < ready.size() + unfinished_.size()) {
      pick -= ready.size();
      auto [rank, set, number] = unfinished_[pick];
      unfinished_.erase(unfinished_.begin() + static_cast<std::ptrdiff_t>(pick));
      if (closed_[rank]) return true;
      nodes_[rank]->Finished(set, number, now);
      Collect(rank);
    } else {
      Close(leaving[pick - ready.size() - unfinished_.size()]);
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
      if (closed_[r]) continue;
      nodes_[r]->Tick(now, blocked[r]);
      Collect(r);
    }
    Run();
  }
  // Goes on to the next timer, and runs. False: nobody needs one.
  bool Wake() {
    TimePoint wake = TimePoint::max();
    for (int r = 0; r < size(); ++r) {
      if (!closed_[r]) wake = std::min(wake, nodes_[r]->NextWake());
    }
    if (wake == TimePoint::max()) return false;
    Tick(std::max(0.0, Seconds(wake - now)));
    return true;
  }

  TimePoint now{std::chrono::hours(1)};
  std::vector<std::map<Ticket, Ended>> ended;  // by rank
  std::vector<std::vector<Batch>> batches;     // by rank, in order
  std::vector<Result> aborts;
  std::vector<bool> left;  // said goodbye
  std::vector<BlockedReport> blocked;
  std::vector<std::string> logs;
  std::vector<std::size_t> message_bytes;  // sent, by rank
  std::set<SetId> stuck;                   // sets whose batches never finish
  // Called with each message before it is delivered.
  std::function<void(Link, std::vector<std::byte>&)> tamper;

 private:
  void Deliver(Link link) {
    auto [from, to] = link;
    auto message = std::move(links_[link].front());
    links_[link].pop_front();
    if (closed_[to]) return;
    if (tamper && !message.empty()) tamper(link, message);
    if (message.empty()) {
      nodes_[to]->Lost(from, Result(Code::kPeerLost, "rank " + std::to_string(from) + " is lost"), now);
    } else {
      nodes_[to]->Receive(from, message, now);
    }
    Collect(to);
  }
  // The connections of a rank that has left end; an empty message says so.
  void Close(int rank) {
    closed_[rank] = true;
    for (int neighbour : neighbours_[rank]) {
      links_[{rank, neighbour}].push_back({});
      broken_.insert({rank, neighbour});
    }
  }
  void Execute(int rank, Batch batch) {
    auto& sets = sets_[rank];
    const std::vector<int> members = sets.count(batch.set) ? sets[batch.set] : std::vector<int>{};
    auto holds = [&](const std::vector<int>& ranks) { return std::count(ranks.begin(), ranks.end(), rank) > 0; };
    for (const auto& entry : batch.entries) {
      const Definition& definition = *entry.definition;
      if (entry.error.ok() && definition.op == Op::kAddProcessSet && !entry.existed) {
        sets[entry.new_set] = definition.ranks;
      } else if (entry.error.ok() && definition.op == Op::kRemoveProcessSet) {
        sets.erase(static_cast<SetId>(definition.ranks.front()));
      }
      if (entry.ticket != 0) {
        auto& end = ended[rank][entry.ticket];
        ++end.times;
        end.in_batch = true;
        end.result = entry.error;
        end.entry = entry;
      } else if (entry.error.ok() && Info(definition.op).tensors && holds(members) && !holds(entry.joined)) {
        needs_what_left_ = true;  // others would wait for data that never comes
      }
    }
    if (!members.empty() && members.front() == rank && !stuck.count(batch.set))
      unfinished_.push_back({rank, batch.set, batch.number});
    batches[rank].push_back(std::move(batch));
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<Negotiator>> nodes_;
  std::vector<std::vector<int>> neighbours_;
  std::vector<std::map<SetId, std::vector<int>>> sets_;  // by rank, in the order of its batches
  std::map<Link, std::deque<std::vector<std::byte>>> links_;
  std::vector<std::tuple<int, SetId, std::uint64_t>> unfinished_;
  std::set<Link> broken_;
  std::vector<bool> closed_;
  bool needs_what_left_ = false;
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
inline Definition Group(const std::string& name, std::vector<std::string> tensors) {
  Definition d = Reduce(name);
  d.tensors.clear();
  for (auto& tensor : tensors) d.tensors.push_back(TensorSpec{std::move(tensor), DType::kFloat32, {2}});
  return d;
}
inline Definition Control(Op op, std::vector<int> ranks = {}) {
  Definition d;
  d.op = op;
  d.ranks = std::move(ranks);
  if (!Info(op).tensors && op != Op::kJoin && op != Op::kBarrier) {
    d.name = std::string(Info(op).name);
    for (int r : d.ranks) d.name += ' ' + std::to_string(r);
  }
  return d;
}

}  // namespace ronde
