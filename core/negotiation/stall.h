// Finds operations that some ranks submitted and others did not, says so once per growing period, and decides when the
// job must end. Pure; runs at rank 0 (other nodes only use its limits).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "negotiation/negotiator.h"
#include "negotiation/pending_table.h"

namespace ronde {

struct StallFinding {
  bool ask = false;  // every rank should say what it waits in
  std::vector<std::string> warnings;
  Result abort;
};

class StallWatch {
 public:
  explicit StallWatch(const NegotiatorConfig& config);

  // A node whose table was empty has an entry again.
  void Started(TimePoint now) { next_look_ = now + interval_; }
  void Ticked(TimePoint now) { next_look_ = now + interval_; }
  TimePoint next_look() const { return next_look_; }
  // The earliest time at which a partial entry matters.
  Duration first_limit() const { return first_limit_; }

  StallFinding Look(const std::vector<PendingEntry*>& pending, const ProcessSets& sets, const Absence& absence,
                    TimePoint now);
  void Answer(int rank, const BlockedReport& report) { answers_[rank] = report; }

 private:
  // "ready on ranks 0, 2; missing: rank 1 (host h: not inside ronde)".
  std::string Describe(const PendingEntry& entry, const std::vector<int>& ready, const std::vector<int>& missing,
                       TimePoint now) const;

  const NegotiatorConfig& config_;
  Duration first_limit_;
  Duration interval_;
  TimePoint next_look_ = TimePoint::max();
  TimePoint asked_at_ = TimePoint::min();
  bool asking_ = false;
  std::map<int, BlockedReport> answers_;  // to the last question
};

}  // namespace ronde
