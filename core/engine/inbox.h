// What users' threads and the executor hand to whoever drives the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/result.h"
#include "engine/operation.h"
#include "wire/definition.h"

namespace ronde {

class Inbox {
 public:
  struct Submission {
    std::shared_ptr<Operation> operation;
    Values values;
  };
  // What came since the last time. Its lists give their memory to the next ones.
  struct Taken {
    std::vector<Submission> submissions;
    std::vector<std::pair<SetId, std::uint64_t>> finished;  // batches
    bool leave = false;                                     // this rank leaves: once
    Result failure;                                         // not ok: the engine must abort: once
    bool final_failure = false;                             // nobody knows a better cause

    bool empty() const { return submissions.empty() && finished.empty() && !leave && failure.ok(); }
  };

  // Any thread, all but Take. An error: why submissions are refused; nothing was taken then.
  Result Submit(Submission submission);
  void Finished(SetId set, std::uint64_t number);
  // The first failure counts. Final: of this rank's program, so that nobody knows a better cause.
  void Fail(const Result& failure, bool final);
  void Leave();
  // Refuses submissions from now on, unless they are refused already.
  void Close(const Result& why);
  // Refuses them with this, whatever was said before.
  void CloseFinally(const Result& why);
  Result closed() const;
  bool empty() const;

  void Take(Taken* taken);

 private:
  mutable std::mutex mutex_;  // guards all below
  Taken waiting_;
  Result failure_;  // the first, taken or not
  bool leave_ = false;
  Result closed_;
};

}  // namespace ronde
