// Operations in flight by the tickets under which the negotiator knows them.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "engine/operation.h"
#include "negotiation/negotiator.h"

namespace ronde {

// A ticket's low bits are its place in a list of slots, so nothing is searched for, and nothing allocated unless more
// operations are in flight than ever before. Later operations have larger tickets.
class Tickets {
 public:
  Ticket Add(std::shared_ptr<Operation> operation) {
    if (2 * count_ >= slots_.size()) Grow();
    while (SlotOf(++last_).operation) {
    }
    SlotOf(last_) = {last_, std::move(operation)};
    ++count_;
    return last_;
  }
  // Null: it is not there.
  const Operation* Find(Ticket ticket) const {
    const Slot& slot = slots_[ticket & (slots_.size() - 1)];
    return slot.ticket == ticket ? slot.operation.get() : nullptr;
  }
  std::shared_ptr<Operation> Take(Ticket ticket) {
    Slot& slot = SlotOf(ticket);
    if (slot.ticket != ticket || !slot.operation) return nullptr;
    --count_;
    return std::move(slot.operation);
  }
  template <class F>
  void ForEach(F&& f) const {
    for (const auto& slot : slots_) {
      if (slot.operation) f(slot.ticket, *slot.operation);
    }
  }
  // All that are left.
  template <class F>
  void TakeAll(F&& f) {
    for (auto& slot : slots_) {
      if (slot.operation) f(std::move(slot.operation));
    }
    count_ = 0;
  }

 private:
  struct Slot {
    Ticket ticket = 0;
    std::shared_ptr<Operation> operation;  // null: free
  };
  Slot& SlotOf(Ticket ticket) { return slots_[ticket & (slots_.size() - 1)]; }
  void Grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (auto& slot : old) {
      if (slot.operation) SlotOf(slot.ticket) = std::move(slot);
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(64);  // a power of two; at least half of them are free
  std::size_t count_ = 0;
  Ticket last_ = 0;
};

}  // namespace ronde
