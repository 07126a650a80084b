#include "engine/inbox.h"

namespace ronde {

Result Inbox::Submit(Submission submission) {
  std::lock_guard lock(mutex_);
  if (!closed_.ok()) return closed_;
  waiting_.submissions.push_back(std::move(submission));
  return Ok();
}

void Inbox::Finished(SetId set, std::uint64_t number) {
  std::lock_guard lock(mutex_);
  waiting_.finished.emplace_back(set, number);
}

void Inbox::Fail(const Result& failure, bool final) {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return;
  failure_ = waiting_.failure = failure;
  waiting_.final_failure = final;
}

void Inbox::Leave() {
  std::lock_guard lock(mutex_);
  if (leave_) return;
  leave_ = waiting_.leave = true;
}

void Inbox::Close(const Result& why) {
  std::lock_guard lock(mutex_);
  if (closed_.ok()) closed_ = why;
}

void Inbox::CloseFinally(const Result& why) {
  std::lock_guard lock(mutex_);
  closed_ = why;
}

Result Inbox::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

bool Inbox::empty() const {
  std::lock_guard lock(mutex_);
  return waiting_.empty();
}

void Inbox::Take(Taken* taken) {
  taken->submissions.clear();
  taken->finished.clear();
  taken->leave = false;
  taken->failure = Ok();
  std::lock_guard lock(mutex_);
  std::swap(*taken, waiting_);
}

}  // namespace ronde
