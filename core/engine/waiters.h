// Users' threads that wait in operations, for stall reports.
#pragma once

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "engine/checks.h"
#include "engine/operation.h"

namespace ronde {

class Waiters {
 public:
  // Counts the calling thread as waiting.
  class Scope {
   public:
    Scope(Waiters& waiters, const Operation& operation) : waiters_(waiters), operation_(operation) {
      std::lock_guard lock(waiters_.mutex_);
      waiters_.list_.push_back(&operation_);
    }
    Scope(const Scope&) = delete;
    ~Scope() {
      std::lock_guard lock(waiters_.mutex_);
      auto& list = waiters_.list_;
      list.erase(std::find(list.begin(), list.end(), &operation_));
    }

   private:
    Waiters& waiters_;
    const Operation& operation_;
  };

  // What the first thread that still has to wait waits in; empty: there is none.
  std::string First() {
    std::lock_guard lock(mutex_);
    auto waits = [](const Operation* operation) { return !operation->done(); };
    auto found = std::find_if(list_.begin(), list_.end(), waits);
    return found == list_.end() ? std::string() : Describe((*found)->request());
  }

 private:
  std::mutex mutex_;  // guards list_
  std::vector<const Operation*> list_;
};

}  // namespace ronde
