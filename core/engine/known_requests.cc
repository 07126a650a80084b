#include "engine/known_requests.h"

#include "engine/checks.h"

namespace ronde {

const DefinitionPtr* KnownRequests::Find(const Request& request) const {
  auto found = known_.find(Name{request.set, request.op, request.name});
  if (found == known_.end() || (*found)->id == 0 || !Matches(request, (*found)->definition)) return nullptr;
  return &*found;
}

void KnownRequests::Keep(const DefinitionPtr& definition) {
  known_.erase(definition);
  // What is in use comes back with its next submission; names that were used once do not.
  if (static_cast<std::int64_t>(known_.size()) >= capacity_) known_.clear();
  if (capacity_ > 0) known_.insert(definition);
}

}  // namespace ronde
