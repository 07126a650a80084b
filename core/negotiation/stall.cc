#include "negotiation/stall.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "negotiation/agreement.h"

namespace ronde {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr auto kDefaultAbortComputing = seconds(7200);  // else: a rank that computes for long is not a deadlock
constexpr auto kAnswerTime = seconds(2);

std::string SecondsText(Duration d) {
  double s = Seconds(d);
  std::ostringstream text;
  if (s < 10 && s != std::floor(s)) {
    text.precision(2);
    text << s;
  } else {
    text << static_cast<std::int64_t>(s);
  }
  return text.str() + " s";
}

}  // namespace

StallWatch::StallWatch(const NegotiatorConfig& config) : config_(config), first_limit_(config.stall_warning) {
  if (config.stall_abort && *config.stall_abort > Duration::zero()) {
    first_limit_ = std::min(first_limit_, *config.stall_abort);
  }
  interval_ = std::clamp<Duration>(first_limit_ / 10, milliseconds(10), seconds(1));
}

StallFinding StallWatch::Look(const std::vector<PendingEntry*>& pending, const ProcessSets& sets,
                              const Absence& absence, TimePoint now) {
  StallFinding finding;
  bool want_answers = false;
  bool answers_fresh = asking_ && asked_at_ != TimePoint::min();
  for (PendingEntry* each : pending) {
    PendingEntry& entry = *each;
    Duration age = now - entry.since;
    if (age < first_limit_) continue;
    const ProcessSet* set = sets.Find(entry.set());
    if (set == nullptr) continue;
    std::vector<int> ready, missing;
    bool somebody_waits = false;
    for (int rank : set->members) {
      if (entry.heard[rank] || entry.ready_elsewhere.count(rank)) {
        ready.push_back(rank);
        somebody_waits = somebody_waits || !absence.departed.count(rank);
      } else if (!absence.Has(rank)) {
        missing.push_back(rank);
      }
    }
    if (missing.empty() || !somebody_waits) continue;

    if (config_.stall_abort && *config_.stall_abort > Duration::zero() && age >= *config_.stall_abort) {
      std::string who = DescribeRanks(missing);
      if (missing.size() == 1) who += " (host " + config_.host_names[missing.front()] + ")";
      finding.abort =
          Result(Code::kStall, ronde::Describe(entry.definition()) + ": ready on " + DescribeRanks(ready) + ", but " +
                                   who + " did not submit it within " + SecondsText(*config_.stall_abort));
      return finding;
    }
    if (entry.next_warning == Duration::zero()) entry.next_warning = config_.stall_warning;
    bool warn = age >= entry.next_warning;
    bool may_abort = !config_.stall_abort && age >= kDefaultStallAbort;
    if (!warn && !may_abort) continue;
    bool answered = answers_fresh &&
                    std::all_of(missing.begin(), missing.end(), [&](int rank) { return answers_.count(rank) > 0; });
    if (!answered && !(answers_fresh && now - asked_at_ >= kAnswerTime)) {
      want_answers = true;
      continue;
    }
    if (warn) {
      finding.warnings.push_back(Describe(entry, ready, missing, now));
      entry.next_warning = age * 2;
    }
    if (may_abort) {
      bool all_blocked = std::all_of(missing.begin(), missing.end(), [&](int rank) {
        auto found = answers_.find(rank);
        return found != answers_.end() && found->second.blocked;
      });
      if (all_blocked || age >= kDefaultAbortComputing) {
        finding.abort = Result(Code::kStall, Describe(entry, ready, missing, now));
        return finding;
      }
    }
  }
  if (want_answers && !asking_) {
    asking_ = true;
    asked_at_ = now;
    answers_.clear();
    finding.ask = true;
  } else if (!want_answers) {
    asking_ = false;
  }
  return finding;
}

std::string StallWatch::Describe(const PendingEntry& entry, const std::vector<int>& ready,
                                 const std::vector<int>& missing, TimePoint now) const {
  std::string text = ronde::Describe(entry.definition()) + " has waited " + SecondsText(now - entry.since) +
                     ": ready on " + DescribeRanks(ready) + "; missing: ";
  for (std::size_t i = 0; i < missing.size(); ++i) {
    int rank = missing[i];
    auto answer = answers_.find(rank);
    text += (i ? ", " : "") + std::string("rank ") + std::to_string(rank) + " (host " + config_.host_names[rank] +
            ": " + (answer == answers_.end() ? "no answer" : answer->second.where) + ")";
  }
  return text;
}

}  // namespace ronde
