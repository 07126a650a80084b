// A node's neighbours in the tree: what is written to each, and which of them have said goodbye.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "negotiation/negotiator.h"
#include "wire/codec.h"

namespace ronde {

constexpr std::uint8_t kProtocolVersion = 1;

// Records of a message, after its version byte. Up: towards rank 0; down: away from it.
enum class Record : std::uint8_t {
  kReport = 1,       // up: number, definitions, each with ranks and their values
  kJoined = 2,       // up: rank
  kFinished = 3,     // up: set, number
  kStalled = 4,      // up: definition, number, ready ranks
  kBlocked = 5,      // up: rank, blocked, where
  kEvicted = 6,      // up: id (acknowledged by the whole subtree)
  kDeparted = 7,     // up: rank
  kBatch = 8,        // down: a committed batch
  kEvict = 9,        // down: id
  kAskBlocked = 10,  // down
  kGoodbye = 11,     // between neighbours: the sender leaves
  kGoodbyeHeard = 12,
  kAbort = 13,   // both ways: code, message
  kClosed = 14,  // down: why nothing more can be agreed
};

class Links {
 public:
  explicit Links(const NegotiatorConfig& config) : parent_(config.parent), children_(config.children) {
    all_ = live_children_ = children_;
    if (parent_ >= 0) all_.push_back(parent_);
  }

  // May `peer` send this? Nobody else's records reach a node, so a wrong one is a fault of the sender.
  bool MaySend(int peer, Record record) const {
    if (record <= Record::kDeparted) return std::count(children_.begin(), children_.end(), peer) > 0;
    if (record <= Record::kAskBlocked || record == Record::kClosed) return peer == parent_;
    return true;
  }

  // All records for one peer leave in one message.
  Writer& To(int peer, Record record) {
    Writer& writer = outgoing_[peer];
    if (writer.empty()) writer.Byte(kProtocolVersion);
    writer.Byte(static_cast<std::uint8_t>(record));
    return writer;
  }
  Writer& Up(Record record) { return To(parent_, record); }
  // What was written since the last time, in place of what is there, whose memory is used again.
  void Take(Messages* messages) {
    for (auto& [peer, message] : *messages) spare_.push_back(std::move(message));
    messages->clear();
    for (auto& [peer, writer] : outgoing_) {
      if (writer.empty()) continue;
      if (gone_.count(peer) > 0) {
        writer.Clear();
        continue;
      }
      std::vector<std::byte> memory;
      if (!spare_.empty()) {
        memory = std::move(spare_.back());
        spare_.pop_back();
      }
      messages->emplace_back(peer, writer.Take(std::move(memory)));
    }
  }

  const std::vector<int>& all() const { return all_; }
  // Children that have not said goodbye.
  const std::vector<int>& LiveChildren() const { return live_children_; }
  void HeardGoodbye(int peer) {
    left_.insert(peer);
    heard_.insert(peer);
    std::erase(live_children_, peer);
  }
  void WasHeard(int peer) { heard_.insert(peer); }
  void Gone(int peer) {
    gone_.insert(peer);
    std::erase(live_children_, peer);
  }
  bool HasLeft(int peer) const { return left_.count(peer) > 0; }
  bool IsGone(int peer) const { return gone_.count(peer) > 0; }
  // Everybody who could still wait for this rank knows that it leaves.
  bool AllHeard() const {
    return std::all_of(all_.begin(), all_.end(), [&](int peer) { return heard_.count(peer) || gone_.count(peer); });
  }

 private:
  const int parent_;
  const std::vector<int> children_;
  std::vector<int> all_;
  std::vector<int> live_children_;
  std::set<int> left_;   // said goodbye
  std::set<int> heard_;  // know of this rank's goodbye, or said their own
  std::set<int> gone_;   // their connection ended
  std::map<int, Writer> outgoing_;
  std::vector<std::vector<std::byte>> spare_;  // memory of messages
};

}  // namespace ronde
